"""Kernel gradients whose images are split with borders: XLA sums them itself, and believes no mark of a partial sum."""

from __future__ import annotations

import pytest

from shardwright.planner.rules import Factor, rule_of
from shardwright.planner.rules.linear import XLA_KEEPS_SUMS, why_not_partial
from shardwright.planner.strategies.expansion import enumerate_strategies, stages_of_sum
from shardwright.planner.strategies.legality import rule_problems
from shardwright.planner.xla_version import xla_version
from shardwright.plans.plan import InstructionPlan
from shardwright.plans.shardings import Mesh, TensorSharding
from tests.planner import linear_trials
from tests.planner.rules.rule_cases import Case, Trial, cases_of, trial_shardings
from tests.planner.rules.rule_programs import hlo_text, operations
from tests.planner.rules.rule_validator import judge_all

ONE, TWO = Mesh.of({"x": 4}), Mesh.of({"x": 2, "y": 2})


def gradient_of(program: str) -> Case:
    cases = cases_of({program: hlo_text(operations()[program])})
    return next(case for case in cases if "c0" in names(case))


@pytest.fixture(scope="module", params=["convolution_nhwc_gradients", "convolution_strided_gradients"])
def gradient(request: pytest.FixtureRequest) -> Case:
    return gradient_of(request.param)


def names(case: Case) -> dict[str, Factor]:
    return {factor.name: factor for factor in case.factors}


@pytest.mark.parametrize("program", ["convolution_nhwc_gradients", "convolution_valid_gradients"])
def test_a_sum_that_is_kept_is_wrong(program: str) -> None:
    """Where none is wrong any more, lift the halo's part of `why_not_partial`. (Other programs abort in Shardy.)"""
    gradient = gradient_of(program)
    batch, image = names(gradient)["i"], names(gradient)["c0"]
    trials = [
        linear_trials.Trial(gradient.instruction, ONE, {"x": image}),
        linear_trials.Trial(gradient.instruction, TWO, {"x": batch, "y": image}, ("y",)),
    ]
    verdicts = [verdict for trial in trials for verdict in linear_trials.judge([trial])]
    padded = program == "convolution_nhwc_gradients"
    if padded and xla_version() >= XLA_KEEPS_SUMS:
        assert all(verdict.is_exact for verdict in verdicts), verdicts
    else:
        assert not verdicts[0].is_exact, verdicts[0]
        assert not (padded and verdicts[1].is_exact), verdicts[1]


def test_scattered_over_one_axis_and_whole_over_the_other(gradient: Case) -> None:
    trial = Trial(gradient, {"x": names(gradient)["i"], "y": names(gradient)["c0"]}, TWO)
    trials = [trial, *trial.scattered()]
    assert {axis for each in trials for axis, _ in each.scatter} == {"x", "y"}
    verdicts = judge_all(trials)
    assert not [str(verdict) for verdict in verdicts if verdict.wrong]
    for verdict in verdicts:  # over the image and over the batch, one after the other
        assert [kind for kind in verdict.collectives if kind == "all-reduce"] == ["all-reduce"] * 2, verdict


def test_nothing_stays_partial_beside_it(gradient: Case) -> None:
    instruction, factors = gradient.instruction, names(gradient)
    assert why_not_partial(instruction, [factors["i"]]) is None
    strategies = list(enumerate_strategies(instruction, rule_of(instruction), TWO))
    entries = {tuple(choice.factor and choice.factor.name for choice in each.choices): each for each in strategies}
    images = [each for taken, each in entries.items() if "c0" in taken]
    assert images
    assert not [each for each in images if any(lies.unreduced for lies in each.results)]
    assert entries["i", "c0"].summed_first == ("y",)
    assert [lies.unreduced for (lies,) in stages_of_sum(entries["i", "c0"])] == [("x", "y"), ("x",)]
    assert [lies.unreduced for (lies,) in stages_of_sum(entries["c0", "c0"])] == [("x", "y")]


def test_the_checker_refuses_a_partial_result(gradient: Case) -> None:
    trial = Trial(gradient, {"x": names(gradient)["i"], "y": names(gradient)["c0"]}, TWO)
    reduced = make_plan(trial, TensorSharding(((),) * 4), ("x", "y"))
    assert rule_problems(gradient.instruction, reduced, TWO) == ()
    for unreduced, partial in ((("x",), ("y",)), (("y",), ("x",)), (("x", "y"), ())):
        entry = make_plan(trial, TensorSharding(((),) * 4, unreduced), partial)
        (problem,) = rule_problems(gradient.instruction, entry, TWO)
        assert "split with borders" in problem


def make_plan(trial: Trial, result: TensorSharding, partial: tuple[str, ...]) -> InstructionPlan:
    instruction = trial.case.instruction
    operands = tuple((lies,) for lies in trial_shardings(trial, operands=True))
    return InstructionPlan(
        computation="main",
        name=instruction.name,
        opcode=instruction.opcode,
        operands=operands,
        result=(result,),
        partial=partial,
    )
