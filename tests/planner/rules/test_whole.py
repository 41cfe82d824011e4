"""Splits that no rule offers: XLA gathers an operand whole for them, is wrong, or sends on most of each shard.

A failure means XLA was mended.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from shardwright.planner.rules import Factor
from shardwright.planner.xla_version import xla_version
from shardwright.plans.shardings import Mesh
from tests.planner.rules.rule_cases import Trial, cases_of
from tests.planner.rules.rule_programs import f32, hlo_text, s32
from tests.planner.rules.rule_texts import TEXTS
from tests.planner.rules.rule_validator import Verdict, judge, partition_text


@dataclass(frozen=True)
class Split:
    """Dimensions of an instruction's operand and result leaves, split over four devices, and how it is reduced."""

    text: str
    opcode: str
    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]
    reduction: str | None = None


def _smooth(x: jax.Array) -> jax.Array:
    return jnp.sin(lax.reduce_window(x, -jnp.inf, lax.max, (1, 3), (1, 1), "SAME")).sum()


_PROGRAMS = {
    "largest windows": (jax.grad(_smooth), (f32(4, 8),)),
    "largest above a half": (lambda x: lax.reduce(x, 0.5, lax.max, (1,)), (f32(8, 4),)),
    "dynamic slice": (lambda x, i: lax.dynamic_slice(x, (0, i), (4, 4)), (f32(4, 8), s32())),
    "dynamic update": (lambda x, y, i: lax.dynamic_update_slice(x, y, (0, i)), (f32(4, 8), f32(4, 4), s32())),
}

GATHERED = {
    "normalization by features": Split("normalize", "batch-norm-inference", (3, 0, 0, 0, 0), (3,)),
    "normalization along the batch": Split("normalize", "batch-norm-inference", (0, *[None] * 4), (0,)),
    "normalization in training": Split("normalize_training", "batch-norm-training", (3, 0, 0), (3, 0, 0)),
    "gradient of normalization": Split("normalize_gradient", "batch-norm-grad", (3, 0, 0, 0, 3), (3, 0, 0)),
    "dynamic update": Split("dynamic update", "dynamic-update-slice", (1, 1, None, None), (1,)),
}

WRONG = {
    "dynamic slice": Split("dynamic slice", "dynamic-slice", (1, None, None), (1,)),
    "borders of the largest": Split("largest windows", "select-and-scatter", (1, 1, None), (1,)),
    "initial value that counts": Split("largest above a half", "reduce", (1, None), (None,), "maximum"),
    "running sum": Split("prefix", "reduce-window", (1, None), (1,)),
}


def _verdict(split: Split) -> Verdict:
    text = TEXTS.get(split.text) or hlo_text(_PROGRAMS[split.text])
    cases = cases_of({"whole": text}, without_factors=True)
    (case,) = [case for case in cases if case.instruction.opcode == split.opcode]
    factor = Factor(name="split", size=4, operands=split.operands, results=split.results, reduction=split.reduction)
    assert not any(f.operands == split.operands and f.results == split.results for f in case.factors)
    (verdict,) = judge([Trial(case, {"x": factor}, Mesh.of({"x": 4}))])
    return verdict


def _gathers_whole(verdict: Verdict) -> bool:
    whole = verdict.trial.case.instruction.operands[0].shape.size_bytes
    return ("all-gather", whole) in {(moved.kind, moved.size_bytes) for moved in verdict.moved}


@pytest.mark.parametrize("split", GATHERED.values(), ids=GATHERED)
def test_xla_gathers(split: Split) -> None:
    verdict = _verdict(split)
    assert _gathers_whole(verdict), str(verdict)


def test_a_top_k_call_splits_beside_an_idle_axis_too() -> None:
    """XLA gathers where an axis is idle; the call is computed in parts then."""
    (case,) = cases_of({"call": TEXTS["largest_call"]}, without_factors=True)
    assert not case.factors
    batch = Factor(name="batch", size=4, operands=(0,), results=(0, 0))
    (alone,) = judge([Trial(case, {"x": batch}, Mesh.of({"x": 4}))])
    (beside,) = judge([Trial(case, {"x": batch, "y": None}, Mesh.of({"x": 4, "y": 2}))])
    assert not [verdict for verdict in (alone, beside) if verdict.wrong]
    assert [verdict.collectives for verdict in (alone, beside)] == [(), ()]


@pytest.mark.parametrize("split", WRONG.values(), ids=WRONG)
def test_xla_is_wrong(split: Split) -> None:
    verdict = _verdict(split)
    if split.text == "dynamic slice" and xla_version() >= (0, 12):  # right by now, and no gain
        assert _gathers_whole(verdict), str(verdict)
    else:
        assert verdict.wrong


@pytest.mark.parametrize(
    ("shape", "target", "parts", "rows"),
    [
        ((4, 400), (4, 25, 16), 4, [36]),
        ((4, 400), (4, 25, 16), 8, [50, 48]),
        ((4, 25, 16), (4, 400), 4, [36]),
        ((4, 25, 16), (4, 400), 8, [64, 34]),
    ],
)
def test_heads_that_do_not_divide_drift_apart(
    shape: tuple[int, ...], target: tuple[int, ...], parts: int, rows: list[int]
) -> None:
    """25 heads of 16: seven a device of four are 112 columns, of the merged dimension it has 100. The last but one
    lacks three times the difference, which comes from as many neighbours as it takes."""
    text = hlo_text((lambda x: x.reshape(target), (f32(*shape),)))
    (case,) = [case for case in cases_of({"heads": text}) if case.instruction.opcode == "reshape"]
    (heads,) = [factor for factor in case.factors if factor.size == 25]
    assert not heads.may_pad
    padded = replace(heads, may_pad=True)
    (verdict,) = judge([Trial(case, {"x": padded}, Mesh.of({"x": parts}))])
    assert not verdict.wrong
    assert [(each.kind, each.size_bytes) for each in verdict.moved] == [("collective-permute", 4 * 4 * n) for n in rows]


@pytest.mark.parametrize("program", ["random_bits", "random_philox"])
def test_xla_draws_all_numbers_on_every_device(program: str) -> None:
    (case,) = cases_of({program: TEXTS[program]}, without_factors=True)
    factor = Factor(name="split", size=4, operands=(None,), results=(None, 0))
    text = partition_text(Trial(case, {"x": factor}, Mesh.of({"x": 4})))
    assert re.search(r"u32\[4,8\]\S*\) rng-bit-generator", text), text
