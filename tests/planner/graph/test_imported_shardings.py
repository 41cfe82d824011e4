"""Shardings on ordinary instructions are pins: on any of them, in loops and branches, in each notation, or an error."""

from __future__ import annotations

import re

import numpy as np
import pytest

from shardwright.clusters.cluster import Cluster
from shardwright.errors import AnnotationError
from shardwright.hlo import Instruction, Module, TupleShape, parse
from shardwright.options.plan_options import PlanOptions
from shardwright.planner import plan
from shardwright.planner.graph.imported_shardings import read_sharding
from shardwright.planner.graph.sharding_calls import find_output_shardings, insert_sharding_calls
from shardwright.planner.rewrites.edit import attribute
from shardwright.planner.search.program import Program
from shardwright.plans.plan import Plan
from shardwright.plans.shardings import Mesh
from shardwright.xla import emit_stablehlo, private
from tests.planner.programs import PROGRAMS, lower
from tests.planner.running import xla_outputs

EIGHT = Cluster.local(8)
TWO_BY_FOUR = PlanOptions(mesh={"a": 2, "b": 4})

ROWS = "{devices=[2,1,4]<=[8] last_tile_dim_replicate}"
COLUMNS = "{devices=[1,4,2]<=[2,4]T(1,0) last_tile_dim_replicate}"

Dims = tuple[tuple[str, ...], ...]


def product(attributes: str, header: str = "") -> str:
    return f"""HloModule annotated, entry_computation_layout={{(f32[16,16],f32[16,8])->f32[16,8]}}{header}

FileNames
1 "model.py"

FunctionNames
1 "step"

FileLocations
1 {{file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=9}}

StackFrames
1 {{file_location_id=1 parent_frame_id=1}}

ENTRY main {{
  x = f32[16,16] parameter(0)
  w = f32[16,8] parameter(1)
  y = f32[16,8] dot(x, w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}, {attributes}, metadata={{op_name="layer/dot" stack_frame_id=1}}
  ROOT z = f32[16,8] cosine(y)
}}
"""  # noqa: E501


def written_out(module: Module) -> Module:
    return insert_sharding_calls(module, find_output_shardings(module.entry.root))


def lies(planned: Plan) -> dict[str, Dims]:
    return {entry.name: entry.result[0].dims for entry in planned.instructions}


SHARDY = 'frontend_attributes={xla.sdy.sharding="#sdy.sharding<@mesh, [{\\"dp\\"}, {\\"tp\\"}]>", other="kept"}'
MESH = ', frontend_attributes={xla.sdy.meshes={mesh = #sdy.mesh<["dp"=2, "tp"=4]>}}'


@pytest.mark.parametrize(
    ("attributes", "dims"),
    [
        ("sharding={devices=[8,1]0,1,2,3,4,5,6,7}", (("a", "b"), ())),
        ("sharding={devices=[2,4]<=[8]}", (("a",), ("b",))),
        (f"sharding={ROWS}", (("a",), ())),
        ("sharding={devices=[1,4,2]<=[2,4]T(1,0) last_tile_dims={replicated}}", ((), ("b",))),
        ("sharding={replicated}", ((), ())),
        ('sharding={devices=[2,4]<=[8] metadata={op_name="manual {"}}', (("a",), ("b",))),
        (SHARDY, (("a",), ("b",))),
    ],
)
def test_notations_on_an_ordinary_instruction(attributes: str, dims: Dims) -> None:
    planned = plan(product(attributes, MESH), EIGHT, TWO_BY_FOUR)
    assert lies(planned)["y.sharding"] == dims


def test_other_attributes_stay() -> None:
    module = written_out(parse(product(SHARDY, MESH)))
    (dot,) = (instruction for instruction in module.entry if instruction.opcode == "dot")
    assert dot.get("frontend_attributes") == {"other": "kept"}
    assert "sharding" not in dot.attributes


@pytest.mark.parametrize(
    ("tiles", "dims"),
    [("[1,16]<=[16]", ((), ("a",))), ("[3,1]0,1,2", (("a",), ())), ("[16,1]<=[16]", (("a",), ()))],
)
def test_tiles_for_another_number_of_devices_split_what_they_split(tiles: str, dims: Dims) -> None:
    assert lies(plan(product(f"sharding={{devices={tiles}}}"), EIGHT, TWO_BY_FOUR))["y.sharding"] == dims


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ("sharding={maximal device=0}", "puts the whole array on one device"),
        ("sharding={manual}", "shard_map"),
        (
            "sharding={devices=[2,2,2]0,1,2,3,4,5,7,6 last_tile_dim_replicate}",
            "no sharding over a=2 × b=4 satisfies a sharding constraint {0: split 2 ways, 1: split 2 ways}",
        ),
    ],
)
def test_what_cannot_hold_is_refused_with_tensor_shape_line_and_reason(attributes: str, reason: str) -> None:
    with pytest.raises(AnnotationError, match=re.escape(reason)) as caught:
        plan(product(attributes), EIGHT, TWO_BY_FOUR)
    assert caught.value.where == "layer/dot f32[16,8], model.py:7 (step)"


def test_the_only_device_of_a_program_that_places_values_in_memories_is_no_wish() -> None:
    """As `jax.export` writes it: `x` on the host, the device's name on arguments, results, calls and scalars."""
    one, call = "sharding={maximal device=0}", 'custom_call_target="annotate_device_placement"'
    text = f"""HloModule placed, entry_computation_layout={{(f32[16,16],f32[],f32[16,8])->(f32[16,8],f32[])}}

ENTRY main {{
  x = f32[16,16] parameter(0), {one}
  scale = f32[] parameter(1), {one}
  w = f32[16,8] parameter(2)
  near = f32[16,16] custom-call(x), {call}, frontend_attributes={{_xla_buffer_placement="device"}}, {one}
  y = f32[16,8] dot(near, w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}, {one}
  ROOT z = (f32[16,8], f32[]) tuple(y, scale), sharding={{{{maximal device=0}}, {{maximal device=0}}}}
}}
"""
    assert plan(text, EIGHT).parameters
    with pytest.raises(AnnotationError, match="puts the whole array on one device"):
        plan(text.replace("annotate_device_placement", "other_call"), EIGHT)


# ---- loops, tuples, branches, calls --------------------------------------------------

LOOP = f"""HloModule looped

lt {{
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  c = f32[] parameter(2)
  d = f32[] parameter(3)
  ROOT q = pred[] compare(a, b), direction=LT
}}

body {{
  p = (s32[], f32[16,8], f32[16,8]) parameter(0), sharding={{{{replicated}}, {ROWS}, {{replicated}}}}
  i = s32[] get-tuple-element(p), index=0, sharding={{replicated}}
  x = f32[16,8] get-tuple-element(p), index=1, sharding={ROWS}
  k = f32[16,8] get-tuple-element(p), index=2
  one = s32[] constant(1)
  n = s32[] add(i, one)
  y = f32[16,8] add(x, k), sharding={{devices=[2,4]<=[8]}}
  z = f32[16,8] tanh(y)
  ROOT r = (s32[], f32[16,8], f32[16,8]) tuple(n, z, k)
}}

cond {{
  p = (s32[], f32[16,8], f32[16,8]) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  three = s32[] constant(3)
  ROOT c = pred[] compare(i, three), direction=LT
}}

ENTRY main {{
  x = f32[16,8] parameter(0)
  t = f32[16,8] parameter(1)
  zero = s32[] constant(0)
  init = (s32[], f32[16,8], f32[16,8]) tuple(zero, x, t)
  w = (s32[], f32[16,8], f32[16,8]) while(init), condition=cond, body=body, sharding={{{{replicated}}, {ROWS}, {{replicated}}}}
  wx = f32[16,8] get-tuple-element(w), index=1
  s = (f32[16,8], f32[16,8]) sort(wx, t), dimensions={{0}}, to_apply=lt, sharding={{{COLUMNS}, {{replicated}}}}
  first = f32[16,8] get-tuple-element(s), index=0
  second = f32[16,8] get-tuple-element(s), index=1
  sum = f32[16,8] add(first, second)
  ROOT out = (f32[16,8], f32[16,8]) tuple(sum, first), sharding={{{ROWS}, {COLUMNS}}}
}}
"""  # noqa: E501


def test_loops_and_tuples_of_several_arrays() -> None:
    planned = plan(LOOP, EIGHT, TWO_BY_FOUR)
    result = lies(planned)
    rows, columns = (("a",), ()), ((), ("b",))
    assert result["y.sharding"] == (("a",), ("b",))
    assert {name: result[name] for name in result if name.endswith(".sharding") and name != "y.sharding"} == {
        "p.element1.sharding": rows, "p.element2.sharding": ((), ()), "z.sharding": rows, "w.element1.sharding": rows,
        "s.element.sharding": columns, "s.element1.sharding": ((), ()),
    }  # fmt: skip
    assert [output.sharding.dims for output in planned.outputs] == [rows, columns]
    carried = next(entry for entry in planned.instructions if entry.opcode == "while")
    assert [sharding.dims for sharding in carried.result[1:]] == [rows, ((), ())]


def test_numbers_stay_the_same() -> None:
    x, t = np.random.default_rng(0).normal(size=(2, 16, 8)).astype(np.float32)
    held = xla_outputs(plan(LOOP, EIGHT, TWO_BY_FOUR), x, t)
    plain = re.sub(r", sharding=\{\{.*\}\}$|, sharding=\{.*?\}$", "", LOOP, flags=re.MULTILINE)
    assert "sharding" not in plain
    for got, wanted in zip(held, xla_outputs(plan(plain, EIGHT, TWO_BY_FOUR), x, t), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6)


BRANCHES = f"""HloModule branching

double {{
  a = f32[16,8] parameter(0), sharding={ROWS}
  ROOT d = f32[16,8] add(a, a), sharding={COLUMNS}
}}

yes {{
  p = f32[16,8] parameter(0)
  ROOT y = f32[16,8] call(p), to_apply=double, sharding={ROWS}
}}

no {{
  p = f32[16,8] parameter(0), sharding={COLUMNS}
  ROOT n = f32[16,8] negate(p)
}}

ENTRY main {{
  x = f32[16,8] parameter(0)
  which = pred[] parameter(1), sharding={{replicated}}
  c = f32[16,8] conditional(which, x, x), true_computation=yes, false_computation=no, sharding={{devices=[2,4]<=[8]}}
  ROOT z = f32[16,8] sine(c)
}}
"""


def test_branches_and_called_functions() -> None:
    result = lies(plan(BRANCHES, EIGHT, TWO_BY_FOUR))
    rows, columns = (("a",), ()), ((), ("b",))
    assert {name: dims for name, dims in result.items() if name.endswith(".sharding")} == {
        "a.sharding": rows, "d.sharding": columns, "y.sharding": rows, "p.1.sharding": columns,
        "c.sharding": (("a",), ("b",)),
    }  # fmt: skip


def test_a_program_that_carries_none_is_left_alone() -> None:
    module = parse(lower(PROGRAMS["scan"]()))
    assert written_out(module) is module


def test_what_says_the_same_twice_is_written_once() -> None:
    text = written_out(parse(LOOP)).to_text()
    assert len(re.findall(r'custom_call_target="Sharding"', text)) == 7
    private.stablehlo_of(text)  # XLA reads it


# ---- whole modules -------------------------------------------------------------------


def annotated(text: str) -> Module:
    """The program as a dump of XLA's has it: every instruction carries a sharding, tuples one per array; arguments,
    some of which lie in an output's place, carry none."""
    module = parse(text)
    for number, instruction in enumerate(module.instructions()):
        if instruction not in module.entry.parameters:
            each = [_some(number + leaf, shape.dimensions) for leaf, shape in enumerate(instruction.shape.leaves)]
            said = f"{{{', '.join(each)}}}" if isinstance(instruction.shape, TupleShape) else each[0]
            instruction.attributes["sharding"] = attribute("sharding", said)
    return module


def _some(number: int, dimensions: tuple[int, ...]) -> str:
    """Replicated, or split over axis a or b, whichever divides."""
    for size, order in ((2, "<=[8]"), (4, "<=[2,4]T(1,0)"))[:: 1 if number % 2 else -1]:
        for dim, length in enumerate(dimensions):
            if length % size == 0 and number % 3:
                tiles = ",".join(str(size if at == dim else 1) for at in range(len(dimensions)))
                return f"{{devices=[{tiles},{8 // size}]{order} last_tile_dim_replicate}}"
    return "{replicated}"


@pytest.mark.parametrize("name", ["mlp", "scan", "control"])
def test_all_that_a_dumped_module_says_holds(name: str) -> None:
    module = annotated(lower(PROGRAMS[name]()))
    planned = plan(module.to_text(), EIGHT, TWO_BY_FOUR)
    result = lies(planned)
    calls = parse(planned.require_hlo()).instructions()
    written = [each for each in calls if each.get("custom_call_target") == "Sharding"]
    assert len(written) > 20
    assert {call.name: result[call.name] for call in written} == {call.name: said_of(call) for call in written}
    root = module.entry.root
    assert [each.sharding.dims for each in planned.outputs] == [said_of(root, n) for n in range(len(planned.outputs))]
    emit_stablehlo(planned.require_hlo(), planned)


def said_of(instruction: Instruction, leaf: int = 0) -> Dims:
    said = read_sharding(instruction, {}, instruction.shape.leaves[leaf].rank, leaf)
    assert said is not None
    return tuple(dim.axes or () for dim in said.on(Mesh.of({"a": 2, "b": 4})).values())


def test_outputs_are_looked_through_once_however_often_the_program_is_read() -> None:
    """What they say is in the module that all variants begin with."""
    read = Program(product(f"sharding={ROWS}"), TWO_BY_FOUR)
    again = read.rewrite_variant(None, 1)
    assert again is not read
    assert again._base_module is read._base_module
    assert again.own_shardings is read.own_shardings
