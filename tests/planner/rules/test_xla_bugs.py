"""What is denied is really wrong, or moves what nothing asks for, and is denied. A failure of "is wrong" or "moves"
means that XLA was mended: lift the denial."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import pytest

from shardwright.planner.rules import Factor, find_xla_bug
from shardwright.plans.shardings import Mesh
from tests.planner.rules.rule_cases import Case, Trial, cases_of, shares
from tests.planner.rules.rule_programs import hlo_text, operations
from tests.planner.rules.rule_validator import judge, judge_all

MESH = Mesh.of({"x": 2, "y": 2})
THREE = Mesh.of({"x": 2, "y": 2, "z": 2})


@dataclass(frozen=True)
class Defect:
    """A convolution of a program, by its number there, with what its axes take."""

    program: str
    number: int
    x: str
    y: str | None
    word: str  # of the reason


DEFECTS = {
    "image rows": Defect("convolution_nhwc_gradients", -1, "c0", None, "kernel gradient"),
    "image rows, output features": Defect("convolution_valid_gradients", -1, "o", "c1", "kernel gradient"),
    "image with borders": Defect("convolution_nhwc", 0, "s0", "o", "output features"),
    "patches": Defect("convolution_patches", 0, "s0", "o", "output features"),
    "patches, other axis": Defect("convolution_patches", 0, "o", "s1", "output features"),
}


def _case(program: str, opcode: str, number: int = 0) -> Case:
    cases = cases_of({program: hlo_text(operations()[program])})
    return [case for case in cases if case.instruction.opcode == opcode][number]


def _trial(defect: Defect, mesh: Mesh) -> Trial:
    case = _case(defect.program, "convolution", defect.number)
    factors: dict[str | None, Factor | None] = {None: None, **{factor.name: factor for factor in case.factors}}
    return Trial(case, {"x": factors[defect.x], "y": factors[defect.y]}, mesh)


@pytest.mark.parametrize("defect", DEFECTS.values(), ids=DEFECTS)
def test_xla_is_wrong(defect: Defect) -> None:
    (verdict,) = judge([_trial(defect, MESH)])
    assert verdict.wrong, f"XLA is right by now: {verdict}"


@pytest.mark.parametrize("defect", DEFECTS.values(), ids=DEFECTS)
def test_is_denied(defect: Defect) -> None:
    trial = _trial(defect, MESH)
    reason = find_xla_bug(trial.case.instruction, trial.assignment, MESH)
    assert reason is not None
    assert defect.word in reason


def test_an_axis_left_out_is_idle() -> None:
    trial = _trial(DEFECTS["image rows"], MESH)
    assert find_xla_bug(trial.case.instruction, {"x": trial.assignment["x"]}, MESH)


def test_an_idle_axis_of_one_device_does_no_harm() -> None:
    mesh = Mesh.of({"x": 4, "y": 1})
    trial = _trial(DEFECTS["image rows"], mesh)
    assert find_xla_bug(trial.case.instruction, trial.assignment, mesh) is None
    (verdict,) = judge([trial])
    assert not verdict.wrong, verdict


def test_other_opcodes_are_not_denied() -> None:
    (case, *_) = cases_of({"dot": hlo_text(operations()["dot_matrix"])})
    assert find_xla_bug(case.instruction, {"x": case.factors[0], "y": None}, MESH) is None


LOOKUPS = {"embedding": "gather", "embedding_gradient": "scatter", "take_along_axis": "gather"}


@pytest.mark.dear
@pytest.mark.parametrize("program", LOOKUPS)
def test_a_lookup_beside_an_idle_first_axis_is_moved_and_denied(program: str) -> None:
    """Of all ways to lay a lookup's factors on three axes, those are denied that move more than they promise."""
    case = _case(program, LOOKUPS[program])
    ways = (
        Trial(case, dict(zip("xyz", taken, strict=True)), THREE)
        for taken in product((None, *case.factors), repeat=3)
        if any(taken)
    )
    trials = [
        trial
        for trial in ways
        if not any(factor.size % parts for factor, parts in shares(trial.assignment, THREE).items())
    ]
    verdicts = judge_all(trials, batch=16)
    assert len(verdicts) == len(trials) > 10
    for verdict in verdicts:
        assert not verdict.wrong, verdict
        bug = find_xla_bug(case.instruction, verdict.trial.assignment, THREE)
        assert bool(verdict.extra) == (bug is not None), verdict
