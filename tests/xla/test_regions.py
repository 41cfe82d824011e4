"""Manual regions are emitted as manual computations: on the mesh of a plan, with its devices, beside free axes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shardwright.errors import PlanError, UnsupportedProgramError
from shardwright.planner.graph.imported_shardings import frontend_attributes
from shardwright.plans.plan import InstructionPlan
from shardwright.plans.shardings import TensorSharding
from shardwright.regions import Border
from shardwright.xla import emit_stablehlo
from tests.xla.hand import Dims, entry, kinds, plan, run_planned, sharding

X = np.arange(16 * 8, dtype=np.float32).reshape(16, 8)
ROWS, WHOLE = sharding(("c", None)), sharding((None, None))


def border(
    number: int, dims: str, axes: str = "cp=4", mesh: str = "cp=4", parent: int | None = None, *, enters: bool
) -> str:
    """The call's target and attributes, of an array that is split as in `{"cp"}, {}`."""
    call = Border(
        enters=enters, region=number, parent=parent, axes=sizes(axes), mesh=sizes(mesh),
        sharding=f"#sdy.sharding<@mesh, [{dims}]>",
    )  # fmt: skip
    return f'custom_call_target="{call.target}", {frontend_attributes(call.attributes)}'


def sizes(text: str) -> tuple[tuple[str, int], ...]:
    return tuple((name, int(size)) for name, size in (item.split("=") for item in text.split(",")))


def enter(dims: str, number: int = 1, **others: Any) -> str:
    return border(number, dims, enters=True, **others)


def leave(dims: str, number: int = 1, **others: Any) -> str:
    return border(number, dims, enters=False, **others)


ADD = """
add { a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT sum = f32[] add(a, b)
}
"""
GLOBAL = "channel_id=1, use_global_device_ids=true"
SPLIT = '{"cp"}, {}'

#: Each device adds its number to its rows and sends them on; the whole is summed up along the axis as well.
RING = f"""HloModule ring, entry_computation_layout={{(f32[16,8]{{1,0}})->(f32[16,8]{{1,0}}, f32[4,8]{{1,0}})}}
{ADD}
ENTRY main {{
  x = f32[16,8] parameter(0)
  in = f32[4,8] custom-call(x), {enter(SPLIT)}
  id = u32[] partition-id()
  number = f32[] convert(id)
  numbers = f32[4,8] broadcast(number), dimensions={{}}
  shifted = f32[4,8] add(in, numbers)
  sent = f32[4,8] collective-permute(shifted), channel_id=1, source_target_pairs={{{{0,1}},{{1,2}},{{2,3}},{{3,0}}}}
  total = f32[4,8] all-reduce(shifted), replica_groups={{{{0,1,2,3}}}}, {GLOBAL}, to_apply=add
  out = f32[16,8] custom-call(sent), {leave(SPLIT)}
  all = f32[4,8] custom-call(total), {leave("{}, {}")}
  ROOT both = (f32[16,8], f32[4,8]) tuple(out, all)
}}
"""


def ring(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    shifted = x.reshape(4, 4, 8) + np.arange(4, dtype=np.float32)[:, None, None]
    return np.roll(shifted, 1, 0).reshape(16, 8), shifted.sum(0)


def ring_entries(outside: TensorSharding, inside: TensorSharding, whole: TensorSharding) -> list[InstructionPlan]:
    return [
        entry("in", [outside], inside, opcode="custom-call"),
        entry("shifted", [inside, inside], inside),
        *(entry(name, [inside], inside) for name in ("sent", "total")),
        entry("numbers", [sharding(())], inside),
        entry("out", [inside], outside, opcode="custom-call"),
        entry("all", [inside], whole, opcode="custom-call"),
    ]


RING_ENTRIES = ring_entries(ROWS, WHOLE, WHOLE)


@pytest.mark.parametrize(
    ("mesh", "axes", "outside", "inside"),
    [
        ({"c": 4}, ("c",), ("c", None), (None, None)),
        ({"c": 4, "d": 2}, ("c",), ("c", None), (None, None)),
        ({"d": 2, "c": 4}, ("c",), ("c", "d"), (None, "d")),
        ({"c": 2, "d": 2, "e": 2}, ("c", "e"), (("c", "e"), "d"), (None, "d")),
    ],
    ids=["as written", "free axis idle", "free axis splits", "over two axes"],
)  # fmt: skip
def test_a_region_runs_on_the_axes_that_a_plan_puts_it_on(
    mesh: dict[str, int], axes: tuple[str, ...], outside: Dims, inside: Dims
) -> None:
    at_border, within = sharding(outside), sharding(inside)
    planned = plan(
        RING, mesh, {0: at_border}, {0: at_border, 1: within}, ring_entries(at_border, within, within),
        manual_axes={"cp": axes},
    )  # fmt: skip
    outputs, observed = run_planned(planned, X)
    for actual, expected in zip(outputs, ring(X), strict=True):
        np.testing.assert_array_equal(actual, expected)
    moving = 8 // 2 * 2 if len(mesh) > 1 else 4  # of a permute, all devices that send
    assert kinds(observed) == [("all-reduce", 4), ("collective-permute", moving)]  # and nothing at the border


GROUPS = "{{0,1,2,3},{4,5,6,7}}"

#: Collectives that XLA's partitioner would compute whole along a free axis.
GATHERS = f"""HloModule gathers, entry_computation_layout={{(f32[16,8]{{1,0}})->f32[16,8]{{1,0}}}}
{ADD}
ENTRY main {{
  x = f32[16,8] parameter(0)
  in = f32[4,8] custom-call(x), {enter(SPLIT, mesh="b=2,cp=4")}
  sent = f32[4,8] all-to-all(in), channel_id=1, replica_groups={GROUPS}, dimensions={{0}}
  gathered = f32[16,8] all-gather(sent), replica_groups={GROUPS}, dimensions={{0}}, {GLOBAL}
  scattered = f32[4,8] reduce-scatter(gathered), replica_groups={GROUPS}, dimensions={{0}}, {GLOBAL}, to_apply=add
  ROOT out = f32[16,8] custom-call(scattered), {leave(SPLIT, mesh="b=2,cp=4")}
}}
"""


def test_collectives_of_a_region_stay_split_over_free_axes() -> None:
    at_border, within = sharding(("cp", "b")), sharding((None, "b"))
    entries = [
        entry("in", [at_border], within, opcode="custom-call"),
        *(entry(name, [within], within) for name in ("sent", "gathered", "scattered")),
        entry("out", [within], at_border, opcode="custom-call"),
    ]
    planned = plan(GATHERS, {"b": 2, "cp": 4}, {0: at_border}, {0: at_border}, entries, manual_axes={"cp": ("cp",)})
    (out,), observed = run_planned(planned, X)
    blocks = X.reshape(4, 4, 8)
    np.testing.assert_array_equal(out, 4 * blocks.transpose(1, 0, 2).reshape(16, 8))
    assert kinds(observed) == [("all-gather", 4), ("all-to-all", 4), ("reduce-scatter", 4)]
    assert {collective.payload_bytes for collective in observed} == {4 * 4 * 4, 16 * 4 * 4}  # halves of the columns


#: A region over `a` around one over `b`, in a loop inside of it; a region without operands; a constant that all read.
LAYOUT = "{(f32[16,8]{1,0})->(f32[16,8]{1,0}, f32[4]{0}, f32[16,8]{1,0})}"
NESTED = f"""HloModule nested, entry_computation_layout={LAYOUT}
{ADD}
body {{
  state = (s32[], f32[8,8]) parameter(0)
  i = s32[] get-tuple-element(state), index=0
  one = s32[] constant(1)
  next = s32[] add(i, one)
  rows = f32[8,8] get-tuple-element(state), index=1
  inner = f32[8,2] custom-call(rows), {enter('{}, {"b"}', 2, parent=1, axes="b=4", mesh="a=2,b=4")}
  id = u32[] partition-id()
  number = f32[] convert(id)
  numbers = f32[8,2] broadcast(number), dimensions={{}}
  numbered = f32[8,2] add(inner, numbers)
  outer = f32[8,8] custom-call(numbered), {leave('{}, {"b"}', 2, parent=1, axes="b=4", mesh="a=2,b=4")}
  ROOT stepped = (s32[], f32[8,8]) tuple(next, outer)
}}
condition {{
  state.1 = (s32[], f32[8,8]) parameter(0)
  i.1 = s32[] get-tuple-element(state.1), index=0
  two = s32[] constant(2)
  ROOT less = pred[] compare(i.1, two), direction=LT
}}
ENTRY main {{
  half = f32[] constant(0.5)
  x = f32[16,8] parameter(0)
  halves = f32[16,8] broadcast(half), dimensions={{}}
  scaled = f32[16,8] multiply(x, halves)
  in = f32[8,8] custom-call(scaled), {enter('{"a"}, {}', axes="a=2", mesh="a=2,b=4")}
  halves.1 = f32[8,8] broadcast(half), dimensions={{}}
  less_half = f32[8,8] subtract(in, halves.1)
  zero = s32[] constant(0)
  start = (s32[], f32[8,8]) tuple(zero, less_half)
  loop = (s32[], f32[8,8]) while(start), condition=condition, body=body
  rows.1 = f32[8,8] get-tuple-element(loop), index=1
  id.1 = u32[] partition-id()
  number.1 = f32[] convert(id.1)
  numbers.1 = f32[8,8] broadcast(number.1), dimensions={{}}
  numbered.1 = f32[8,8] add(rows.1, numbers.1)
  out = f32[16,8] custom-call(numbered.1), {leave('{"a"}, {}', axes="a=2", mesh="a=2,b=4")}
  id.2 = u32[] partition-id()
  number.2 = f32[] convert(id.2)
  one_number = f32[1] reshape(number.2)
  alone = f32[4] custom-call(one_number), {leave('{"b"}', 3, axes="b=4", mesh="a=2,b=4")}
  ROOT all = (f32[16,8], f32[4], f32[16,8]) tuple(out, alone, scaled)
}}
"""


@pytest.mark.parametrize("mesh", [{"a": 2, "b": 4}, {"b": 4, "a": 2}], ids=str)
def test_regions_in_regions_and_loops(mesh: dict[str, int]) -> None:
    rows, columns, both, whole = (sharding(dims) for dims in (("a", None), (None, "b"), ("a", "b"), (None, None)))
    scalar = sharding(())
    entries = [
        *(entry(name, [rows, rows], rows) for name in ("scaled", "halves")),
        entry("in", [rows], whole, opcode="custom-call"),
        entry("less_half", [whole, whole], whole),
        entry("loop", [[scalar, columns]], [scalar, columns], opcode="while"),
        entry("inner", [columns], whole, opcode="custom-call", computation="body"),
        *(entry(name, [whole, whole], whole, computation="body") for name in ("numbered", "numbers")),
        entry("outer", [whole], columns, opcode="custom-call", computation="body"),
        entry("numbered.1", [columns, columns], columns),
        entry("out", [columns], both, opcode="custom-call"),
        entry("alone", [sharding((None,))], sharding(("b",)), opcode="custom-call"),
    ]
    planned = plan(
        NESTED, mesh, {0: ("a", None)}, {0: both, 1: ("b",), 2: rows}, entries, manual_axes={"a": ("a",), "b": ("b",)}
    )
    (out, alone, scaled), observed = run_planned(planned, X)
    places = np.arange(8, dtype=np.float32).reshape(2, 4)  # numbers of devices in the program
    inside = np.repeat(np.repeat(places, 8, 0), 2, 1)  # by rows along `a` and columns along `b`
    number = np.repeat(places[:, :1], 8, 0)  # in the outer region a device knows its place along `a` alone
    np.testing.assert_array_equal(out, X / 2 - 0.5 + 2 * inside + number)
    np.testing.assert_array_equal(alone, [0, 1, 2, 3])
    np.testing.assert_array_equal(scaled, X / 2)
    assert not kinds(observed)


def test_what_is_computed_in_a_region_is_read_there_alone() -> None:
    leaking = RING.replace(f"custom-call(total), {leave('{}, {}')}", "negate(total)")
    with pytest.raises(PlanError, match="manual region outside of it"):
        emit_stablehlo(leaking, plan(leaking, {"c": 4}, entries=RING_ENTRIES, manual_axes={"cp": ("c",)}))


def test_groups_along_an_axis_that_is_not_manual_are_refused() -> None:
    across = RING.replace('region_mesh="cp=4"', 'region_mesh="b=2,cp=4"').replace(
        "{{0,1,2,3}}", "{{0,1,4,5},{2,3,6,7}}"
    )
    with pytest.raises(UnsupportedProgramError, match=r"(?s)reaches along b.*axis_names"):
        emit_stablehlo(across, plan(across, {"c": 4, "b": 2}, entries=RING_ENTRIES, manual_axes={"cp": ("c",)}))


def test_groups_by_axes_are_read_as_newer_jax_writes_them() -> None:
    by_axes = RING.replace('region_mesh="cp=4"', 'region_mesh="b=2,cp=4"').replace(
        "{{0,1,2,3}}", "mesh['b'=2,'cp'=4] {'cp'}"
    )
    planned = plan(by_axes, {"c": 4, "d": 2}, entries=RING_ENTRIES, manual_axes={"cp": ("c",)})
    assert "[[0, 2, 4, 6], [1, 3, 5, 7]]" in emit_stablehlo(by_axes, planned)
