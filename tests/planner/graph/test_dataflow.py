"""Dataflow: how often things run, and what loops, calls and branches make of values."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import pytest

from shardwright.hlo import Module, parse
from shardwright.planner.graph.dataflow import Dataflow, Node, build_dataflow


def names_of(flow: Dataflow, name: str) -> Node:
    return next(node for node in flow.nodes if node.instruction.name == name)


def loop(condition: str, step: str, first: int = 0, limit: int = 12) -> Module:
    return parse(f"""HloModule loop, entry_computation_layout={{(f32[16])->f32[16]}}

cond {{
  p = (s32[], f32[16]) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  limit = s32[] constant({limit})
  ROOT test = pred[] {condition}
}}

body {{
  q = (s32[], f32[16]) parameter(0)
  j = s32[] get-tuple-element(q), index=0
  one = s32[] constant(1)
  next = s32[] {step}
  v = f32[16] get-tuple-element(q), index=1
  w = f32[16] tanh(v)
  ROOT out = (s32[], f32[16]) tuple(next, w)
}}

ENTRY main {{
  x = f32[16] parameter(0)
  start = s32[] constant({first})
  init = (s32[], f32[16]) tuple(start, x)
  run = (s32[], f32[16]) while(init), condition=cond, body=body
  ROOT r = f32[16] get-tuple-element(run), index=1
}}
""")


@pytest.mark.parametrize(
    ("condition", "step", "first", "limit", "expected"),
    [
        ("compare(i, limit), direction=LT", "add(j, one)", 0, 12, 12),
        ("compare(limit, i), direction=GT", "add(one, j)", 2, 12, 10),
        ("compare(i, limit), direction=NE", "add(j, one)", 0, 7, 7),
        ("compare(i, limit), direction=LT", "add(j, one)", 12, 3, 0),
        ("compare(i, limit), direction=GT", "add(j, one)", 0, 12, None),
        ("compare(i, limit), direction=EQ", "add(j, one)", 0, 12, None),
        ("compare(i, limit), direction=LT", "subtract(one, j)", 0, 12, None),
    ],
)
def test_counts_of_a_loop(condition: str, step: str, first: int, limit: int, expected: int | None) -> None:
    flow = build_dataflow(loop(condition, step, first, limit))
    assert names_of(flow, "w").runs == (1 if expected is None else expected)
    assert bool(flow.notes) == (expected is None)


def test_loop_bodies_weigh_their_trips_and_carry_one_value() -> None:
    flow = build_dataflow(loop("compare(i, limit), direction=LT", "add(j, one)"))
    body = names_of(flow, "w")
    assert (body.weight, body.runs) == (12, 12)
    (carried,) = {use.source[0] for use in body.uses}
    assert flow.nodes[carried].is_value
    sources = {flow.nodes[use.source[0]].instruction.name: use.weight for use in flow.nodes[carried].uses}
    assert sources == {"x": 1.0, "w": 12.0}


def test_a_computation_called_twice_is_planned_once() -> None:
    flow = build_dataflow(
        parse("""HloModule twice, entry_computation_layout={(f32[16], f32[16])->(f32[16], f32[16])}

half {
  p = f32[16] parameter(0)
  ROOT t = f32[16] tanh(p)
}

ENTRY main {
  a = f32[16] parameter(0)
  b = f32[16] parameter(1)
  c = f32[16] call(a), to_apply=half
  d = f32[16] call(b), to_apply=half
  ROOT r = (f32[16], f32[16]) tuple(c, d)
}
""")
    )
    tanh = names_of(flow, "t")
    assert (tanh.weight, tanh.runs) == (2, 2)
    (parameter,) = (use.source[0] for use in tanh.uses)
    assert [flow.nodes[use.source[0]].instruction.name for use in flow.nodes[parameter].uses] == ["a", "b"]


def test_each_branch_is_taken_equally_often_and_counted_once() -> None:
    """Three branches in a loop of four trips; one of them calls a function that another branch calls too."""
    double = jax.jit(jnp.tanh)

    def choose(which: jax.Array, x: jax.Array) -> jax.Array:
        branches = [lambda y: double(jnp.sin(y)), double, jnp.exp]
        return jax.lax.fori_loop(0, 4, lambda i, y: jax.lax.switch(which, branches, y), x)

    text = jax.jit(choose).lower(jnp.int32(0), jnp.ones(16)).as_text("hlo")
    flow = build_dataflow(parse(text))
    entries = {}
    for node in flow.nodes:
        weight, runs = entries.get(node.instruction.opcode, (0.0, 0))
        entries[node.instruction.opcode] = weight + node.weight, runs + node.runs
    assert entries["sine"] == (pytest.approx(4 / 3), 4)
    assert entries["exponential"] == (pytest.approx(4 / 3), 4)
    assert entries["tanh"] == (pytest.approx(8 / 3), 8)


def chain(length: int, outputs: int) -> str:
    """`length` instructions, `outputs` updated arguments."""
    kind = "f32[8]"
    inside = ", ".join([kind] * outputs)
    aliases = ", ".join(f"{{{i}}}: ({i}, {{}}, may-alias)" for i in range(outputs))
    lines = [f"  p{i} = {kind} parameter({i})" for i in range(outputs)]
    lines += [f"  a{i} = {kind} add({'p' if i < outputs else 'a'}{i % outputs if i < outputs else i - outputs}, p0)"
              for i in range(length)]  # fmt: skip
    last = ", ".join(f"a{length - outputs + i}" for i in range(outputs))
    return (
        f"HloModule chain, input_output_alias={{ {aliases} }}, entry_computation_layout={{({inside})->({inside})}}\n\n"
        f"ENTRY main {{\n" + "\n".join(lines) + f"\n  ROOT r = ({inside}) tuple({last})\n}}\n"
    )


def test_time_grows_with_instructions_not_faster() -> None:
    """Four times the program, with four times the outputs: measured 4 to 5 times as long (once it was 16)."""

    def seconds(module: Module) -> float:
        best = float("inf")
        for _ in range(3):
            start = time.process_time()
            build_dataflow(module)
            best = min(best, time.process_time() - start)
        return best

    small, large = parse(chain(4_000, 1_000)), parse(chain(16_000, 4_000))
    assert seconds(large) < 10 * seconds(small)
