"""Matching a plan's collectives with those of its program: by instruction, by size, and what does not match."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest

from shardwright.cost import wire_bytes
from shardwright.cost.moves.device_groups import device_groups
from shardwright.plans.plan import CostSummary, MemorySummary, Plan, PlannedCollective
from shardwright.plans.shardings import Mesh
from shardwright.report.collectives import explain_proof, proof_as_dict
from shardwright.report.proof import Proof, prove

MESH = Mesh.of({"data": 4, "model": 2})
KIB = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seen:
    kind: str
    payload_bytes: int
    wire_bytes: int
    group_size: int
    count: int
    op_name: str
    groups: str


def make_observed(kind: str, group_size: int, payload_bytes: int, name: str, count: int = 1) -> Seen:
    """What XLA says of a collective over the axis of this size."""
    axes = {1: (), 2: ("model",), 4: ("data",), 8: ("data", "model")}[group_size]
    groups = [f"{{{','.join(map(str, group))}}}" for group in device_groups(axes, MESH)]
    return Seen(
        kind=kind,
        payload_bytes=payload_bytes,
        wire_bytes=wire_bytes(kind, payload_bytes, group_size),
        group_size=group_size,
        count=count,
        op_name=name,
        groups="{{0,1},{1,0}}" if kind == "collective-permute" else f"{{{','.join(groups)}}}",
    )


def make_collective(kind: str, axes: str, payload_bytes: int, name: str, count: int = 1) -> PlannedCollective:
    chosen = tuple(axes.split())
    return PlannedCollective(
        kind=kind,
        axes=chosen,
        instruction=name,
        cause=f"gradient of params['{name}']",
        payload_bytes=payload_bytes,
        wire_bytes=wire_bytes(kind, payload_bytes, MESH.size(chosen)),
        count=count,
        time_s=1e-6,
    )


def plan(*collectives: PlannedCollective, **more: Any) -> Plan:
    return Plan(
        module_name="jit_step",
        hlo_sha256="0" * 64,
        mesh=MESH,
        hardware="cpu",
        origin="search",
        instructions=(),
        parameters=(),
        outputs=(),
        collectives=collectives,
        cost=CostSummary(compute_s=1e-3, communication_s=0.0, lower_bound_s=0.0, bound_scope=""),
        memory=MemorySummary(arguments_bytes=0, outputs_bytes=0, temporaries_bytes=0),
        **more,
    )


def statuses(proof: Proof) -> list[tuple[str, str, str]]:
    return [(line.instruction, line.kind, line.status) for line in proof.lines]


def test_equal_collectives_agree_and_idle_ones_are_left_out() -> None:
    proof = prove(
        plan(make_collective("all-reduce", "data", 4 * KIB, "dot.1", count=3)),
        [make_observed("all-reduce", 4, 4 * KIB, "dot.1", count=3), make_observed("all-gather", 1, KIB, "dot.1")],
    )
    assert statuses(proof) == [("dot.1", "all-reduce", "agrees")]
    assert proof.holds
    assert proof.predicted_wire_bytes == proof.observed_wire_bytes == 3 * 2 * 3 * KIB


def test_a_collective_without_a_line_breaks_the_proof_whatever_its_size() -> None:
    expected = plan(make_collective("all-reduce", "data", 1 << 20, "dot.1"))
    proof = prove(
        expected, [make_observed("all-reduce", 4, 1 << 20, "dot.1"), make_observed("all-to-all", 2, KIB, "mul.2")]
    )
    assert statuses(proof)[1] == ("mul.2", "all-to-all", "not in the plan")
    assert not proof.holds


@pytest.mark.parametrize(("count", "holds"), [(1, True), (64, True), (65, False)])
def test_a_scalar_needs_no_line_unless_a_loop_reduces_it_again_and_again(count: int, holds: bool) -> None:
    expected = plan(make_collective("all-reduce", "data", 1 << 20, "dot.1"))
    scalar = make_observed("all-reduce", 2, 4, "sum.2", count=count)
    assert prove(expected, [make_observed("all-reduce", 4, 1 << 20, "dot.1"), scalar]).holds is holds


@pytest.mark.parametrize(("observed_bytes", "holds"), [(1000 * KIB, True), (1015 * KIB, True), (1100 * KIB, False)])
def test_bytes_may_differ_by_the_tolerance(observed_bytes: int, holds: bool) -> None:
    proof = prove(
        plan(make_collective("all-gather", "data", 1000 * KIB, "dot.1")),
        [make_observed("all-gather", 4, observed_bytes, "dot.1")],
    )
    assert proof.holds is holds
    assert prove(plan(), [], tolerance=0.0).holds


def test_small_differences_of_many_lines_add_up() -> None:
    lines = [make_collective("all-gather", "data", 100 * KIB, name) for name in "ab"]
    program = [
        make_observed("all-gather", 4, 98 * KIB + 512, "a"),
        make_observed("all-gather", 4, 101 * KIB + 512, "b"),
    ]
    proof = prove(plan(*lines), program)
    assert [line.status for line in proof.lines] == ["agrees", "agrees"]
    assert proof.difference == pytest.approx(3 / 200)
    assert proof.holds
    assert not prove(plan(*lines), program, tolerance=0.0149).holds


def test_a_part_of_an_axis_is_not_another_part_of_it() -> None:
    halves = {
        near: ((0, 2), (1, 3), (4, 6), (5, 7)) if near else ((0, 4), (1, 5), (2, 6), (3, 7)) for near in (True, False)
    }
    line = make_collective("all-gather", "data", 4 * KIB, "dot.1")
    line = dataclasses.replace(line, groups=halves[True], wire_bytes=wire_bytes("all-gather", 4 * KIB, 2))
    result = make_observed("all-gather", 2, 4 * KIB, "dot.1")
    for near, holds in ((True, True), (False, False)):
        groups = ",".join(f"{{{a},{b}}}" for a, b in halves[near])
        proof = prove(plan(line), [dataclasses.replace(result, groups=f"{{{groups}}}")])
        assert proof.holds is holds
        assert proof.lines[0].over == "2 devices along data"
        assert "2 devices along data" in proof.explain()


def test_equal_bytes_among_other_devices_break_the_proof() -> None:
    expected = plan(make_collective("all-reduce", "data", 4 * KIB, "dot.1"))
    program = make_observed("all-reduce", 4, 4 * KIB, "dot.1")
    assert prove(expected, [program]).holds
    proof = prove(expected, [dataclasses.replace(program, groups="{{0,1,2,3},{4,5,6,7}}")])
    assert statuses(proof) == [("dot.1", "all-reduce", "other devices")]
    assert not proof.holds
    mesh = "mesh['axis_0'=4,'axis_1'=2] {'axis_0'}"
    assert prove(expected, [dataclasses.replace(program, groups=mesh)]).holds
    whole = plan(make_collective("all-reduce", "data model", 4 * KIB, "dot.1"))
    assert prove(whole, [dataclasses.replace(make_observed("all-reduce", 8, 4 * KIB, "dot.1"), groups="all")]).holds


@pytest.mark.parametrize(
    ("pairs", "holds"),
    [
        ("{{0,2},{2,4},{4,6},{6,0}}", True),  # along data, to the next device
        ("{{0,6},{6,0},{1,1}}", True),
        ("{{0,1},{1,0}}", False),  # along model
        ("{{0,2},{2,5}}", False),  # one of the pairs
    ],
)
@pytest.mark.parametrize("name", ["roll.1", "roll.2"])
def test_a_permute_sends_along_the_axes_of_its_line(pairs: str, holds: bool, name: str) -> None:
    result = dataclasses.replace(make_observed("collective-permute", 4, 4 * KIB, name), groups=pairs)
    assert prove(plan(make_collective("collective-permute", "data", 4 * KIB, "roll.1")), [result]).holds is holds


def test_differences_do_not_cancel() -> None:
    proof = prove(
        plan(
            make_collective("all-gather", "data", 100 * KIB, "a"), make_collective("all-gather", "data", 50 * KIB, "b")
        ),
        [make_observed("all-gather", 4, 50 * KIB, "a"), make_observed("all-gather", 4, 100 * KIB, "b")],
    )
    assert proof.predicted_wire_bytes == proof.observed_wire_bytes
    assert [line.status for line in proof.lines] == ["differs", "differs"]
    assert not proof.holds


def test_a_move_that_several_readers_share_is_named_after_any_of_them() -> None:
    proof = prove(
        plan(
            make_collective("all-gather", "data", 4 * KIB, "first.1"),
            make_collective("collective-permute", "model", KIB, "p.1"),
        ),
        [make_observed("all-gather", 4, 4 * KIB, "second.2"), make_observed("collective-permute", 8, KIB, "p.2")],
    )
    assert [status for *_, status in statuses(proof)] == ["agrees", "agrees"]


def test_a_move_over_a_part_of_an_axis_is_found_under_another_name() -> None:
    half = wire_bytes("all-gather", 4 * KIB, 2)
    expected = plan(dataclasses.replace(make_collective("all-gather", "data", 4 * KIB, "w.1"), wire_bytes=half))
    program = make_observed("all-gather", 2, 4 * KIB, "custom-call.2")
    inside = dataclasses.replace(program, groups="{{0,2},{4,6},{1,3},{5,7}}")
    assert statuses(prove(expected, [inside])) == [("w.1", "all-gather", "agrees")]
    assert not prove(expected, [program]).holds  # over the other axis


def test_what_one_instruction_needs_for_two_causes_is_two_lines() -> None:
    weight = dataclasses.replace(make_collective("all-gather", "model", 8 * KIB, "dot.1"), cause="weight for matmul")
    proof = prove(
        plan(make_collective("all-gather", "data", 4 * KIB, "dot.1"), weight),
        [make_observed("all-gather", 2, 8 * KIB, "dot.1"), make_observed("all-gather", 4, 4 * KIB, "dot.1")],
    )
    assert [(line.axes, line.cause, line.status) for line in proof.lines] == [
        (("data",), "gradient of params['dot.1']", "agrees"),
        (("model",), "weight for matmul", "agrees"),
    ]


def test_permutes_of_one_instruction_are_told_apart_by_their_axes() -> None:
    expected = plan(*(make_collective("collective-permute", axis, 4 * KIB, "conv.1") for axis in ("data", "model")))
    along_model, along_data = (
        dataclasses.replace(make_observed("collective-permute", 8, 4 * KIB, "conv.1"), groups=pairs)
        for pairs in ("{{0,1},{1,0}}", "{{0,2},{2,4},{4,6}}")
    )
    assert prove(expected, [along_model, along_data]).holds
    assert not prove(expected, [along_model, along_model]).holds


def test_one_line_may_be_two_collectives() -> None:
    """XLA sums a scalar over one axis after the other."""
    proof = prove(
        plan(make_collective("all-reduce", "data model", 4, "sum.1")),
        [make_observed("all-reduce", 4, 4, "sum.1"), make_observed("all-reduce", 2, 4, "sum.1")],
    )
    (line,) = proof.lines
    assert (line.predicted_count, line.observed_count, line.status) == (1, 2, "agrees")


def test_an_all_reduce_and_slice_is_what_the_plan_says_it_is() -> None:
    scattered = [make_observed("reduce-scatter", 4, 8 * KIB, "dot.1")]
    assert prove(plan(make_collective("reduce-scatter", "data", 8 * KIB, "dot.1")), scattered).holds
    whole = prove(plan(make_collective("all-reduce", "data", 8 * KIB, "dot.1")), scattered)
    assert whole.holds
    assert whole.observed_wire_bytes == 12 * KIB
    # Under another reader's name, too.
    assert prove(plan(make_collective("all-reduce", "data", 8 * KIB, "dot.9")), scattered).holds


def test_a_sum_scattered_over_one_axis_and_whole_over_another() -> None:
    """XLA names what ends a loop after the loop, and a slice follows the all-reduce, too."""
    expected = plan(
        make_collective("reduce-scatter", "data", 16 * KIB, "dot.1"),
        make_collective("all-reduce", "model", 4 * KIB, "dot.1"),
    )
    scattered = make_observed("reduce-scatter", 2, 4 * KIB, "dot.1")
    for name in ("dot.1", "loop"):
        proof = prove(expected, [make_observed("reduce-scatter", 4, 16 * KIB, name), scattered])
        assert [status for *_, status in statuses(proof)] == ["agrees", "agrees"]
        assert proof.observed_wire_bytes == proof.predicted_wire_bytes == 16 * KIB


def test_what_is_whole_is_not_taken_for_what_is_sliced() -> None:
    """Both leave one loop, named after it."""
    expected = plan(
        make_collective("all-reduce", "data", 16 * KIB, "a"), make_collective("reduce-scatter", "data", 16 * KIB, "b")
    )
    proof = prove(expected, [make_observed(kind, 4, 16 * KIB, "loop") for kind in ("reduce-scatter", "all-reduce")])
    assert proof.holds
    assert {line.status for line in proof.lines} == {"agrees"}


def test_what_xla_left_out_is_a_difference() -> None:
    proof = prove(plan(make_collective("all-reduce", "data", 8 * KIB, "dot.1")), [])
    assert statuses(proof) == [("dot.1", "all-reduce", "not in the program")]
    assert not proof.holds


def test_differences_name_the_axes() -> None:
    proof = prove(
        plan(make_collective("all-reduce", "data", 8 * KIB, "dot.1")), [make_observed("all-to-all", 2, 16 * KIB, "z")]
    )
    table = proof.explain().partition("Differences")[2]
    assert re.search(r"not in the program +all-reduce +data ", table)
    assert re.search(r"not in the plan +all-to-all +2 devices ", table)


def test_lines_carry_the_users_source() -> None:
    text = (
        'HloModule m\n\nENTRY main {\n  x = f32[8]{0} parameter(0), metadata={op_name="x"}\n'
        '  ROOT n.1 = f32[8]{0} negate(x), metadata={source_file="/home/me/model.py" source_line=12}\n}\n'
    )
    proof = prove(
        plan(make_collective("all-reduce", "data", 8 * KIB, "n.1"), hlo_text=text),
        [make_observed("all-reduce", 4, 8 * KIB, "n.1")],
    )
    assert proof.lines[0].where == "model.py:12"
    assert "model.py:12" in explain_proof(proof, everything=True)


def test_the_text_says_totals_first_then_differences() -> None:
    layers = [make_collective("all-reduce", "data", 8 * KIB, f"w{i}") for i in range(3)]
    proof = prove(
        plan(*layers, make_collective("all-gather", "model", 64 * KIB, "v")),
        [
            *(make_observed("all-reduce", 4, 8 * KIB, f"w{i}") for i in range(3)),
            make_observed("all-to-all", 2, 16 * KIB, "z"),
        ],
    )
    text = proof.explain()
    assert text.startswith("XLA's program of jit_step does not have the predicted collectives")
    assert "params['w0..2']" in text  # one row for three layers
    assert text.index("36.0 KiB in 3") < text.index("Differences") < text.index("not in the program")
    assert "dot" not in text
    assert "w1" in proof.explain(everything=True)
    data = json.loads(json.dumps(proof_as_dict(proof)))
    assert data["holds"] is False
    assert [line["status"] for line in data["lines"]].count("agrees") == 3
