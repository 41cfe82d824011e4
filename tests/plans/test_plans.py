"""Plans as values and as JSON: round trips, the published schema, and every wrong field named."""

from __future__ import annotations

import contextlib
import copy
import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import PlanError
from shardwright.plans.attention_note import AttentionNote, gather_notes
from shardwright.plans.plan import (
    Candidate,
    CostSummary,
    InstructionPlan,
    MemorySummary,
    Plan,
    PlannedCollective,
    SegmentPlan,
    VariablePlan,
)
from shardwright.plans.plan_json import decode, encode
from shardwright.plans.plan_text import plan_to_json
from shardwright.plans.shardings import Mesh, MeshAxis, TensorSharding

SCHEMA = json.loads((Path(__file__).resolve().parents[2] / "docs" / "plan-schema.json").read_text(encoding="utf-8"))
HLO = "HloModule tiny"
MESH = Mesh.of({"data": 2, "model": 4})
KINDS = ["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"]


def sharding(*dims: tuple[str, ...], unreduced: tuple[str, ...] = ()) -> TensorSharding:
    return TensorSharding(dims, unreduced)


def small_plan(**changes: Any) -> Plan:
    rows, partial = sharding(("data",), ()), sharding((), (), unreduced=("model",))
    fields: dict[str, Any] = {
        "module_name": "tiny",
        "hlo_sha256": sha256(HLO.encode()).hexdigest(),
        "mesh": MESH,
        "hardware": "cpu",
        "origin": "search",
        "instructions": (
            InstructionPlan(computation="main", name="x", opcode="parameter", operands=(), result=(rows,)),
            InstructionPlan(
                computation="main",
                name="y",
                opcode="custom-call",
                operands=((rows,), (rows, partial)),
                result=(sharding((), ()),),
                partial=("model",),
                reason="custom calls are replicated",
            ),
        ),
        "parameters": (
            VariablePlan(
                number=0,
                name="x",
                element_type="f32",
                shape=(3, 4),
                sharding=rows,
                stored_shape=(4, 4),
                alias=0,
            ),
        ),
        "outputs": (
            VariablePlan(
                number=0, name="y", element_type="f32", shape=(3, 4), sharding=rows, stored_shape=(4, 4), alias=0
            ),
        ),
        "collectives": (
            PlannedCollective(
                kind="all-reduce",
                axes=("model",),
                instruction="y",
                cause="partial sum of y",
                payload_bytes=48,
                wire_bytes=72,
                count=2,
                time_s=1e-6,
            ),
        ),
        "cost": CostSummary(compute_s=1e-3, communication_s=2e-3, lower_bound_s=2.5e-3, bound_scope="all"),
        "memory": MemorySummary(arguments_bytes=10, outputs_bytes=20, temporaries_bytes=30),
        "candidates": (
            Candidate(mesh=MESH, step_s=3e-3, name="ZeRO-3"),
            Candidate(mesh=Mesh.of({"data": 8}), step_s=None, note="no"),
        ),
        "segments": (SegmentPlan(name="block", kind=1, instructions=2, repeats=12, boundary=(("x", rows),)),),
        "notes": ("a note",),
        "planning_s": 0.25,
        "hlo_text": HLO,
    }
    return Plan(**(fields | changes))


# ---- values ------------------------------------------------------------------


def test_shardings_and_meshes_check_themselves() -> None:
    with pytest.raises(PlanError, match="used twice"):
        sharding(("data",), ("data",))
    with pytest.raises(PlanError, match="repeat"):
        Mesh(axes=(MeshAxis(name="a", size=2), MeshAxis(name="a", size=4)))
    with pytest.raises(PlanError, match="identifier"):
        MeshAxis(name="1a", size=2)
    assert sharding(("data",), ("model",)).shard_shape((5, 8), MESH) == (3, 2)


def test_the_gap_is_between_plan_and_bound() -> None:
    assert small_plan().cost.gap == pytest.approx(1 - 2.5 / 3)


# ---- round trips ---------------------------------------------------------------


def test_round_trip() -> None:
    plan = small_plan()
    assert decode(plan_to_json(plan), hlo_text=HLO) == plan
    assert decode(plan_to_json(plan, indent=2)).hlo_text is None


def test_what_became_of_attention_is_kept_and_checked() -> None:
    note = AttentionNote(
        place="model.py:31", count=2, kind="forward", words="causal, 4 heads", saved_bytes=64, saved_s=0.5
    )
    left_alone = replace(note, saved_bytes=0, saved_s=0.0, replaced=False, reason="a soft-cap")
    again = replace(note, count=3, saved_bytes=96)
    notes = gather_notes((note, left_alone, again))
    assert notes == (replace(note, count=5, saved_bytes=160, saved_s=1.0), left_alone)
    plan = small_plan(attention=notes)
    data = json.loads(plan_to_json(plan))
    jsonschema.validate(data, SCHEMA)
    assert decode(json.dumps(data)) == plan
    assert "attention" not in json.loads(plan_to_json(small_plan()))
    data["attention"][1]["kind"] = "sideways"
    with pytest.raises(PlanError, match="one of forward, backward, again") as refusal:
        decode(json.dumps(data))
    assert refusal.value.where == "plan.attention[1].kind"


def test_options_of_the_compiler_are_kept_and_checked() -> None:
    plan = small_plan(compile_options={"a_flag": True, "a_number": 3, "a_text": "x"})
    data = json.loads(plan_to_json(plan))
    jsonschema.validate(data, SCHEMA)
    assert decode(json.dumps(data)) == plan
    assert "compile_options" not in json.loads(plan_to_json(small_plan()))
    with pytest.raises(PlanError, match="a whole number") as refusal:
        decode(json.dumps(data | {"compile_options": {"a_part": 0.5}}))
    assert refusal.value.where == "plan.compile_options.a_part"


def test_collectives_along_parts_of_axes_keep_their_devices() -> None:
    whole = small_plan().collectives[0]
    part = replace(whole, groups=((0, 2), (1, 3), (4, 6), (5, 7)))
    plan = small_plan(collectives=(whole, part))
    assert decode(plan_to_json(plan), hlo_text=HLO) == plan
    jsonschema.validate(encode(plan), SCHEMA)
    assert (whole.over, part.over) == ("model", "2 devices along model")


NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
SECONDS = st.floats(0, 1e6, allow_nan=False)


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    names = draw(st.lists(st.sampled_from(["data", "model", "stage"]), unique=True, max_size=3))
    return Mesh(axes=tuple(MeshAxis(name=name, size=draw(st.integers(1, 8))) for name in names))


@st.composite
def shardings(draw: st.DrawFn, mesh: Mesh, rank: int | None = None) -> TensorSharding:
    rank = draw(st.integers(0, 3)) if rank is None else rank
    dims: list[tuple[str, ...]] = [()] * rank
    unreduced = []
    for axis in mesh.sizes:
        place = draw(st.sampled_from([None, "partial", *range(rank)]))
        if place == "partial":
            unreduced.append(axis)
        elif isinstance(place, int):
            dims[place] = (*dims[place], axis)
    return TensorSharding(tuple(dims), tuple(unreduced))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    mesh = draw(meshes())
    value = st.lists(shardings(mesh), max_size=3).map(tuple)
    axes = st.lists(st.sampled_from(sorted(mesh.sizes)), unique=True).map(tuple) if mesh.axes else st.just(())
    instruction = st.builds(
        InstructionPlan,
        computation=NAMES,
        name=NAMES,
        opcode=NAMES,
        operands=st.lists(value, max_size=3).map(tuple),
        result=value,
        partial=axes,
        reason=NAMES,
    )
    collective = st.builds(
        PlannedCollective,
        kind=st.sampled_from(KINDS),
        axes=axes,
        instruction=NAMES,
        cause=NAMES,
        payload_bytes=st.integers(0, 2**50),
        wire_bytes=st.integers(0, 2**50),
        count=st.integers(1, 100),
        time_s=SECONDS,
    )
    segment = st.builds(
        SegmentPlan,
        name=NAMES,
        kind=st.integers(0, 9),
        instructions=st.integers(0, 99),
        repeats=st.integers(1, 99),
        boundary=st.lists(st.tuples(NAMES, shardings(mesh)), max_size=3).map(tuple),
    )
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    element_type = draw(st.sampled_from(["f32", "bf16", "pred", "f8e4m3fn"]))
    variable = VariablePlan.from_sharding(0, draw(NAMES), element_type, shape, draw(shardings(mesh, len(shape))), mesh)
    return small_plan(
        mesh=mesh,
        module_name=draw(NAMES),
        instructions=tuple(draw(st.lists(instruction, max_size=5))),
        collectives=tuple(draw(st.lists(collective, max_size=3))),
        parameters=(variable,),
        outputs=(),
        candidates=tuple(
            draw(st.lists(st.builds(Candidate, mesh=meshes(), step_s=SECONDS | st.none(), note=NAMES, name=NAMES)))
        ),
        segments=tuple(draw(st.lists(segment, max_size=3))),
        notes=tuple(draw(st.lists(NAMES))),
        planning_s=draw(SECONDS),
    )


@pytest.mark.dear
@settings(max_examples=60, deadline=None)
@given(plans())
def test_any_plan_comes_back_equal_and_fits_the_schema(plan: Plan) -> None:
    assert decode(plan_to_json(plan)) == plan
    jsonschema.validate(encode(plan), SCHEMA)


def test_plans_of_format_1_0_are_read() -> None:
    data = encode(small_plan())
    data["format"] = "1.0"
    del data["segments"]
    for candidate in data["candidates"]:
        del candidate["name"]
    read = decode(json.dumps(data))
    assert read.segments == ()
    assert [candidate.name for candidate in read.candidates] == ["", ""]


def test_large_plans_are_small() -> None:
    """51,000 instructions: under 100 bytes apiece, and read as they were written."""
    one = small_plan().instructions[1]
    many = tuple(
        InstructionPlan(
            computation="main",
            name=f"multiply.{i}",
            opcode="multiply",
            operands=one.operands,
            result=one.result,
        )
        for i in range(51_000)
    )
    plan = small_plan(instructions=many)
    text = plan_to_json(plan)
    assert decode(text) == plan
    assert len(text) < 100 * len(many)


# ---- what is refused -----------------------------------------------------------


def set_to(path: tuple[Any, ...], value: Any) -> Any:
    def change(data: Any) -> None:
        for part in path[:-1]:
            data = data[part]
        data[path[-1]] = value

    return change


WRONG = [
    (set_to(("format",), "2.0"), "plan.format"),
    (set_to(("format",), 1), "plan.format"),
    (set_to(("format",), "one"), "plan.format"),
    (set_to(("hlo_sha256",), "abc"), "plan.hlo_sha256"),
    (set_to(("surprise",), 1), "plan.surprise"),
    (set_to(("mesh",), {}), "plan.mesh"),
    (set_to(("mesh", 0, "size"), 0), "plan.mesh[0].size"),
    (set_to(("mesh", 0, "name"), "no name"), "plan.mesh[0]"),
    (set_to(("mesh", 0, "name"), "model"), "plan.mesh"),
    (set_to(("cost", "compute_s"), -1), "plan.cost.compute_s"),
    (set_to(("cost", "compute_s"), True), "plan.cost.compute_s"),
    (set_to(("cost", "surprise"), 1), "plan.cost.surprise"),
    (set_to(("memory", "arguments_bytes"), 1.5), "plan.memory.arguments_bytes"),
    (set_to(("candidates", 0, "step_s"), "fast"), "plan.candidates[0].step_s"),
    (set_to(("candidates", 0, "name"), 3), "plan.candidates[0].name"),
    (set_to(("segments", 0, "repeats"), 0), "plan.segments[0].repeats"),
    (set_to(("segments", 0, "boundary"), [["x"]]), "plan.segments[0].boundary"),
    (set_to(("segments", 0, "boundary"), [["x", 99]]), "plan.segments[0].boundary"),
    (set_to(("notes", 0), 3), "plan.notes"),
    (set_to(("parameters", 0, "number"), 5), "plan.parameters[0].number"),
    (set_to(("parameters", 0, "sharding"), 99), "plan.parameters[0].sharding"),
    (set_to(("parameters", 0, "shape"), [3]), "plan.parameters[0].sharding"),
    (set_to(("parameters", 0, "stored_shape"), [4]), "plan.parameters[0].stored_shape"),
    (set_to(("parameters", 0, "element_type"), "float"), "plan.parameters[0].element_type"),
    (set_to(("parameters", 0, "alias"), 7), "plan.parameters[0].alias"),
    (set_to(("outputs", 0, "alias"), None), "plan.parameters[0].alias"),
    (set_to(("collectives", 0, "kind"), "broadcast"), "plan.collectives[0].kind"),
    (set_to(("collectives", 0, "axes"), ["ghost"]), "plan.collectives[0].axes"),
    (set_to(("collectives", 0, "groups"), [[0, 1], [2, 2]]), "plan.collectives[0].groups"),
    (set_to(("collectives", 0, "groups"), [[0], [1, 2, 3]]), "plan.collectives[0].groups"),
    (set_to(("collectives", 0, "groups"), 4), "plan.collectives[0].groups"),
    (set_to(("shardings", 0, "dims"), [["ghost"]]), "plan.shardings[0].dims"),
    (set_to(("shardings", 0, "dims"), [["data"], ["data"]]), "plan.shardings[0]"),
    (set_to(("values", 0), [99]), "plan.values[0]"),
    (set_to(("opcodes",), "add"), "plan.opcodes"),
    (set_to(("instructions", 1), []), "plan.instructions[1]"),
    (set_to(("instructions", 1, 0), 9), "plan.instructions[1]"),
    (set_to(("instructions", 1, 1), None), "plan.instructions[1]"),
    (set_to(("instructions", 1, 3), [99]), "plan.instructions[1]"),
    (set_to(("instructions", 1, 4), -1), "plan.instructions[1]"),
    (set_to(("instructions", 1, 5), ["ghost"]), "plan.instructions[1]"),
    (set_to(("instructions", 1, 5), ["data", "data"]), "plan.instructions[1]"),
    (set_to(("instructions", 1, 5), [["data"]]), "plan.instructions[1]"),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_wrong_fields_are_named(number: int) -> None:
    change, where = WRONG[number]
    data = encode(small_plan())
    change(data)
    with pytest.raises(PlanError) as caught:
        decode(json.dumps(data))
    assert caught.value.where == where


@pytest.mark.parametrize("key", sorted(encode(small_plan())))
def test_missing_fields_are_named(key: str) -> None:
    data = encode(small_plan())
    del data[key]
    with pytest.raises(PlanError) as caught:
        decode(json.dumps(data))
    assert caught.value.where == f"plan.{key}"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data, SCHEMA)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", '"plan"', "[" * 100_000])
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(PlanError):
        decode(text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=5), values, max_size=3),
    max_leaves=6,
)


@pytest.mark.dear
@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_change_of_a_plan_gives_anything_but_a_plan_or_its_error(data: st.DataObject) -> None:
    tree: Any = copy.deepcopy(encode(small_plan()))
    at, parent, key = tree, None, None
    while isinstance(at, (dict, list)) and at and (parent is None or data.draw(st.booleans())):
        parent = at
        key = data.draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
        at = at[key]
    assert parent is not None
    parent[key] = data.draw(JSON)
    with contextlib.suppress(PlanError):
        decode(json.dumps(tree))


def test_the_wrong_program_is_refused() -> None:
    with pytest.raises(PlanError, match="not the program") as caught:
        decode(plan_to_json(small_plan()), hlo_text="HloModule other")
    assert caught.value.remedy


def test_later_minor_versions_may_say_more() -> None:
    data = encode(small_plan()) | {"format": "1.99", "surprise": 1}
    assert decode(json.dumps(data)) == small_plan()
