"""`planner.plan`: pins, forced strategies, meshes, fallbacks, determinism, quality."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from shardwright.clusters.cluster import Cluster
from shardwright.errors import AnnotationError, HloSyntaxError, OptionError, UnsupportedProgramError
from shardwright.hlo import parse
from shardwright.options.plan_options import PlanOptions
from shardwright.planner import PlanProgress, plan
from shardwright.planner.constraints.named_pins import _suggest_names
from shardwright.planner.limits import SearchLimits
from shardwright.plans.plan import Plan
from shardwright.plans.shardings import Mesh, TensorSharding
from shardwright.reserved_names import ANNOTATION_TARGET
from tests.planner.programs import PROGRAMS, Program, gpt2, lower, mlp

EIGHT = Cluster.local(8)


def annotated(pins: str, shape: str = "f32[16,8]") -> str:
    """A program whose only inner value is annotated with `pins`."""
    return f"""HloModule annotated, entry_computation_layout={{({shape})->{shape}}}

ENTRY main {{
  x = {shape} parameter(0), metadata={{op_name="x"}}
  y = {shape} tanh(x)
  pinned = {shape} custom-call(y), custom_call_target="{ANNOTATION_TARGET}", backend_config="{pins}"
  ROOT z = {shape} exponential(pinned)
}}
"""


def result_of(planned: Plan, name: str) -> TensorSharding:
    return next(entry for entry in planned.instructions if entry.name == name).result[0]


# ---- annotations -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pins", "expected"),
    [
        ("0:data", (("data",), ())),
        ("0:data,1:model", (("data",), ("model",))),
        ("0:-,1:-", ((), ())),
        ("0:-,1:data+model", ((), ("data", "model"))),
    ],
)
def test_annotation_is_held(pins: str, expected: tuple[tuple[str, ...], ...]) -> None:
    planned = plan(annotated(pins), EIGHT, PlanOptions(mesh={"data": 4, "model": 2}))
    result = result_of(planned, "pinned").dims
    named = [int(item.split(":")[0]) for item in pins.split(",")]
    assert [result[dim] for dim in named] == [expected[dim] for dim in named]


def test_split_somewhere_is_held() -> None:
    planned = plan(annotated("0:-,1:*"), EIGHT)
    assert result_of(planned, "pinned").dims[0] == ()
    assert result_of(planned, "pinned").dims[1]


@pytest.mark.parametrize(
    ("pins", "shape", "reason"),
    [
        ("0:nowhere", "f32[16,8]", "names axis 'nowhere'"),
        ("0:data,1:data", "f32[16,8]", "over the same axis 'data'"),
        ("2:data", "f32[16,8]", "pins dimension 2"),
        ("0:*", "f32[15,8]", "no axis of"),
        ("0:model+data", "f32[16,8]", "out of the mesh's order"),
        ("what", "f32[16,8]", "cannot be read"),
    ],
)
def test_annotation_that_cannot_hold_is_refused(pins: str, shape: str, reason: str) -> None:
    with pytest.raises(AnnotationError, match=reason.replace("+", r"\+")) as error:
        plan(annotated(pins, shape), EIGHT, PlanOptions(mesh={"data": 4, "model": 2}))
    assert shape in error.value.where
    assert error.value.remedy


def test_rule_mode_follows_the_annotation_and_searches_nothing() -> None:
    planned = plan(annotated("0:data"), EIGHT, PlanOptions(mesh={"data": 4, "model": 2}, mode="propagate"))
    assert planned.origin == "propagated from annotations"
    assert {entry.result[0].dims for entry in planned.instructions if entry.result} == {(("data",), ())}
    bare = plan(lower(mlp()), EIGHT, PlanOptions(mode="propagate"))
    assert all(sharding.is_replicated for entry in bare.instructions for sharding in entry.result)


def test_annotation_chooses_among_the_meshes() -> None:
    planned = plan(annotated("1:model"), EIGHT)
    assert "model" in planned.mesh.sizes
    assert {"model": 8} in [candidate.mesh.sizes for candidate in planned.candidates]
    assert all("model" in candidate.mesh.sizes for candidate in planned.candidates)


TILES = "sharding={devices=[2,1,4]<=[8] last_tile_dim_replicate}"


@pytest.mark.parametrize(
    ("sharding", "dims"),
    [
        (
            TILES + ', frontend_attributes={xla.sdy.sharding="#sdy.sharding_per_value<[<@mesh, [{\\"data\\"}, {}]>]>"}',
            (("data",), ()),
        ),
        ('frontend_attributes={xla.sdy.sharding="#sdy.sharding<@mesh, [{}, {\\"model\\"}]>"}', ((), ("model",))),
        (TILES, (("data",), ())),
        ("sharding={devices=[2,4]<=[8]}", (("data",), ("model",))),
        ("sharding={replicated}", ((), ())),
    ],
)
def test_sharding_constraints_of_the_user_are_held(sharding: str, dims: tuple[tuple[str, ...], ...]) -> None:
    text = annotated("").replace(
        f'custom_call_target="{ANNOTATION_TARGET}", backend_config=""', f'custom_call_target="Sharding", {sharding}'
    )
    planned = plan(text, EIGHT, PlanOptions(mesh={"data": 2, "model": 4}))
    assert result_of(planned, "pinned").dims == dims


def test_error_names_the_users_line() -> None:
    devices = jax.make_mesh((2, 4), ("d", "m"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def function(x: Any) -> Any:
        return jax.lax.with_sharding_constraint(jnp.sin(x), NamedSharding(devices, PartitionSpec(("d", "m")))) * 2

    text = jax.jit(function).lower(jax.ShapeDtypeStruct((8, 4), jnp.float32)).as_text("hlo", debug_info=True)
    with pytest.raises(AnnotationError, match="names axes d, m out of the mesh's order") as error:
        plan(text, EIGHT, PlanOptions(mesh={"m": 4, "d": 2}))
    assert "test_plan.py" in error.value.where
    held = plan(text, EIGHT, PlanOptions(mesh={"d": 2, "m": 4}))
    assert any(e.opcode == "custom-call" and e.result[0].dims == (("d", "m"), ()) for e in held.instructions)


# ---- forced strategies -----------------------------------------------------------------


@pytest.mark.dear
@pytest.mark.parametrize("name", ["mlp", "gpt2", "cnn", "scan"])
@pytest.mark.parametrize("force", ["data", "tensor", "mixed", "fsdp", "replicated"])
def test_forced_strategies_keep_their_promise(name: str, force: str) -> None:
    planned = plan(lower(PROGRAMS[name]()), EIGHT, PlanOptions(force=force))
    assert planned.origin == f"forced: {force}"
    axes = tuple(planned.mesh.sizes)
    for variable in planned.parameters:
        if variable.alias is None:
            _check_batch(force, variable.shape, variable.sharding, axes)
        else:
            _check_state(force, variable.shape, variable.sharding, axes)


def _check_batch(force: str, shape: tuple[int, ...], sharding: TensorSharding, axes: tuple[str, ...]) -> None:
    wanted = {"data": axes, "fsdp": axes, "mixed": axes[:1]}.get(force, ())
    assert sharding.dims == (wanted, *((),) * (len(shape) - 1))


def _check_state(force: str, shape: tuple[int, ...], sharding: TensorSharding, axes: tuple[str, ...]) -> None:
    if force in ("data", "replicated"):
        assert sharding.is_replicated
    elif (force == "fsdp" and any(size % 8 == 0 for size in shape)) or (
        force == "tensor" and len(shape) >= 2 and any(size % 8 == 0 for size in shape)
    ):
        assert set(sharding.axes) == set(axes)
    elif force == "mixed":
        assert axes[0] not in sharding.axes


def test_tensor_parallel_computes_with_weights_where_they_lie() -> None:
    text = lower(PROGRAMS["gpt2"]())
    planned = plan(text, EIGHT, PlanOptions(force="tensor"))
    assert not planned.notes
    entries = {entry.name: entry for entry in planned.instructions}
    weights = {v.number: v.sharding for v in planned.parameters if len(v.shape) == 2 and v.alias is not None}
    uses = 0
    for instruction in parse(planned.require_hlo()).entry:
        for operand, used in zip(instruction.operands, entries[instruction.name].operands, strict=True):
            if operand.opcode == "parameter" and operand.index in weights:
                stored = weights[operand.index].dims
                assert all(set(have) <= set(use) for have, use in zip(stored, used[0].dims, strict=True))
                uses += 1
    assert uses > len(weights)


def test_pins_by_argument_name_and_padding() -> None:
    text = lower(mlp(hidden=60))
    planned = plan(text, EIGHT, PlanOptions(mesh={"model": 8}, force={"params['w1']": {1: "model", 0: None}}))
    variable = next(v for v in planned.parameters if v.name == "params['w1']")
    assert variable.sharding.dims == ((), ("model",))
    assert (variable.shape, variable.stored_shape) == ((16, 60), (16, 64))
    assert variable.alias is not None
    assert planned.outputs[variable.alias].stored_shape == (16, 64)


def test_argument_and_output_axes_are_exact() -> None:
    text = lower(mlp())
    free = plan(text, EIGHT, PlanOptions(mesh={"data": 8}))
    number = next(v.number for v in free.parameters if v.name == "params['w2']")
    axes = {number: ((), ("data",))}
    planned = plan(text, EIGHT, PlanOptions(mesh={"data": 8}, argument_axes=axes))
    assert planned.parameters[number].sharding.dims == ((), ("data",))
    alias = planned.parameters[number].alias
    assert alias is not None
    contradiction = PlanOptions(mesh={"data": 8}, argument_axes=axes, output_axes={alias: (("data",), ())})
    with pytest.raises(AnnotationError, match="no sharding"):
        plan(text, EIGHT, contradiction)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (PlanOptions(mesh={"data": 4}), "has 4 devices, the cluster 8"),
        (PlanOptions(mesh={"a": 2, "b": 2, "c": 2, "d": 1}), "4 axes"),
        (PlanOptions(mesh={"data": 0, "model": 8}), "size 0"),
        (PlanOptions(mesh={"da ta": 8}), "not an identifier"),
        (PlanOptions(force="best"), "no strategy 'best'"),
        (PlanOptions(force={"nobody": {0: "data"}}), "no argument is named"),
        (PlanOptions(force="mixed", mesh={"data": 8}), "needs two axes"),
        (PlanOptions(argument_axes={0: ((),)}), "needs mesh"),
        (PlanOptions(mesh={"data": 8}, argument_axes={99: ((),)}), "no number 99"),
        (PlanOptions(argument_names=("x",)), "argument_names has 1"),
    ],
)
def test_wrong_options_are_refused(options: PlanOptions, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        plan(lower(mlp()), EIGHT, options)


def test_a_name_that_no_argument_has_is_answered_with_those_like_it() -> None:
    names = tuple(f"params['Block_{i}']['kernel']" for i in range(40))
    assert _suggest_names("params['Blok_7']['kernel']", names).startswith(
        "did you mean params['Block_7']['kernel'] or "
    )
    assert _suggest_names("x", names).count("Block") == 8


# ---- fallbacks -----------------------------------------------------------------------


def test_opcode_without_rule_is_replicated_and_noted() -> None:
    text = """HloModule opaque, entry_computation_layout={(f32[16,8])->f32[16,8]}

ENTRY main {
  x = f32[16,8] parameter(0)
  y = f32[16,8] custom-call(x), custom_call_target="mystery"
  ROOT z = f32[16,8] exponential(y)
}
"""
    planned = plan(text, EIGHT)
    entry = next(e for e in planned.instructions if e.name == "y")
    assert entry.operands[0][0].is_replicated
    assert entry.reason
    assert any(note.startswith("1 × custom-call: ") for note in planned.notes)


def test_text_that_is_not_hlo() -> None:
    with pytest.raises(HloSyntaxError):
        plan("def f(x): return x", EIGHT)


@pytest.mark.parametrize("devices", [1, 2, 6, 7])
def test_any_number_of_devices(devices: int) -> None:
    planned = plan(lower(mlp()), Cluster.local(devices))
    assert planned.mesh.device_count == devices


# ---- what comes out ----------------------------------------------------------------------


def test_candidates_progress_and_names() -> None:
    seen: list[PlanProgress] = []
    planned = plan(lower(mlp()), EIGHT, progress=seen.append)
    assert 0 < seen[-1].lower_bound_s == planned.cost.lower_bound_s
    searched = [str(c.mesh) for c in planned.candidates if c.name == "search"]
    assert searched[:2] == ["data=8", "data=4 × model=2"]  # 2x4 is the same problem
    assert searched[2:] == ["data=2 × model=2 × sequence=2"]  # descended from these
    experts = {c.name: c.step_s for c in planned.candidates if c.name != "search"}
    assert {"data parallel", "fully sharded (ZeRO-3)", "data × tensor"} <= set(experts)
    assert all(step_s is None or planned.cost.step_s <= step_s * 1.01 for step_s in experts.values())
    assert {p.phase for p in seen} == {"parse", "rules", "search", "check"}
    assert all(a.elapsed_s <= b.elapsed_s for a, b in pairwise(seen))
    assert "params['w1']" in {variable.name for variable in planned.parameters}
    assert 0.0 <= planned.cost.gap < 0.05


@pytest.mark.dear
@pytest.mark.parametrize(("vast_nodes", "count"), [(20_000, 2), (1_000, 0)])
def test_a_large_program_is_held_against_experts_of_one_axis(vast_nodes: int, count: int) -> None:
    limits = SearchLimits(large_program_nodes=1_000, huge_program_nodes=vast_nodes)
    text = lower(gpt2(layers=4, batch=16, length=16))
    planned = plan(text, EIGHT, limits=limits)
    entries = {c.name: c for c in planned.candidates if c.name != "search"}
    assert list(entries) == ["data parallel", "optimizer sharded (ZeRO-1)"][:count]
    for name, forced in zip(entries, ("data", "zero1"), strict=False):
        alone = plan(text, EIGHT, PlanOptions(force=forced), limits=limits)
        assert entries[name].step_s == pytest.approx(alone.cost.step_s, rel=1e-3)
        assert entries[name].mesh == alone.mesh


@pytest.mark.dear
def test_a_faster_mesh_that_does_not_fit_says_that_its_price_leaves_memory_aside() -> None:
    text, options = lower(gpt2(layers=1, batch=16, length=16)), PlanOptions(remat="none", micro_batches=1)
    limits = SearchLimits(target_gap=0.5, fine_target_gap=0.5, max_exact_states=0)  # the notes do not depend on the gap
    fastest = plan(text, EIGHT, options)
    limited = plan(text, EIGHT, replace(options, memory_budget=fastest.memory.peak_bytes * 95 // 100), limits=limits)
    searched = {axis_sizes(each.mesh): each for each in limited.candidates if each.name == "search"}
    passed_over = searched[axis_sizes(fastest.mesh)]
    assert passed_over.step_s is not None
    assert passed_over.step_s < limited.cost.step_s
    assert "memory aside" in passed_over.note
    assert searched[axis_sizes(limited.mesh)].note == ""
    half = plan(text, EIGHT, PlanOptions(memory_budget=fastest.memory.peak_bytes // 2), limits=limits)
    experts = [each for each in half.candidates if each.name != "search" and each.step_s is not None]
    passed_over_too = [each for each in experts if each.step_s * 1.01 < half.cost.step_s]
    assert passed_over_too
    assert all("memory aside" in each.note for each in passed_over_too)
    assert not any("memory aside" in each.note for each in experts if each.step_s > half.cost.step_s)
    refused = [each.note for each in half.candidates if each.step_s is None and each.name == "search"]
    assert all(re.fullmatch(r".*does not fit: the least that was found needs [0-9.]+ [KM]iB", note) for note in refused)


def axis_sizes(mesh: Mesh) -> tuple[int, ...]:
    """Devices along each axis; the chosen plan's axes are named anew, other candidates' are not."""
    return tuple(axis.size for axis in mesh.axes)


@pytest.mark.parametrize(
    "program",
    [mlp(batch=8192, width=256, hidden=512), gpt2(batch=64, width=128, length=64)],
    ids=["mlp", "gpt2"],
)
def test_each_device_is_sent_its_part_of_the_batch_only(program: Program) -> None:
    planned = plan(lower(program), EIGHT, PlanOptions(mesh={"data": 8}))
    state = {variable.number for variable in planned.parameters if variable.alias is not None}
    batch = [v for v in planned.parameters if v.number not in state and v.shape and v.shape[0] % 8 == 0]
    assert batch
    assert all(variable.sharding.dims[0] == ("data",) for variable in batch)


def test_aliased_variables_share_a_layout() -> None:
    planned = plan(lower(PROGRAMS["scan"]()), EIGHT)
    aliased = [variable for variable in planned.parameters if variable.alias is not None]
    assert aliased
    for variable in aliased:
        assert variable.alias is not None
        assert planned.outputs[variable.alias].sharding == variable.sharding


def test_loops_multiply_collectives() -> None:
    planned = plan(lower(PROGRAMS["scan"]()), EIGHT, PlanOptions(force="tensor"))
    assert max(collective.count for collective in planned.collectives) == 6
    assert not any("trip count" in note for note in planned.notes)


def test_large_batch_is_split_and_large_weights_stay() -> None:
    """Much data and small weights: every product is split by batch; the reverse: weights are never gathered."""
    data = plan(lower(mlp(batch=65536, width=16, hidden=16)), EIGHT, PlanOptions(mesh={"data": 8}))
    dots = [entry for entry in data.instructions if entry.opcode == "dot"]
    assert all(e.result[0].dims[0] == ("data",) or e.partial == ("data",) for e in dots)
    weights = plan(lower(mlp(batch=1, width=512, hidden=2048)), EIGHT, PlanOptions(mesh={"model": 8}))
    for name in ("w1", "w2"):
        stored = next(v for v in weights.parameters if v.name == f"params['{name}']")
        assert stored.sharding.axes == ("model",)
    assert sum(c.wire_bytes * c.count for c in weights.collectives) < 512 * 2048


_DIGEST = """
import dataclasses
import hashlib
import sys
from shardwright.clusters.cluster import Cluster
from shardwright.planner import plan
from shardwright.plans.plan_text import plan_to_json
planned = dataclasses.replace(plan(sys.stdin.read(), Cluster.local(8)), planning_s=0.0)
print(hashlib.sha256(plan_to_json(planned).encode()).hexdigest())
"""


@pytest.mark.dear
def test_same_plan_whatever_the_hash_seed() -> None:
    text = lower(PROGRAMS["cnn"]())
    digests = {
        subprocess.run(
            [sys.executable, "-c", _DIGEST],
            input=text, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("0", "4242")
    }  # fmt: skip
    assert len(digests) == 1


CORPUS = sorted((Path(__file__).parents[1] / "hlo" / "corpus").glob("*.hlo"))


#: Programs whose own sharding constraints put arrays on single devices, or split them over more than there are.
PINNED = {"shardings"}

#: Programs with sizes known only at run time.
DYNAMIC = {"dynamic_shapes"}

#: Programs of one device, after partitioning.
PARTITIONED = {"async", "compiled_collectives", "compiled_sharded", "tokens"}

#: Programs with computations written for one device.
MANUAL = {"torch_xla_style"}


@pytest.mark.dear
@pytest.mark.parametrize(
    "path",
    [path for path in CORPUS if path.stem not in PINNED | MANUAL | PARTITIONED | DYNAMIC],
    ids=lambda path: path.stem,
)
def test_no_program_breaks_the_planner(path: Path) -> None:
    """Every opcode that jaxlib prints is planned, and the plan passes the checker."""
    assert plan(path.read_text(), EIGHT).mesh.device_count == 8


@pytest.mark.parametrize("path", [path for path in CORPUS if path.stem in MANUAL], ids=lambda path: path.stem)
def test_programs_written_for_one_device_are_refused(path: Path) -> None:
    with pytest.raises(UnsupportedProgramError, match="shard_map"):
        plan(path.read_text(), EIGHT)


@pytest.mark.parametrize("path", [path for path in CORPUS if path.stem in DYNAMIC], ids=lambda path: path.stem)
def test_programs_with_sizes_of_the_run_are_refused_by_the_line(path: Path) -> None:
    with pytest.raises(UnsupportedProgramError, match="known only at run time") as refusal:
        plan(path.read_text(), EIGHT)
    assert refusal.value.where.startswith("line ")


@pytest.mark.parametrize("path", [path for path in CORPUS if path.stem in PARTITIONED], ids=lambda path: path.stem)
def test_programs_of_one_device_are_refused_by_the_line(path: Path) -> None:
    with pytest.raises(UnsupportedProgramError, match="the text is the program of one device") as refusal:
        plan(path.read_text(), EIGHT)
    assert refusal.value.where.startswith("line ")


@pytest.mark.parametrize("path", [path for path in CORPUS if path.stem in PINNED], ids=lambda path: path.stem)
def test_constraints_that_no_mesh_can_hold_are_refused(path: Path) -> None:
    with pytest.raises(AnnotationError, match="sharding"):
        plan(path.read_text(), EIGHT)


@pytest.mark.parametrize("fn", [lambda x: x, lambda x: (x,), lambda x: x.T])
def test_a_bare_root_may_leave_in_another_layout(fn: Any) -> None:
    """Nothing stands between argument and output; the array is moved on its way out."""
    text = jax.jit(fn, keep_unused=True).lower(jax.ShapeDtypeStruct((8, 8), jnp.float32)).as_text("hlo")
    rows, columns = (("data",), ()), ((), ("data",))
    pins = PlanOptions(mesh={"data": 8}, argument_axes={0: rows}, output_axes={0: columns})
    planned = plan(text, EIGHT, pins)
    assert (planned.parameters[0].sharding.dims, planned.outputs[0].sharding.dims) == (rows, columns)
