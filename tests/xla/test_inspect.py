"""Reading partitioned HLO: group notations, combined, asynchronous and scattered collectives, loops."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.cost import wire_bytes
from shardwright.xla import find_collectives
from shardwright.xla.compiled import ObservedCollective

REDUCER = "add {\n  a = f32[] parameter(0)\n  b = f32[] parameter(1)\n  ROOT s = f32[] add(a, b)\n}\n\n"


def module(*lines: str, before: str = "") -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"HloModule m, num_partitions=8\n\n{REDUCER}{before}ENTRY main {{\n{body}\n}}\n"


def only(text: str, device_count: int = 8) -> ObservedCollective:
    (result,) = find_collectives(text, device_count)
    return result


@pytest.mark.parametrize(
    ("groups", "size", "count"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", 4, 2),
        ("[4,2]<=[8]", 2, 4),
        ("[2,4]<=[4,2]T(1,0)", 4, 2),
        ("mesh['x'=2,'y'=4] {'y'}", 4, 2),
        ("mesh['x'=2,'y'=4] {'x','y'}", 8, 1),
        ("{}", 8, 1),
    ],
)
def test_every_notation_of_groups(groups, size, count):
    result = only(
        module(
            "x = f32[100]{0} parameter(0)",
            f"ROOT r = f32[100]{{0}} all-reduce(x), channel_id=1, replica_groups={groups}, to_apply=add",
        )
    )
    assert (result.kind, result.group_size, result.group_count, result.payload_bytes) == (
        "all-reduce",
        size,
        count,
        400,
    )
    assert result.wire_bytes == round(2 * 400 * (size - 1) / size)


@pytest.mark.parametrize(
    ("result", "attributes", "kind", "payload", "wire"),
    [
        ("f32[400]{0}", "dimensions={0}, replica_groups={{0,1,2,3}}", "all-gather", 1600, 1200),
        ("f32[25]{0}", "dimensions={0}, replica_groups={{0,1,2,3}}, to_apply=add", "reduce-scatter", 400, 300),
        ("f32[100]{0}", "dimensions={0}, replica_groups={{0,1,2,3}}", "all-to-all", 400, 300),
        ("f32[100]{0}", "source_target_pairs={{0,1},{1,2},{2,0}}", "collective-permute", 400, 400),
    ],
)
def test_bytes_of_every_kind(result, attributes, kind, payload, wire):
    outcome = only(module("x = f32[100]{0} parameter(0)", f"ROOT r = {result} {kind}(x), {attributes}"))
    assert (outcome.kind, outcome.payload_bytes, outcome.wire_bytes) == (kind, payload, wire)
    # The cost model states the same ring formulas on its own.
    assert wire_bytes(kind, payload, outcome.group_size) == wire


def test_a_combined_all_reduce_is_one_with_all_bytes():
    result = only(
        module(
            "x = f32[100]{0} parameter(0)",
            "y = bf16[8]{0} parameter(1)",
            "ROOT r = (f32[100]{0}, bf16[8]{0}) all-reduce(x, y), replica_groups={{0,1}}, to_apply=add",
        )
    )
    assert result.payload_bytes == 416


def test_an_asynchronous_pair_counts_once():
    text = module(
        "x = f32[100]{0} parameter(0)",
        "s = (f32[100]{0}, f32[400]{0}) all-gather-start(x), dimensions={0}, replica_groups={{0,1,2,3}}",
        "ROOT d = f32[400]{0} all-gather-done(s)",
    )
    assert only(text).payload_bytes == 1600


def test_an_all_reduce_of_which_a_slice_is_kept_is_a_reduce_scatter():
    def lines(offset: str) -> tuple[str, ...]:
        return (
            "x = f32[100]{0} parameter(0)",
            "i = s32[] parameter(1)",
            "p = u32[] partition-id()",
            "t = s32[4]{0} constant({0, 25, 50, 75})",
            "o1 = s32[1]{0} dynamic-slice(t, p), dynamic_slice_sizes={1}",
            "o = s32[] reshape(o1)",
            "r = f32[100]{0} all-reduce(x), replica_groups={{0,1,2,3}}, to_apply=add",
            f"ROOT s = f32[25]{{0}} dynamic-slice(r, {offset}), dynamic_slice_sizes={{25}}",
        )

    result = only(module(*lines("o")))
    assert (result.kind, result.payload_bytes, result.wire_bytes) == ("reduce-scatter", 400, 300)
    assert only(module(*lines("i"))).kind == "all-reduce"  # every device slices alike
    used_whole = [line.replace("ROOT ", "") for line in lines("o")]
    used_whole.append("ROOT both = (f32[25]{0}, f32[100]{0}) tuple(s, r)")
    assert only(module(*used_whole)).kind == "all-reduce"


@pytest.mark.parametrize(
    ("between", "kind"),
    [
        ("f32[100]{0} copy(r)", "reduce-scatter"),
        ("f32[104]{0} pad(r, zero), padding=0_4", "all-reduce"),
        ("f32[96]{0} slice(r), slice={[0:96]}", "all-reduce"),
    ],
)
def test_a_sum_that_is_padded_or_cut_before_it_is_sliced_is_an_all_reduce(between, kind):
    result = only(
        module(
            "x = f32[100]{0} parameter(0)",
            "zero = f32[] constant(0)",
            "p = u32[] partition-id()",
            "o = s32[] convert(p)",
            "r = f32[100]{0} all-reduce(x), replica_groups={{0,1,2,3}}, to_apply=add",
            f"b = {between}",
            "ROOT s = f32[1]{0} dynamic-slice(b, o), dynamic_slice_sizes={1}",
        )
    )
    assert result.kind == kind


def test_all_reduces_over_two_axes_before_a_slice_are_a_chain():
    result = find_collectives(
        module(
            "x = f32[64]{0} parameter(0)",
            "p = u32[] partition-id()",
            "o = s32[] convert(p)",
            "r = f32[64]{0} all-reduce(x), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=add",
            "q = f32[64]{0} all-reduce(r), replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=add",
            "ROOT s = f32[8]{0} dynamic-slice(q, o), dynamic_slice_sizes={8}",
        ),
        8,
    )
    assert [(c.kind, c.payload_bytes, c.group_size) for c in result] == [
        ("reduce-scatter", 256, 4),
        ("reduce-scatter", 64, 2),
    ]


@pytest.mark.parametrize(("pairs", "size"), [("{{2,5}}", 2), ("{{0,1},{1,2},{2,3}}", 4), ("{{0,0},{1,2},{2,1}}", 2)])
def test_a_permute_has_those_that_send_or_receive(pairs: str, size: int) -> None:
    """A single pair moves a shard, too; who keeps its own moves none."""
    body = f"ROOT r = f32[100]{{0}} collective-permute(x), source_target_pairs={pairs}"
    result = only(module("x = f32[100]{0} parameter(0)", body))
    assert (result.group_size, result.wire_bytes) == (size, 400)


LOOP = """
body {
  state = (s32[], f32[100]{0}) parameter(0)
  i = s32[] get-tuple-element(state), index=0
  one = s32[] constant(1)
  next = s32[] add(i, one)
  v = f32[100]{0} get-tuple-element(state), index=1
  r = f32[100]{0} all-reduce(v), replica_groups={{0,1}}, to_apply=add
  ROOT out = (s32[], f32[100]{0}) tuple(next, r)
}

cond {
  state.1 = (s32[], f32[100]{0}) parameter(0)
  i.1 = s32[] get-tuple-element(state.1), index=0
  limit = s32[] constant(12)
  ROOT go = pred[] compare(i.1, limit), direction=LT
}

"""


@pytest.mark.parametrize(
    ("old", "new", "count", "are_known"),
    [
        ("", "", 9, True),
        ("constant(12)", "constant(3)", 0, True),
        ("limit = s32[] constant(12)", "limit = s32[] get-tuple-element(state.1), index=0", 1, False),
        ("constant(1)", "constant(2)", 1, False),
        ("body=body", 'body=body, backend_config={"known_trip_count":{"n":"40"}}', 40, True),
    ],
)
def test_trip_counts(old, new, count, are_known):
    text = module(
        "x = f32[100]{0} parameter(0)",
        "start = s32[] constant(3)",
        "init = (s32[], f32[100]{0}) tuple(start, x)",
        "w = (s32[], f32[100]{0}) while(init), condition=cond, body=body",
        "ROOT r.1 = f32[100]{0} get-tuple-element(w), index=1",
        before=LOOP,
    )
    result = only(text.replace(old, new) if old else text)
    assert (result.count, result.trip_counts_known) == (count, are_known)


def test_against_what_stock_jax_compiles():
    """A data-parallel gradient: one all-reduce per parameter before XLA:CPU merges them, the same bytes after."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = jax.NamedSharding(mesh, jax.P("d")), jax.NamedSharding(mesh, jax.P())
    gradient = jax.jit(
        jax.grad(lambda p, x: jnp.tanh(x @ p[0] + p[1]).mean()), in_shardings=(whole, rows), out_shardings=whole
    )
    p, x = (np.ones((32, 16), np.float32), np.ones(16, np.float32)), np.ones((64, 32), np.float32)
    result = find_collectives(gradient.lower(p, x).compile().as_text(), 8)
    assert sum(c.payload_bytes * c.count for c in result) == 4 * (32 * 16 + 16)
    assert {(c.kind, c.group_size) for c in result} == {("all-reduce", 8)}


@pytest.mark.parametrize(
    ("groups", "offsets", "kind"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", "0, 25, 50, 75, 0, 25, 50, 75", "reduce-scatter"),
        ("{{0,4},{1,5},{2,6},{3,7}}", "0, 25, 50, 75, 0, 25, 50, 75", "all-reduce"),  # sliced over the other axis
        ("{{0,1,2,3,4,5,6,7}}", "0, 25, 50, 75, 0, 25, 50, 75", "all-reduce"),  # two devices keep the same slice
    ],
)
def test_only_groups_whose_devices_keep_different_slices_scatter(groups, offsets, kind):
    result = only(
        module(
            "x = f32[100]{0} parameter(0)",
            "p = u32[] partition-id()",
            f"t = s32[8]{{0}} constant({{{offsets}}})",
            "o1 = s32[1]{0} dynamic-slice(t, p), dynamic_slice_sizes={1}",
            "o = s32[] reshape(o1)",
            f"r = f32[100]{{0}} all-reduce(x), replica_groups={groups}, to_apply=add",
            "ROOT s = f32[25]{0} dynamic-slice(r, o), dynamic_slice_sizes={25}",
        )
    )
    assert (result.kind, result.payload_bytes) == (kind, 400)


def test_offsets_are_computed_by_tables_and_arithmetic():
    scaled = module(
        "x = f32[100]{0} parameter(0)",
        "p = u32[] partition-id()",
        "four = u32[] constant(4)",
        "row = u32[] remainder(p, four)",
        "width = u32[] constant(25)",
        "o = u32[] multiply(row, width)",
        "r = f32[100]{0} all-reduce(x), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=add",
        "ROOT s = f32[25]{0} dynamic-slice(r, o), dynamic_slice_sizes={25}",
    )
    assert only(scaled).kind == "reduce-scatter"
    assert only(scaled.replace("remainder(", "divide(")).kind == "all-reduce"
