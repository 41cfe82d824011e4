"""Which reductions run as one: by hand, and beside XLA:CPU's."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from shardwright.cost import hardware_profile
from shardwright.cost.moves.tilings import along
from shardwright.cost.peak.all_reduce_combiner import all_reduce_mark, combine_reductions, limits_of
from shardwright.plans.shardings import Mesh
from tests.cost.one_device import program_of

MESH = Mesh.of({"x": 2, "y": 2})

#: `b` needs `a`; `e` needs `d`.
REDUCED = """HloModule reduced

most {{
  l = f32[] parameter(0)
  r = f32[] parameter(1)
  ROOT m = f32[] maximum(l, r)
}}

ENTRY main {{
  x = f32[64]{{0}} parameter(0)
  a = f32[64]{{0}} sine(x)
  after_a = f32[64]{{0}} cosine(a)
  b = f32[64]{{0}} tanh(after_a)
  c = f32[64]{{0}} floor(x)
  d = f32[64]{{0}} ceil(x)
  after_d = f32[64]{{0}} cosine(d)
  e = f32[64]{{0}} tanh(after_d)
  zero = f32[] constant(0)
  largest = f32[] reduce(x, zero), dimensions={{0}}, to_apply=most
  ROOT out = (f32[64]{{0}}, f32[64]{{0}}, f32[64]{{0}}, f32[64]{{0}}, f32[]) tuple({results})
}}
"""


def combine_payloads(
    results: str, over: dict[str, str], *, scattered: str = "", most_bytes: float = math.inf
) -> list[set[str]]:
    """Names of what runs as one. results: in order. over: by name, the mesh axis that nodes are reduced over; those of
    `scattered` are reduce-scatters. most_bytes: of results that run as one."""
    program = program_of(REDUCED.format(results=results))
    for node, instruction in enumerate(program.instructions):
        if instruction.name in over:
            program.opcodes[node] = "reduce-scatter" if instruction.name in scattered else "all-reduce"
            atoms = along((over[instruction.name],), MESH)
            program.marks[node] = all_reduce_mark(instruction, "f32", atoms, node)
    limits = {"all-reduce": most_bytes, "reduce-scatter": most_bytes}
    return [{program.instructions[node].name for node in group} for group in combine_reductions(program, limits)]


def combine_by_xla(results: str) -> list[set[str]]:
    """The same of the all-reduces `a`, `b` and `c`, as XLA:CPU combines them."""

    def step(x: jax.Array) -> list[jax.Array]:
        a = jax.lax.psum(jnp.sin(x), "x")
        entries = {"a": a, "b": jax.lax.psum(jnp.tanh(jnp.cos(a)), "x"), "c": jax.lax.psum(jnp.floor(x), "x")}
        return [entries[name] for name in results.split(", ")]

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("x",))
    whole = PartitionSpec()
    parallel = jax.shard_map(step, mesh=mesh, in_specs=PartitionSpec("x"), out_specs=[whole] * 3)
    text = jax.jit(parallel).lower(jax.ShapeDtypeStruct((256,), "f4")).compile().as_text()
    operands = [line.split(" all-reduce(")[1].split(")")[0] for line in text.splitlines() if " all-reduce(" in line]
    of = {"wrapped_sine": "a", "tanh": "b", "floor": "c"}
    groups = [{name for function, name in of.items() if function in each} for each in operands]
    return [group for group in groups if len(group) > 1]


@pytest.mark.parametrize("results", ["a, b, c", "b, c, a", "c, a, b", "c, b, a"])
def test_what_is_behind_one_that_must_wait_is_left_for_later(results: str) -> None:
    """`c` waits for nothing; behind `b` it is not combined with `a`, which stands first."""
    expected = [{"b", "c"}] if results.index("b") < results.index("c") else [{"a", "c"}]
    result = combine_payloads(f"{results}, d, largest", dict.fromkeys("abc", "x"))
    assert result == combine_by_xla(results) == expected


def test_only_like_reductions_over_the_same_devices_run_as_one() -> None:
    assert combine_payloads("a, b, c, d, largest", {"a": "x", "b": "y", "c": "x"}) == [{"a", "c"}]
    assert combine_payloads("a, b, c, d, largest", {"c": "x", "largest": "x"}) == []


def test_reduce_scatters_run_as_one_apart_from_all_reduces() -> None:
    over = dict.fromkeys("acd", "x")
    assert combine_payloads("a, b, c, d, largest", over, scattered="acd") == [{"a", "c", "d"}]
    assert combine_payloads("a, b, c, d, largest", over, scattered="ad") == [{"a", "d"}]


@pytest.mark.parametrize(
    ("most_bytes", "expected"), [(3 * 256, [{"a", "c", "d"}]), (2 * 256, [{"a", "c"}]), (256, []), (255, [])]
)
def test_no_more_run_as_one_than_a_limit_of_their_results_allows(most_bytes: float, expected: list[set[str]]) -> None:
    assert combine_payloads("a, b, c, d, largest", dict.fromkeys("acd", "x"), most_bytes=most_bytes) == expected


def test_each_compiler_has_its_limits() -> None:
    assert limits_of(hardware_profile("cpu")) == {"all-reduce": math.inf}
    assert limits_of(hardware_profile("a100")) == {"all-reduce": 30 << 20, "reduce-scatter": 30 << 20}
    assert limits_of(hardware_profile("tpu-v5e")) == {}


def test_what_was_combined_needs_what_each_of_it_does() -> None:
    """Once `a` and `e` are one, `b` needs it, and it needs `d`: these are not."""
    over = {"a": "x", "e": "x", "b": "y", "d": "y"}
    assert combine_payloads("a, c, e, b, largest", over) == [{"a", "e"}]
    assert combine_payloads("a, c, d, b, largest", {"a": "x", "b": "y", "d": "y"}) == [{"b", "d"}]
