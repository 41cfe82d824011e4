"""The counter that judges plans: against XLA's own figures, and against sums done by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.planner.counted import Collective, ProgramCounts
from benchmarks.planner.counter import count
from benchmarks.planner.groups import parse_collective_groups
from benchmarks.planner.judge import MACHINES, collective_s, judge
from benchmarks.planner.partitioned_text import CountingError, Instruction

ROOT = Path(__file__).resolve().parents[2]


def partition_text(function, specs, shapes, out=None, mesh=(8,)):
    """One device's HLO text of a function on eight devices, as XLA:CPU executes it."""
    axes = ("x", "y")[: len(mesh)]
    devices = Mesh(np.array(jax.devices()[:8]).reshape(mesh), axes)
    shardings = tuple(NamedSharding(devices, PartitionSpec(*spec)) for spec in specs)
    result = None if out is None else NamedSharding(devices, PartitionSpec(*out))
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(function, in_shardings=shardings, out_shardings=result).lower(*arguments).compile().as_text()


def one_device(function, *shapes):
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(function).lower(*arguments)


def with_attributes(attributes):
    return Instruction("c", "f32[8]", "all-reduce", ("a",), "%a", attributes, False)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("replica_groups={{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("replica_groups=[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=mesh['a'=8] {'a':(1)2}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=mesh['a'=8] {'a':(2)4}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("source_target_pairs={{0,1},{1,0}}", ((0, 1), (1, 0))),
        ("replica_groups={}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
    ],
)
def test_groups_in_every_notation(text, expected):
    assert (
        parse_collective_groups(with_attributes(f", channel_id=1, {text}, use_global_device_ids=true"), 8) == expected
    )


def test_an_unknown_notation_of_groups_is_refused():
    with pytest.raises(CountingError, match="notation"):
        parse_collective_groups(with_attributes(", replica_groups=<0..7>"), 8)


def test_all_reduce_of_a_contracted_product():
    text = partition_text(lambda a, b: a @ b, [(None, "x"), ("x", None)], [(64, 128), (128, 32)], out=(None, None))
    counted = count(text, 8)
    (collective,) = counted.collectives
    assert (collective.kind, collective.payload_bytes, collective.group_size) == ("all-reduce", 64 * 32 * 4, 8)
    assert counted.wire_bytes == pytest.approx(2 * 7 / 8 * 64 * 32 * 4)


def test_all_reduce_that_is_sliced_counts_as_it_was_compiled():
    """XLA:CPU leaves the pair, and sends what an all-reduce does."""
    text = partition_text(lambda a, b: a @ b, [(None, "x"), ("x", None)], [(64, 128), (128, 32)], out=("x", None))
    (collective,) = count(text, 8).collectives
    assert (collective.kind, collective.payload_bytes) == ("all-reduce", 64 * 32 * 4)


def test_all_reduces_that_the_combiner_joins_are_one():
    def function(a, b, c):
        return a @ b, jnp.sin(a).sum(1), a @ c

    specs, shapes = [(None, "x"), ("x", None), ("x", None)], [(64, 128), (128, 32), (128, 16)]
    (collective,) = count(partition_text(function, specs, shapes, out=(None,)), 8).collectives
    assert (collective.payload_bytes, collective.count) == (64 * (32 + 1 + 16) * 4, 1)


def test_all_reduce_read_whole_as_well_stays_one():
    def function(a, b):
        total = a @ b
        return jnp.stack([total, total - total.mean()])

    text = partition_text(function, [(None, "x"), ("x", None)], [(64, 128), (128, 32)], out=(None, None, None))
    assert set(count(text, 8).wire_by_kind()) == {"all-reduce"}


def test_all_gather_counts_the_whole_array():
    text = partition_text(lambda a: a * 2, [("x", None)], [(64, 32)], out=(None, None))
    (collective,) = count(text, 8).collectives
    assert (collective.kind, collective.payload_bytes) == ("all-gather", 64 * 32 * 4)


def test_groups_of_one_axis_of_two():
    text = partition_text(
        lambda a, b: a @ b, [("x", "y"), ("y", None)], [(64, 128), (128, 32)], out=("x", None), mesh=(2, 4)
    )
    (collective,) = count(text, 8).collectives
    assert (collective.group_size, collective.payload_bytes) == (4, 32 * 32 * 4)
    assert {frozenset(group) for group in collective.groups} == {frozenset(range(4)), frozenset(range(4, 8))}


def test_a_loop_counts_its_trips():
    def function(a, b):
        return jax.lax.scan(lambda carry, _: (jnp.tanh(carry @ b) @ b.T, None), a, None, length=5)[0]

    specs, shapes = [(None, "x"), ("x", None)], [(64, 128), (128, 128)]
    counted = count(partition_text(function, specs, shapes, out=(None, "x")), 8)
    assert counted.collectives
    assert all(collective.count % 5 == 0 for collective in counted.collectives if collective.payload_bytes > 4096)
    assert counted.product_flops == pytest.approx(5 * 2 * 2 * 64 * 128 * 128 / 8, rel=0.01)


def test_a_loop_in_steps_of_two_runs_half_as_often():
    def function(a):
        return jax.lax.while_loop(lambda s: s[0] < 100, lambda s: (s[0] + 2, jnp.sin(s[1] @ s[1])), (0, a))[1]

    counted = count(partition_text(function, [(None, None)], [(16, 16)]), 8)
    assert counted.product_flops == 50 * 2 * 16**3


def test_a_loop_that_ends_by_its_values_is_refused():
    def function(a):
        return jax.lax.while_loop(lambda a: a.sum() < 100, lambda a: a * 2, a)

    with pytest.raises(CountingError, match="loop"):
        count(partition_text(function, [("x",)], [(64,)]), 8)


@pytest.mark.parametrize("shape", [(17, 19), (64, 64)])
def test_product_flops_as_xla_counts_them(shape):
    lowered = one_device(lambda a, b: a @ b, shape, shape[::-1])
    text = lowered.as_text("hlo", debug_info=False)
    assert count(with_percent_signs(text), 1).product_flops == lowered.cost_analysis()["flops"]


@pytest.mark.parametrize(
    ("stride", "padding", "dilation"), [(1, "SAME", 1), (2, "SAME", 1), (1, "VALID", 2), (2, "VALID", 1)]
)
def test_convolution_flops_as_xla_counts_them(stride, padding, dilation):
    """The weight gradient and the input gradient are convolutions with dilated operands and negative padding."""

    def loss(x, w):
        return jax.lax.conv_general_dilated(
            x, w, (stride, stride), padding, rhs_dilation=(dilation,) * 2, dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def step(x, w, g):
        return jax.vjp(loss, x, w)[1](g)

    x, w = (2, 12, 12, 4), (3, 3, 4, 8)
    g = jax.eval_shape(loss, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in (x, w))).shape
    for function, shapes in ((loss, (x, w)), (step, (x, w, g))):
        lowered = one_device(function, *shapes)
        text = with_percent_signs(lowered.as_text("hlo", debug_info=False))
        assert count(text, 1).product_flops == pytest.approx(lowered.cost_analysis()["flops"], rel=0.02)


def with_percent_signs(text):
    """XLA's own print of HLO text: JAX's has bare names."""
    from shardwright.xla import private

    return private.canonical_hlo(text)


def test_elementwise_chains_move_their_ends_only():
    text = partition_text(lambda a: jnp.tanh(a * 2 + 1) * 3, [("x", None)], [(1024, 256)], out=("x", None))
    assert count(text, 8).memory_bytes == 2 * 1024 * 256 * 4 / 8


def test_a_value_that_several_kernels_read_is_written_once_and_read_by_each():
    def function(a):
        b = jnp.tanh(a)
        return jnp.sort(b), b @ b

    text = partition_text(function, [(None, None)], [(256, 256)])
    assert count(text, 8).memory_bytes == pytest.approx((2 + 2 + 2) * 256 * 256 * 4, rel=0.01)


def test_a_ring_over_nodes_shares_their_ports():
    """8 groups of 2, one device in each node: each gets an eighth of the ports; one group of 16 gets all of them."""
    machine = MACHINES["a100"]
    size = 10**9
    pairs = Collective(kind="all-gather", payload_bytes=size, groups=tuple((d, d + 8) for d in range(8)))
    everyone = Collective(kind="all-gather", payload_bytes=size, groups=(tuple(range(16)),))
    ports = machine.node_ports * machine.link_efficiency
    assert collective_s(pairs, machine) == pytest.approx(8 * size / 2 / ports, rel=1e-3)
    assert collective_s(everyone, machine) == pytest.approx(size * 15 / 16 / ports, rel=1e-2)


def test_an_all_to_all_sends_what_leaves_the_node_through_its_ports():
    machine = MACHINES["a100"]
    shard = 10**9
    everyone = Collective(kind="all-to-all", payload_bytes=shard, groups=(tuple(range(16)),))
    leaving = 8 * shard * 8 / 16
    assert collective_s(everyone, machine) == pytest.approx(
        leaving / (machine.node_ports * machine.link_efficiency), rel=1e-3
    )


def test_inside_a_node_the_ring_formula_holds():
    machine = MACHINES["a100"]
    inside = Collective(kind="all-reduce", payload_bytes=10**6, groups=(tuple(range(8)),), count=3)
    expected = 14 * machine.inside_latency_s + 2 * 7 / 8 * 10**6 / (machine.inside * machine.link_efficiency)
    assert judge(ProgramCounts(collectives=(inside,), kernels=()), machine).communication_s == pytest.approx(
        3 * expected
    )


def test_the_counter_and_the_judge_share_no_code_with_the_planner():
    """Importing them loads nothing of shardwright."""
    code = "import sys, benchmarks.planner.judge, benchmarks.planner.counter\nprint(*sys.modules)"
    child = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not [name for name in child.stdout.split() if name.startswith("shardwright")]


def test_calls_are_written_in_place():
    """A reader inside a computation that is called is a reader like any other."""
    text = """HloModule m
%add (p: f32[], q: f32[]) -> f32[] {
  %p = f32[] parameter(0)
  %q = f32[] parameter(1)
  ROOT %s = f32[] add(%p, %q)
}

%body (param: f32[64]) -> f32[64] {
  %param = f32[64]{0} parameter(0)
  ROOT %sum = f32[64]{0} all-reduce(%param), replica_groups={{0,1},{2,3}}, to_apply=%add
}

ENTRY %main (a: f32[64]) -> f32[32] {
  %a = f32[64]{0} parameter(0)
  %call = f32[64]{0} call(%a), to_apply=%body
  ROOT %part = f32[32]{0} slice(%call), slice={[0:32]}
}
"""
    counted = count(text, 4)
    (collective,) = counted.collectives
    assert (collective.kind, collective.payload_bytes, collective.group_size) == ("all-reduce", 256, 2)
    assert counted.memory_bytes == 2 * 32 * 4
