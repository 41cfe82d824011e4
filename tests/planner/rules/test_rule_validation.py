"""A sample of the brute-force validation: XLA computes what the factors say, with the collectives they promise.

`oracles/rules.py` tries everything; here one axis of four devices, and two axes of two devices
with each factor once beside an idle axis and a few pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest

from shardwright.planner.rules.elementwise import BINARY, UNARY
from shardwright.plans.shardings import Mesh
from tests.planner.rules.rule_cases import Case, Trial, cases_of
from tests.planner.rules.rule_programs import MODELS, hlo_text, operations
from tests.planner.rules.rule_texts import TEXTS
from tests.planner.rules.rule_validator import Verdict, judge_all

ONE, TWO, THREE = Mesh.of({"x": 4}), Mesh.of({"x": 2, "y": 2}), Mesh.of({"x": 3})


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return cases_of({name: hlo_text(program) for name, program in operations().items()} | TEXTS)


@pytest.fixture(scope="module")
def model_cases() -> list[Case]:
    """What training steps hold beside elementwise operations, whose rules do not depend on attributes."""
    programs = {name: hlo_text(MODELS[name]()) for name in ("gpt2", "cnn", "lstm", "vit")}
    skipped = {*UNARY, *BINARY, "broadcast", "constant", "iota", "select", "clamp"}
    return [case for case in cases_of(programs) if case.instruction.opcode not in skipped]


def _every_factor(cases: list[Case], mesh: Mesh) -> Iterator[Trial]:
    return (Trial(case, assignment, mesh) for case in cases for assignment in case.assignments(mesh))


def _sample(cases: list[Case], share: int) -> Iterator[Trial]:
    """Every `share`th assignment of each case, starting elsewhere for each, so that all kinds occur."""
    for number, case in enumerate(cases):
        for assignment in list(case.assignments(TWO))[number % share :: share]:
            yield Trial(case, assignment, TWO)


def _assert_all_right(verdicts: list[Verdict]) -> None:
    assert len(verdicts) > 100
    wrong = [verdict for verdict in verdicts if verdict.wrong]
    assert not wrong, "\n".join(map(str, wrong))
    extra = [verdict for verdict in verdicts if verdict.extra or verdict.absent]
    assert not extra, "\n".join(map(str, extra))
    # A contracted factor that needs no all-reduce was not split at all.
    idle = [verdict for verdict in verdicts if verdict.trial.summed and "all-reduce" not in verdict.collectives]
    assert not idle, "\n".join(map(str, idle))


@pytest.mark.dear
def test_every_factor_on_one_axis(cases: list[Case]) -> None:
    _assert_all_right(judge_all(_every_factor(cases, ONE)))


@pytest.mark.dear
def test_factors_on_two_axes(cases: list[Case]) -> None:
    _assert_all_right(judge_all(_sample(cases, 8)))


@pytest.mark.dear
def test_factors_of_models(model_cases: list[Case]) -> None:
    _assert_all_right(judge_all(_sample(model_cases, 12)))


@pytest.mark.dear
def test_factors_that_an_axis_does_not_divide(cases: list[Case]) -> None:
    """Padding holds NaNs here: sums are right only if XLA masks it."""
    trials = [Trial(case, each, THREE) for case in cases for each in case.assignments(THREE, uneven=True)]
    assert any(trial.summed for trial in trials[::6])
    _assert_all_right(judge_all(trials[::6]))


def test_sampling_meets_every_kind_of_assignment(cases: list[Case]) -> None:
    kinds = {tuple(factor is not None for factor in trial.assignment.values()) for trial in _sample(cases, 8)}
    assert kinds == set(product((True, False), repeat=2)) - {(False, False)}


def test_scattered_sums_need_nothing_but_their_reduction(model_cases: list[Case]) -> None:
    """Also beside an idle axis, where XLA given the scattered result alone adds permutes."""
    dots = [case for case in model_cases if case.instruction.opcode in ("dot", "reduce")]
    trials = [scattered for trial in _sample(dots, 6) for scattered in trial.scattered()]
    _assert_all_right(judge_all(trials[::2]))
