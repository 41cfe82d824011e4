"""Where partial sums may go: the table against the definition, and against what XLA makes of it."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.hlo import Instruction, parse
from shardwright.planner.rules import Factor, linear, rule_of
from shardwright.planner.rules.linear import (
    XLA_KEEPS_SUMS,
    LinearWay,
    becomes_partial,
    is_zero,
    linear_ways,
    why_not_partial,
)
from shardwright.planner.xla_version import xla_version
from shardwright.plans.shardings import Mesh
from tests.planner.linear_trials import Trial, instructions_of, judge, judge_all, trials_of
from tests.planner.rules.rule_programs import hlo_text, operations

MESHES = [Mesh.of({"x": 4}), Mesh.of({"x": 2, "y": 2}), Mesh.of({"x": 2, "y": 2, "z": 2})]


@pytest.fixture(scope="module")
def instructions() -> list[Instruction]:
    return list(instructions_of({name: hlo_text(program) for name, program in operations().items()}))


@pytest.mark.dear
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_xla_takes_partial_sums_through(instructions: list[Instruction], mesh: Mesh) -> None:
    """Of each opcode some trials; `make validate-linear` tries all."""
    trials = [trial for each in instructions for trial in trials_of(each, mesh)]
    verdicts = judge_all(sample_values(trials, per_opcode=2))
    assert not [str(verdict) for verdict in verdicts if not (verdict.is_exact and verdict.is_cheap)]


def sample_values(trials: list[Trial], per_opcode: int) -> list[Trial]:
    """Trials spread evenly over those of each opcode."""
    total = Counter(trial.instruction.opcode for trial in trials)
    seen, result = Counter[str](), []
    for trial in trials:
        opcode = trial.instruction.opcode
        step = max(1, total[opcode] // per_opcode)
        if seen[opcode] % step == 0:
            result.append(trial)
        seen[opcode] += 1
    return result


def test_what_is_reduced_at_once_is_wrong_when_kept(instructions: list[Instruction], earlier_xla: None) -> None:
    """Wrong before XLA kept such sums, right since: a failure means that `XLA_KEEPS_SUMS` is another version."""
    mesh = MESHES[0]
    denied = [each for each in instructions if why_not_partial(each) and not is_complex(each)]
    assert {each.opcode for each in denied} == {"gather"}
    instruction = next(each for each in denied if sums(each))
    (verdict,) = judge([Trial(instruction, mesh, {"x": sums(instruction)[0]})])
    assert verdict.is_exact == (xla_version() >= XLA_KEEPS_SUMS), verdict


def test_what_xla_keeps_by_now_is_offered(instructions: list[Instruction], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "xla_version", lambda: XLA_KEEPS_SUMS)
    assert not [each for each in instructions if why_not_partial(each) and not is_complex(each)]


def test_the_sum_of_a_grouped_kernel_may_stay_partial(instructions: list[Instruction]) -> None:
    """Devices compute their parts of it in a manual computation."""
    grouped = [each for each in instructions if each.get("batch_group_count", 1) > 1 and sums(each)]
    trials = [Trial(each, mesh, {"x": sums(each)[0]}) for each in grouped for mesh in MESHES[:2]]
    assert len(trials) > 10
    assert not [str(verdict) for verdict in judge_all(trials[::6]) if not (verdict.is_exact and verdict.is_cheap)]


def sums(instruction: Instruction) -> list[Factor]:
    return [f for f in rule_of(instruction).factors if f.contracted and f.size % 4 == 0]


def test_nothing_partial_beside_rows_that_are_looked_up(instructions: list[Instruction]) -> None:
    """Wrong before XLA kept such sums, right since: a failure means that `XLA_KEEPS_SUMS` is another version."""
    lookup = next(each for each in instructions if each.opcode == "gather" and sums(each))
    chosen = {"x": LinearWay(frozenset({0})), "y": sums(lookup)[0]}
    (verdict,) = judge([Trial(lookup, MESHES[1], chosen, ("y",))])
    assert verdict.is_exact == (xla_version() >= XLA_KEEPS_SUMS), verdict


def test_no_complex_value_is_partial() -> None:
    """XLA ends its process on some of them, the TPU compiler on others."""
    assert not becomes_partial("c64")
    text = jax.jit(lambda a, b: jnp.sum(a @ b, 0)).lower(*[jax.ShapeDtypeStruct((8, 8), jnp.complex64)] * 2)
    of_complex = [each for each in parse(text.as_text("hlo")).entry if is_complex(each) and each.opcode != "parameter"]
    assert {"dot", "reduce"} <= {each.opcode for each in of_complex}
    assert all(map(why_not_partial, of_complex))


def is_complex(instruction: Instruction) -> bool:
    return any(leaf.element_type.startswith("c") for leaf in instruction.shape.leaves)


# ---- the table -------------------------------------------------------------------


def ways(function: object, *shapes: tuple[tuple[int, ...], str]) -> dict[str, list[list[int]]]:
    """Ways by opcode of the instructions of a lowered function, each sorted."""
    avals = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    module = parse(jax.jit(function).lower(*avals).as_text("hlo"))  # type: ignore[arg-type]
    entries: dict[str, list[list[int]]] = {}
    for instruction in module.instructions():
        entries[instruction.opcode] = sorted(sorted(way.operands) for way in linear_ways(instruction))
    return entries


F32 = ((8, 8), "float32")


@pytest.mark.parametrize(
    ("function", "dtype", "opcode", "expected"),
    [
        (lambda a: a.astype(jnp.float32), "bfloat16", "convert", [[0]]),
        (lambda a: a.astype(jnp.float32), "float16", "convert", [[0]]),
        (lambda a: a.astype(jnp.bfloat16), "float32", "convert", []),
        (lambda a: a.astype(jnp.bfloat16), "float16", "convert", []),
        (lambda a: a.astype(jnp.float16), "bfloat16", "convert", []),
        (lambda a: a.astype(jnp.float32), "int32", "convert", []),
        (lambda a: a.astype(jnp.int32), "float32", "convert", []),
        (lambda a: a.astype(jnp.int16), "int8", "convert", []),
        (lambda a: jax.lax.div(a, a), "int32", "divide", []),
        (lambda a: jax.lax.div(a, a), "float32", "divide", [[0]]),
        (lambda a: a * a, "int32", "multiply", [[0], [1]]),
        (lambda a: a | a, "int32", "or", []),
        (lambda a: jax.lax.max(a, a), "float32", "maximum", []),
        (lambda a: jax.lax.pad(a, np.float32(0), [(1, 1, 0), (0, 0, 0)]), "float32", "pad", [[0]]),
        (lambda a: jax.lax.pad(a, np.float32(1), [(1, 1, 0), (0, 0, 0)]), "float32", "pad", []),
        (lambda a: jax.lax.reduce(a, np.float32(0), jax.lax.add, (0,)), "float32", "reduce", [[0]]),
        (lambda a: jax.lax.reduce(a, np.float32(1), jax.lax.add, (0,)), "float32", "reduce", []),
        (lambda a: jax.lax.reduce(a, np.float32(0), jax.lax.max, (0,)), "float32", "reduce", []),
        (lambda a: jax.lax.select(a > 0, a, -a), "float32", "select", [[1, 2]]),
        (jnp.sort, "float32", "sort", []),
        (lambda a: a.at[np.array([1])].set(a[0]), "float32", "scatter", []),
        (lambda a: a.at[np.array([1])].add(a[0]), "float32", "scatter", [[0, 2]]),
        (lambda a: (a > 0) & (a < 1), "float32", "and", []),
        (lambda a: jax.lax.reduce_precision(a, 8, 7), "float32", "reduce-precision", []),
    ],
)
def test_the_table(function: object, dtype: str, opcode: str, expected: list[list[int]]) -> None:
    assert ways(function, ((8, 8), dtype))[opcode] == expected


def test_handing_on_is_no_way() -> None:
    result = ways(lambda a: jax.lax.scan(lambda c, _: (c + a, None), a, None, length=3)[0], F32)
    assert result["while"] == result["tuple"] == result["get-tuple-element"] == result["parameter"] == []


@pytest.mark.parametrize(
    ("literal", "shape", "expected"),
    [
        ("0", "f32[]", True), ("-0", "f32[]", True), ("0.0e+00", "f32[]", True), ("0e5", "f32[]", True),
        ("1e-10", "f32[]", False), ("nan", "f32[]", False), ("inf", "f32[]", False), ("10", "s32[]", False),
        ("{0, 0}", "f32[2]", True), ("{0, 1}", "f32[2]", False), ("(0, 0)", "c64[]", True), ("(0, 1)", "c64[]", False),
        ("false", "pred[]", False), ("{ { 0, 0.0e+00 }, { -0, 0 } }", "f32[2,2]", True), ("{}", "f32[0]", False),
    ],
)  # fmt: skip
def test_zero(literal: str, shape: str, expected: bool) -> None:
    text = f"HloModule z\n\nENTRY main {{\n  ROOT c = {shape} constant({literal})\n}}\n"
    assert is_zero(parse(text).entry.root) is expected


def test_copies_of_zero() -> None:
    text = """HloModule z

ENTRY main {
  c = f32[] constant(0)
  b = f32[4,2]{1,0} broadcast(c), dimensions={}
  t = f32[2,4]{1,0} transpose(b), dimensions={1,0}
  n = f32[2,4]{1,0} exponential(t)
  ROOT out = (f32[2,4]{1,0}, f32[2,4]{1,0}) tuple(t, n)
}
"""
    of = {each.name: each for each in parse(text).instructions()}
    assert [name for name in of if is_zero(of[name])] == ["c", "b", "t"]
    assert linear_ways(of["t"]) == (LinearWay(frozenset()), LinearWay(frozenset({0})))
