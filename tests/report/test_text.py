"""Reports: grouping, units, and what each section says."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, replace
from typing import Any

import pytest
from rich.console import Console

from shardwright.plans.attention_note import AttentionNote
from shardwright.plans.plan import (
    Candidate,
    CostSummary,
    InstructionPlan,
    MemorySummary,
    Plan,
    PlannedCollective,
    RecomputedSegment,
    SegmentPlan,
    VariablePlan,
)
from shardwright.plans.shardings import Mesh, TensorSharding
from shardwright.report.collectives import explain_collectives
from shardwright.report.groups import group_collectives, group_variables, join_names
from shardwright.report.text import as_dict, describe_split, explain_plan, print_plan
from shardwright.report.wrapping import Wrapped
from shardwright.units import format_bytes, format_seconds

MESH = Mesh.of({"data": 2, "model": 4})
COLUMNS = TensorSharding(((), ("model",)))
WHOLE = TensorSharding.replicated(2)


def variable(number: int, name: str, shape: tuple[int, ...], sharding: TensorSharding, **more: Any) -> VariablePlan:
    fields = {"element_type": "f32", "stored_shape": shape, "alias": None} | more
    return VariablePlan(number=number, name=name, shape=shape, sharding=sharding, **fields)


def collective(kind: str, axes: tuple[str, ...], cause: str, payload_bytes: int, count: int = 1) -> PlannedCollective:
    return PlannedCollective(
        kind=kind,
        axes=axes,
        instruction=cause.split()[-1],
        cause=cause,
        payload_bytes=payload_bytes,
        wire_bytes=payload_bytes * 3 // 2,
        count=count,
        time_s=1e-6 * payload_bytes * count,
    )


def plan(**changes: Any) -> Plan:
    layers = [variable(i, f"params['blocks'][{i}]['w']", (64, 128), COLUMNS, alias=i) for i in range(12)]
    fields: dict[str, Any] = {
        "module_name": "jit_step",
        "hlo_sha256": "0" * 64,
        "mesh": MESH,
        "hardware": "a100",
        "origin": "search",
        "instructions": (),
        "parameters": (
            *layers,
            variable(12, "x", (6, 5), TensorSharding((("model",), ())), stored_shape=(8, 5)),
        ),
        "outputs": (
            *(variable(i, each.name, each.shape, COLUMNS, alias=i) for i, each in enumerate(layers)),
            variable(12, "loss", (), TensorSharding(())),
        ),
        "collectives": (
            *(collective("all-reduce", ("model",), f"partial sum of dot.{i}", 1000) for i in range(3)),
            collective("all-gather", ("data",), "mul.7 wants operand 0 as [-, -]", 100, count=5),
        ),
        "cost": CostSummary(compute_s=0.002, communication_s=0.001, lower_bound_s=0.0027, bound_scope="one mesh"),
        "memory": MemorySummary(arguments_bytes=3 * 2**20, outputs_bytes=4, temporaries_bytes=2**20),
        "candidates": (
            Candidate(mesh=Mesh.of({"data": 8}), step_s=None, note="needs 90 GiB"),
            Candidate(mesh=MESH, step_s=0.003),
        ),
        "notes": ("custom call 'topk' is opaque",),
        "planning_s": 1.5,
    }
    return Plan(**(fields | changes))


def test_units() -> None:
    assert format_bytes(0) == "0 B"
    assert format_bytes(1023) == "1023 B"
    assert format_bytes(1536) == "1.50 KiB"
    assert format_bytes(3 * 2**30) == "3.00 GiB"
    assert format_seconds(0) == "0 s"
    assert format_seconds(12.34e-3) == "12.3 ms"
    assert format_seconds(5e-7) == "500 ns"
    assert format_seconds(250e-6) == "250 µs"


def test_layers_are_grouped_by_their_number() -> None:
    groups = group_variables(plan().parameters, MESH)
    assert [(group.name, group.count) for group in groups] == [("params['blocks'][0..11]['w']", 12), ("x", 1)]
    assert groups[0].bytes_per_device == 64 * 128 * 4 // 4
    assert groups[1].bytes_per_device == 8 * 5 * 4 // 4


def adam(sharding: TensorSharding, *, nu: TensorSharding) -> list[VariablePlan]:
    """Parameters of three layers, then both moments of each; the second ones laid out as `nu`."""
    heads = (("params", sharding), ("opt_state[0].mu", sharding), ("opt_state[0].nu", nu))
    leaves = [(f"{head}['blocks'][{i}]['w']", each) for head, each in heads for i in range(3)]
    return [variable(i, name, (64, 128), each, alias=i) for i, (name, each) in enumerate(leaves)]


def test_parameters_and_moments_laid_out_alike_share_a_row() -> None:
    groups = group_variables([*adam(COLUMNS, nu=COLUMNS), variable(9, "x", (6, 5), WHOLE)], MESH)
    assert [(group.name, group.count) for group in groups] == [
        ("params, opt_state[0].mu, opt_state[0].nu ['blocks'][0..2]['w']", 9),
        ("x", 1),
    ]


def test_moments_laid_out_otherwise_stay_apart() -> None:
    groups = group_variables(adam(COLUMNS, nu=WHOLE), MESH)
    assert [group.name for group in groups] == [
        "params, opt_state[0].mu ['blocks'][0..2]['w']",
        "opt_state[0].nu['blocks'][0..2]['w']",
    ]
    first, *others = adam(COLUMNS, nu=COLUMNS)
    names = [group.name for group in group_variables([variable(0, first.name, (64, 128), WHOLE), *others], MESH)]
    assert "params['blocks'][0]['w']" in names
    assert "opt_state[0].mu, opt_state[0].nu ['blocks'][0..2]['w']" in names


def test_names_that_only_end_alike_stay_apart() -> None:
    names = ["params['a']['w']", "params['b']['w']"]
    groups = group_variables([variable(i, name, (4, 4), WHOLE) for i, name in enumerate(names)], MESH)
    assert [group.name for group in groups] == names


def test_the_summary_counts_what_is_split() -> None:
    bias = variable(9, "params['b']", (64,), TensorSharding(((),)), alias=9)
    scale = variable(10, "params['s']['w']", (64, 64), WHOLE, alias=10)
    text = explain_plan(plan(parameters=(*adam(COLUMNS, nu=WHOLE), bias, scale)))
    assert "3 of 4 matrices split over model, 1 replicated; 1 vector replicated" in text
    assert "3 of 6 matrices split over model, 3 replicated" in text


def test_layers_laid_out_differently_stay_apart() -> None:
    first, *others = plan().parameters
    changed = variable(0, first.name, first.shape, WHOLE)
    names = [group.name for group in group_variables([changed, *others], MESH)]
    assert names == ["params['blocks'][0]['w']", "params['blocks'][1..11]['w']", "x"]


@pytest.mark.parametrize(
    ("names", "joined"),
    [
        (["w"], "w"),
        (["a1", "a3", "a4"], "a1,3..4"),
        (["b[0].w2", "b[1].w2"], "b[0..1].w2"),
        (["x0y0", "x0y1", "x1y0", "x1y1"], "x0..1y0..1"),
    ],
)
def test_joined_names(names: list[str], joined: str) -> None:
    assert join_names(names) == joined


def test_collectives_are_grouped_by_cause() -> None:
    first, second = group_collectives(plan().collectives)
    assert (first.kind, first.cause, first.count, first.wire_bytes) == ("all-reduce", "partial sum of dot", 3, 4500)
    assert (second.cause, second.count, second.wire_bytes) == ("mul wants operand 0 as [-, -]", 5, 750)


def test_layers_that_need_the_same_collective_share_a_row() -> None:
    many = [collective("all-gather", ("data",), f"p_{i}__4_ wants operand 0 as [-, -]", 100) for i in range(24)]
    (group,) = group_collectives(many)
    assert (group.cause, group.count) == ("p_0..23__4_ wants operand 0 as [-, -]", 24)


def test_inputs_that_take_long_to_arrive_are_no_collectives() -> None:
    cost = CostSummary(
        compute_s=0.002, communication_s=0.005, hidden_s=0.001, lower_bound_s=0.006, bound_scope="one mesh"
    )
    step = "7.00 ms predicted = 2.00 ms compute + 5.00 ms communication, 2.50 ms of it for inputs (1.00 ms more beside"
    assert step in " ".join(explain_plan(plan(cost=cost)).split())
    hidden = replace(cost, communication_s=0.0025)
    assert "for inputs" not in explain_plan(plan(cost=hidden))


def test_options_of_the_compiler_stand_beside_the_prices() -> None:
    told = " ".join(explain_plan(plan(compile_options={"xla_some_option": True})).split())
    assert "compiled with xla_some_option=True" in told
    assert "compiled with" not in explain_plan(plan())


def test_the_report_says_it_all() -> None:
    text = explain_plan(plan())
    for part in (
        "Plan of jit_step",
        "data=2 × model=4 (8 devices), found by search in 1.50 s",
        "x split along the batch over model (4-way)",
        "all 12 matrices split over model",
        "3.00 ms predicted = 2.00 ms compute + 1.00 ms communication",
        "5.13 KiB a device and step, 8 collectives",
        "certified within 10.0 % of optimal: no plan takes less than 2.70 ms",
        "- one mesh",
        "hardware profile 'a100'",
        "params['blocks'][0..11]['w']",
        "dim 1 over model",
        "f32[6,5]",
        "[8,5]",
        "loss",
        "partial sum of dot",
        "peak                                4.00 MiB",
        "left out",
        "needs 90 GiB",
        "custom call 'topk' is opaque",
    ):
        assert part in text, part
    assert max(map(len, text.splitlines())) <= 110
    assert all(line == line.rstrip() for line in text.splitlines())
    assert "\x1b" not in text


def test_names_with_brackets_are_no_markup() -> None:
    odd = plan(parameters=(variable(0, "p['[bold]']", (4,), TensorSharding(((),))),), outputs=())
    assert "p['[bold]']" in explain_plan(odd)


LONG = "params['transformer']['blocks']['attention_norm']['output_projection']['weight']"


def all_of(name: str) -> Plan:
    """A plan that says one name wherever a plan says names."""
    return plan(
        module_name=name.replace("'", "_"),
        parameters=(variable(0, name, (64, 128), COLUMNS),),
        outputs=(variable(0, f"out{name}", (64, 128), COLUMNS),),
        collectives=(
            collective("all-reduce", ("data", "model"), f"gradient of {name}", 1000),
            collective("all-gather", ("data",), f"result of scope_0/{LONG}/matmul for matmul (model.py:63)", 500),
        ),
        candidates=(
            Candidate(mesh=MESH, step_s=0.003, name="search", note=f"all but {name}"),
            Candidate(mesh=MESH, step_s=0.004, name="Megatron"),
        ),
        segments=(SegmentPlan(name=f"segment 0, {name}", kind=0, instructions=3, boundary=((name, COLUMNS),)),),
        recomputed=(RecomputedSegment(name=f"scope/{name}", values=3, repeats=2, saved_bytes=100, time_s=0.001),),
        notes=(f"custom call {name} is opaque",),
    )


@pytest.mark.parametrize("width", [20, 40, 80, 120])
@pytest.mark.parametrize("name", [LONG, "module/submodule/layer_12/attention.kernel:0/read.with.dots-and-dashes"])
def test_no_name_is_broken_and_nothing_is_lost(name: str, width: int) -> None:
    text = explain_plan(all_of(name), width=width)
    assert (
        text.count(name)
        == text.replace("\n", "").replace(" ", "").count(name)
        == explain_plan(all_of(name), width=1000).count(name)
    )
    for figure in ("f32[64,128]", "dim 1 over model", "all-reduce", "gradient of", "3.00 ms", "bytes/device"):
        assert figure in text


def test_a_console_of_the_users_is_as_wide_afterwards() -> None:
    target = io.StringIO()
    console = Console(file=target, width=40)
    print_plan(all_of(LONG), console)
    assert LONG in target.getvalue()
    assert console.width == 40


def test_sentences_break_between_words_only() -> None:
    text = "gradient of params['blocks'][0..11]['w'], opt_state[0].mu [data, -, -] for matmul (model.py:63)"
    pieces = [
        "[data, -, -]", "gradient", "of", "params['blocks'][0..11]['w'],", "opt_state[0].mu", "(model.py:63)"
    ]  # fmt: skip
    for width in range(16, 90):
        lines = Wrapped(text).lines(width)
        assert max(map(len, lines)) <= max(width, 1 + max(map(len, pieces)))
        assert "".join(lines).replace(" ", "") == text.replace(" ", "")
        assert all(any(piece in line for line in lines) for piece in pieces)


def test_the_head_of_a_report_says_what_became_of_attention() -> None:
    words = "causal, 16 heads on 8 of 64, 1024 × 1024, bf16"
    here = {"place": "model.py:31", "words": words}
    notes = (
        AttentionNote(**here, count=12, kind="forward", saved_bytes=3 << 30, saved_s=0.002),
        AttentionNote(**here, count=12, kind="backward", saved_bytes=3 << 30),
        AttentionNote(**here, count=4, kind="again", saved_bytes=1 << 30),
        AttentionNote(place="", words=words, count=1, kind="forward", replaced=False),
        AttentionNote(**here, count=2, kind="forward", replaced=False, reason='float32: fused_attention="on" takes it'),
    )
    lines = [line.strip() for line in explain_plan(plan(attention=notes), width=200).splitlines()]
    counts, saved = "12 forward, 12 backward, 4 forward again", "7.00 GiB of scores and 2.00 ms a step less"
    fused = f"{counts} fused at model.py:31: {words}; {saved}"
    first = lines.index(f"attention    {fused}")
    assert lines[first + 1 : first + 3] == [
        f"1 forward called by the program: {words}",
        f'2 forward left as written at model.py:31: {words}; float32: fused_attention="on" takes it',
    ]
    assert as_dict(plan(attention=notes))["attention"][2]["count"] == 4
    many = plan(attention=[replace(notes[0], place=f"model.py:{line}") for line in range(9)])
    assert "and 3 other kinds or places" in explain_plan(many)
    assert "attention" not in explain_plan(plan())


def test_a_plan_without_collectives() -> None:
    text = explain_plan(plan(collectives=(), candidates=(), notes=()))
    assert "none" in text
    assert "Meshes considered" not in text


def test_many_groups_are_summed_up() -> None:
    many = tuple(collective("all-gather", ("data",), f"reason {chr(97 + i)}", 10 + i) for i in range(20))
    text = explain_plan(plan(collectives=many))
    assert "4 more groups" in text
    total = sum(each.wire_bytes for each in many)
    assert format_bytes(total) in text


def test_what_the_search_compared_stands_with_its_prices() -> None:
    """The plan itself is marked though another one has its mesh; named plans are ranked, refused ones say why."""
    expert = Candidate(mesh=MESH, step_s=0.0033, name="Megatron")
    best = Candidate(mesh=MESH, step_s=0.003, name="search")
    refused = Candidate(mesh=Mesh.of({"data": 8}), step_s=None, name="data parallel", note="needs 90 GiB")
    rows = explain_plan(plan(candidates=(refused, expert, best))).split("Plans considered")[1].splitlines()[3:6]
    assert [row.split()[0] for row in rows] == ["search", "Megatron", "data"]
    assert [row.split()[-1] for row in rows] == ["chosen", "%", "GiB"]
    assert "+10.0 %" in rows[1]


def test_equal_segments_share_a_row() -> None:
    layers = [
        SegmentPlan(
            name=f"block {i}",
            kind=3,
            instructions=70,
            boundary=((f"add.{i}", COLUMNS), *[(f"v.{n}", WHOLE) for n in range(4)]),
        )
        for i in range(12)
    ]
    loss = SegmentPlan(name="loss", kind=1, instructions=40, repeats=2)
    step_plan = plan(segments=(*layers, loss))
    text = explain_plan(step_plan, width=120)
    assert "Segments: 14, of 2 kinds, each kind solved once" in text
    row = next(line for line in text.splitlines() if "block 0" in line)
    assert row.split()[:4] == ["block", "0", "70", "12"]
    assert "add.0 [-, model], v.0 [-, -], v.1 [-, -], and 2 more" in " ".join(text.split())
    assert "[-, model]" in explain_plan(step_plan, width=80)
    assert [segment["equal"] for segment in as_dict(step_plan)["segments"]] == [12, 2]
    assert "Segments" not in explain_plan(plan())


def test_arguments_that_pass_through_a_segment_are_counted_not_named() -> None:
    argument = InstructionPlan(
        computation="main", name="params__w__.1", opcode="parameter", operands=(), result=(COLUMNS,)
    )
    segment = SegmentPlan(
        name="loss", kind=0, instructions=40, boundary=(("params__w__.1", COLUMNS), ("add.7", COLUMNS))
    )
    text = explain_plan(plan(instructions=(argument,), segments=(segment,)))
    assert "add.7 [-, model]; 1 argument" in " ".join(text.split())
    assert "params__w__" not in text


@pytest.mark.parametrize(
    ("bound_s", "words"),
    [
        (0.003, "certified optimal: no plan takes less than 3.00 ms"),
        (0.00299, "certified within 0.33 % of optimal"),
        (0.0029999, "certified within 0.003 % of optimal"),
        (0.0, "none: nothing is known"),
    ],
)
def test_the_bound_says_what_it_certifies(bound_s: float, words: str) -> None:
    cost = CostSummary(compute_s=0.002, communication_s=0.001, lower_bound_s=bound_s, bound_scope="one mesh")
    assert words in explain_plan(plan(cost=cost))


@pytest.mark.parametrize(
    ("bound_s", "words"),
    [
        (0.004, "not bounded on its own mesh; 25 % less than any plan on the mesh it was found from, 4.00 ms"),
        (0.00297, "not bounded on its own mesh; at most 1.0 % more than any plan on the mesh it was found from"),
    ],
)
def test_a_bound_that_leaves_the_plan_out_certifies_nothing(bound_s: float, words: str) -> None:
    cost = CostSummary(
        compute_s=0.002, communication_s=0.001, lower_bound_s=bound_s, bound_scope="data=8", is_bounded=False
    )
    assert words in " ".join(explain_plan(plan(cost=cost)).split())
    assert "certified" not in explain_plan(plan(cost=cost))
    assert as_dict(plan(cost=cost))["gap"] is None


def test_memory_of_arguments_is_told_apart() -> None:
    state = adam(COLUMNS, nu=WHOLE)
    step_plan = plan(parameters=(*state, variable(9, "x", (6, 5), WHOLE)))
    each = 64 * 128 * 4
    assert as_dict(step_plan)["memory"]["arguments_by_kind"] == {
        "inputs": 6 * 5 * 4, "parameters": 3 * each // 4, "optimizer": 3 * each // 4 + 3 * each
    }  # fmt: skip


def test_the_report_as_data() -> None:
    data = json.loads(json.dumps(as_dict(plan())))
    assert data["arguments"][0]["count"] == 12
    assert data["arguments"][0]["split"] == [[], ["model"]]
    assert data["memory"]["peak_bytes"] == 4 * 2**20 + 4
    assert data["collectives"][0]["wire_bytes"] == 4500


def test_splits_in_words() -> None:
    assert describe_split(WHOLE) == "replicated"
    assert describe_split(TensorSharding((("data", "model"), ()))) == "dim 0 over data·model"


@dataclass(frozen=True)
class Seen:
    kind: str
    payload_bytes: int
    wire_bytes: int
    group_size: int
    count: int
    groups: str


def test_predicted_beside_observed() -> None:
    seen = [
        Seen("all-reduce", 3000, 4500, 4, 1, "[2,4]<=[8]"),
        Seen("all-to-all", 64, 32, 2, 3, "[4,2]<=[2,4]T(1,0)"),
    ]
    text = explain_collectives(plan(), seen)
    assert "all-to-all" in text
    assert format_bytes(4500) in text
