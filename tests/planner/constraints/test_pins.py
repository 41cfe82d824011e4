"""What programs say about their own tensors, through JAX's transformations and in each notation, is held or refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from shardwright.client.annotate import annotate, keep_annotations
from shardwright.clusters.cluster import Cluster
from shardwright.errors import AnnotationError
from shardwright.hlo import parse
from shardwright.options.plan_options import PlanOptions
from shardwright.planner import plan
from shardwright.planner.constraints.annotations import collect_requirements
from shardwright.planner.graph.dataflow import build_dataflow
from shardwright.planner.graph.program_mesh import ProgramMesh
from shardwright.planner.search.meshes import meshes_to_search
from shardwright.plans.plan import Plan
from shardwright.plans.shardings import Mesh
from shardwright.xla import emit_stablehlo, to_named_shardings
from tests.planner.running import xla_outputs

EIGHT = Cluster.local(8)
DEVICES = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)


def on(*axes: Any) -> NamedSharding:
    return NamedSharding(DEVICES, PartitionSpec(*axes))


def constrain(x: Any, *axes: Any) -> Any:
    return jax.lax.with_sharding_constraint(x, on(*axes))


def shape(*dimensions: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dimensions, jnp.float32)


def lower_text(function: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    return jax.jit(function, **options).lower(*arguments).as_text("hlo", debug_info=True)


def meshes(text: str, cluster: Cluster = EIGHT, **options: Any) -> list[dict[str, int]]:
    chosen = PlanOptions(**options)
    result = meshes_to_search(cluster, chosen, collect_requirements(build_dataflow(parse(text)), chosen))
    return [mesh.sizes for mesh in result]


def on_own_mesh(text: str) -> Plan:
    (mesh,) = meshes(text)
    return plan(text, EIGHT, PlanOptions(mesh=mesh))


def constraints(planned: Plan) -> list[tuple[tuple[str, ...], ...]]:
    return [entry.result[0].dims for entry in planned.instructions if entry.opcode == "custom-call"]


def layer(w: Any, x: Any) -> Any:
    return constrain(jnp.tanh(constrain(x, "dp", None) @ w), "dp", "tp")


def through_grad(w: Any, x: Any) -> Any:
    return jax.grad(lambda w: layer(w, x).sum())(w)


def through_vmap(w: Any, x: Any) -> Any:
    return jax.vmap(lambda row: constrain(row * 2, "tp"))(x @ w)


def through_scan(w: Any, x: Any) -> Any:
    return jax.lax.scan(lambda x, w: (layer(w, x), None), x, jnp.stack([w, w + 1, w * 2]))[0]


def through_remat(w: Any, x: Any) -> Any:
    return jax.grad(lambda w: jax.checkpoint(layer)(w, x).sum())(w)


@pytest.mark.parametrize("function", [layer, through_grad, through_vmap, through_scan, through_remat])
@pytest.mark.parametrize(
    "mesh", [{"dp": 2, "tp": 4}, {"tp": 4, "dp": 2}, {"rows": 2, "columns": 4}, {"a": 2, "b": 2, "c": 2}]
)
def test_constraints_are_held_through_transformations(function: Callable[..., Any], mesh: dict[str, int]) -> None:
    planned = plan(lower_text(function, shape(16, 16), shape(8, 16)), EIGHT, PlanOptions(mesh=mesh))
    names = ProgramMesh(sizes={"dp": 2, "tp": 4}).on(planned.mesh)
    result = constraints(planned)
    both, rows = (names["dp"], names["tp"]), (names["dp"], ())
    if function is through_vmap:
        assert [dims[1] for dims in result] == [names["tp"]]  # the mapped dimension is free
    else:
        assert {both, rows} <= set(result) <= {both, rows}


def test_numbers_stay_the_same_under_constraints() -> None:
    w, x = np.random.default_rng(0).normal(size=(2, 16, 16)).astype(np.float32)
    planned = on_own_mesh(lower_text(through_remat, shape(16, 16), shape(16, 16)))
    inputs, outputs = to_named_shardings(planned)
    got = jax.jit(through_remat, in_shardings=inputs, out_shardings=outputs[0])(w, x)
    np.testing.assert_allclose(got, through_remat(w, x), rtol=1e-4, atol=1e-5)


def test_shardings_of_arguments_and_outputs_are_held_and_run() -> None:
    text = lower_text(lambda w, x: x @ w, shape(16, 32), shape(8, 16), in_shardings=(on(None, "tp"), None),
                   out_shardings=on("dp", None))  # fmt: skip
    planned = on_own_mesh(text)
    assert planned.parameters[0].sharding.dims == ((), ("tp",))
    assert planned.outputs[0].sharding.dims == (("dp",), ())
    assert "FuncResultSharding" not in emit_stablehlo(planned.require_hlo(), planned)


def test_an_output_in_the_place_of_an_argument_lies_as_both_say_or_not_at_all() -> None:
    def text(output: NamedSharding) -> str:
        plain = lower_text(lambda w: w * 2, shape(16, 32), in_shardings=on(None, "tp"), out_shardings=output)
        return plain.replace("HloModule jit__lambda,", "HloModule jit__lambda, input_output_alias={ {}: (0, {}) },")

    planned = on_own_mesh(text(on(None, "tp")))
    assert planned.outputs[0].sharding.dims == planned.parameters[0].sharding.dims == ((), ("tp",))
    reason = "the sharding of its argument {0: not split, 1: tp}; the sharding of its output {0: dp, 1: not split}"
    with pytest.raises(AnnotationError, match=re.escape(reason)):
        on_own_mesh(text(on("dp", None)))


def test_a_forced_strategy_against_a_pin_names_both() -> None:
    text = lower_text(lambda w, x: (w - (x @ w).sum(), 0.0), shape(16, 32), shape(8, 16), in_shardings=(on("dp"), None),
                   donate_argnums=0)  # fmt: skip
    with pytest.raises(AnnotationError, match=r"its argument .*; force='data'") as caught:
        plan(text, EIGHT, PlanOptions(mesh={"dp": 2, "tp": 4}, force="data"))
    assert "argument w f32[16,32]" in caught.value.where


def uneven(x: Any) -> Any:
    return jnp.cos(annotate(jnp.sin(x) * 2, {0: "data", 1: None})).sum(1)


def test_inner_values_are_padded_where_their_maker_can() -> None:
    x = np.random.default_rng(0).normal(size=(15, 8)).astype(np.float32)
    with keep_annotations():
        text = lower_text(uneven, shape(15, 8))
    planned = plan(text, EIGHT, PlanOptions(mesh={"data": 8}, rewrites="none"))  # the argument itself stays as it is
    assert constraints(planned) == [(("data",), ())]
    (output,) = xla_outputs(planned, x)
    np.testing.assert_allclose(output, uneven(x), rtol=1e-5)


def test_inner_values_that_nobody_can_pad_are_refused() -> None:
    with keep_annotations():
        text = lower_text(lambda x: jnp.sort(annotate(jnp.sort(x, axis=0), {0: "data"}), axis=0), shape(15, 8))
    with pytest.raises(AnnotationError, match="15 elements, over 8 devices: not even, and nothing that makes or reads"):
        plan(text, EIGHT, PlanOptions(mesh={"data": 8}))


def test_an_axis_of_another_number_of_devices_takes_those_that_there_are() -> None:
    text = constrained(
        shardy('[{"x"}, {}]'), header=', frontend_attributes={xla.sdy.meshes={mesh = #sdy.mesh<["x"=3]>}}'
    )
    assert constraints(plan(text, EIGHT, PlanOptions(mesh={"data": 8}))) == [(("data",), ())]


def test_pins_that_ask_something_else_have_other_keys() -> None:
    def layers(x: Any) -> Any:
        for axes in (("dp", None), (None, "tp"), ("dp", None), (("dp", "tp"), None)):
            x = constrain(jnp.tanh(x), *axes)
        return x * 2

    result = collect_requirements(build_dataflow(parse(lower_text(layers, shape(16, 16)))), PlanOptions())
    first, second, third, fourth = (requirement.key for index in sorted(result) for requirement in result[index])
    assert first == third
    assert len({first, second, fourth}) == 3


def test_messages_name_the_annotated_array_and_the_dimension_that_was_given() -> None:
    def step(weights: Any, x: Any) -> Any:
        return annotate(x, {0: "dat"}) @ weights

    with keep_annotations():
        text = lower_text(step, shape(16, 8), shape(8, 16))
    with pytest.raises(AnnotationError, match="names axis 'dat', but the mesh is data=8") as caught:
        plan(text, EIGHT, PlanOptions(mesh={"data": 8}))
    assert re.match(r"x f32\[8,16\], .*test_pins.py:\d+", caught.value.where)
    assert caught.value.remedy == "did you mean 'data'?"
    with pytest.raises(AnnotationError, match="pins dimension 2, but it has 2 dimensions") as caught:
        plan(lower_text(lambda w: w * 2, shape(16, 8)), EIGHT, PlanOptions(force={"w": {2: True}}))
    assert caught.value.where == "argument w f32[16,8]"


@pytest.mark.parametrize(
    ("axes", "notes"),
    [
        (("dat", "model"), ["axis 'dat' of the mesh: did you mean 'data'?"]),
        (("batches", "batchs"), ["'batches' of the mesh: did you mean 'batchs'?", "did you mean 'batches'?"]),
        (("dp", "tp"), []),
        (("model", "data"), []),
    ],
)
def test_an_axis_that_is_nearly_named_like_another_is_told_of(axes: tuple[str, str], notes: list[str]) -> None:
    def step(weights: Any, x: Any) -> Any:
        return annotate(annotate(x, {0: axes[0]}) @ weights, {1: axes[1]})

    with keep_annotations():
        text = lower_text(step, shape(16, 8), shape(8, 16))
    step_plan = plan(text, EIGHT)
    assert set(axes) <= set(step_plan.mesh.sizes)
    told = [note for note in step_plan.notes if "did you mean" in note]
    for note, expected in zip(told, notes, strict=True):
        assert expected in note
        assert "test_pins.py:" in note
    given = plan(text, EIGHT, PlanOptions(mesh={axes[0]: 4, axes[1]: 2}))
    assert not [note for note in given.notes if "did you mean" in note]


def test_explicit_mode_is_held() -> None:
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        text = lower_text(lambda w: jax.sharding.reshard(w * 2, PartitionSpec("a", "b")).sum(), shape(16, 32))
    assert (("a",), ("b",)) in constraints(on_own_mesh(text))


# ---- meshes --------------------------------------------------------------------------


def test_the_programs_own_mesh_is_taken_where_it_fits_the_cluster() -> None:
    text = lower_text(layer, shape(16, 16), shape(8, 16))
    assert meshes(text) == [{"dp": 2, "tp": 4}]
    assert meshes(text, mesh={"data": 8}) == [{"data": 8}]
    assert meshes(text, Cluster.local(4)) == [{"dp": 2, "tp": 2}]  # another number of devices: its axes in other sizes


def test_the_programs_mesh_is_turned_where_its_shardings_need_another_major_axis() -> None:
    turned = lower_text(lambda x: constrain(jnp.sin(x), ("tp", "dp"), None) * 2, shape(16, 8))
    assert [list(mesh.items()) for mesh in meshes(turned)] == [[("tp", 4), ("dp", 2)]]
    assert constraints(on_own_mesh(turned)) == [(("tp", "dp"), ())]
    both = lower_text(
        lambda x: constrain(constrain(x + 1, ("tp", "dp"), None) * 2, ("dp", "tp"), None) * 2, shape(16, 8)
    )
    with pytest.raises(AnnotationError, match="out of the mesh's order"):
        on_own_mesh(both)


def test_tiles_that_name_no_axes_make_a_mesh() -> None:
    text = constrained("sharding={devices=[4,1,2]<=[2,4]T(1,0) last_tile_dim_replicate}")
    assert meshes(text) == [{"data": 2, "model": 4}]
    assert meshes(constrained("sharding={devices=[2,2,2]<=[2,2,2]T(2,0,1) last_tile_dim_replicate}")) == [
        {"data": 2, "model": 2, "sequence": 2}
    ]
    assert len(meshes(constrained("sharding={replicated}"))) > 1
    assert len(meshes(constrained("sharding={devices=[2,2]<=[4]}"))) > 1  # another number of devices


def test_annotations_choose_meshes_that_have_their_axes() -> None:
    def function(x: Any) -> Any:
        return annotate(jnp.sin(x), {0: "rows", 1: "columns"})

    with keep_annotations():
        result = meshes(lower_text(function, shape(16, 16)))
    assert all({"rows", "columns"} <= set(mesh) for mesh in result)
    assert [mesh for mesh in result if len(mesh) == 2] == [{"rows": 4, "columns": 2}, {"columns": 4, "rows": 2}]


def test_forced_strategies_take_meshes_of_their_own() -> None:
    text = lower_text(jnp.sin, shape(16, 16))
    assert meshes(text, force="data") == [{"data": 8}]
    assert meshes(text, force="tensor") == [{"model": 8}]
    assert meshes(text, force="mixed")[:2] == [{"data": 4, "model": 2}, {"data": 2, "model": 4}]
    assert all(len(mesh) > 1 for mesh in meshes(text, force="mixed"))


# ---- notations -----------------------------------------------------------------------


def constrained(attributes: str, dimensions: str = "16,8", header: str = "") -> str:
    return f"""HloModule constrained, entry_computation_layout={{(f32[{dimensions}])->f32[{dimensions}]}}{header}

ENTRY main {{
  x = f32[{dimensions}] parameter(0)
  y = f32[{dimensions}] sine(x)
  pinned = f32[{dimensions}] custom-call(y), custom_call_target="Sharding", {attributes}
  ROOT z = f32[{dimensions}] cosine(pinned)
}}
"""


HEADER = ', frontend_attributes={xla.sdy.meshes={mesh = #sdy.mesh<["dp"=2, "tp"=4]>}}'


def shardy(text: str) -> str:
    quoted = text.replace('"', '\\"')
    return f'frontend_attributes={{xla.sdy.sharding="#sdy.sharding<@mesh, {quoted}>"}}'


@pytest.mark.parametrize(
    ("attributes", "mesh", "dims"),
    [
        (shardy('[{"dp", "tp"}, {}]'), {"dp": 2, "tp": 4}, (("dp", "tp"), ())),
        (shardy('[{"tp":(1)2}, {"tp":(2)2}]'), {"a": 2, "b": 2, "c": 2}, (("b",), ("c",))),
        (shardy('[{"tp":(2)2}, {}]'), {"a": 2, "b": 2, "c": 2}, (("c",), ())),
        (shardy('[{"tp"}, {}]'), {"a": 2, "b": 2, "c": 2}, (("b", "c"), ())),
        (shardy('[{"tp"}, {}]'), {"a": 4, "b": 2}, (("a",), ())),
        ("sharding={devices=[1,4,2]<=[2,4]T(1,0) last_tile_dim_replicate}", {"a": 2, "b": 4}, ((), ("b",))),
        ("sharding={devices=[2,1,4]<=[2,2,2]T(1,0,2) last_tile_dim_replicate}", {"a": 2, "b": 2, "c": 2}, (("b",), ())),
        ("sharding={devices=[2,1,4]0,1,2,3,4,5,6,7 last_tile_dim_replicate}", {"a": 2, "b": 4}, (("a",), ())),
        ("sharding={devices=[2,1,2,2]<=[8] last_tile_dims={replicated, replicated}}", {"a": 2, "b": 4}, (("a",), ())),
        ("sharding={mesh['x'=2,'y'=4], [{'x'}, {'y'}]}", {"a": 2, "b": 4}, (("a",), ("b",))),
        ("sharding={replicated}", {"a": 2, "b": 4}, ((), ())),
    ],
)
def test_notations(attributes: str, mesh: dict[str, int], dims: tuple[tuple[str, ...], ...]) -> None:
    planned = plan(constrained(attributes, header=HEADER), EIGHT, PlanOptions(mesh=mesh))
    assert constraints(planned) == [dims]


def test_open_dimensions_and_axes_kept_whole() -> None:
    text = constrained(shardy('[{"dp", ?}, {?}], replicated={"tp"}'), header=HEADER)
    (dims,) = constraints(plan(text, EIGHT, PlanOptions(mesh={"dp": 2, "tp": 4})))
    assert dims == (("dp",), ())


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ("sharding={maximal device=0}", "puts the whole array on one device"),
        ("sharding={manual}", "shard_map"),
        ("sharding={devices=[2,1,4]<=[8] last_tile_dims={manual}}", "shard_map"),
        ("sharding={unknown shard_as 1}", "ties two arrays together"),
        (shardy('[{"dp"}, {}], unreduced={"tp"}'), "partial sum"),
        (shardy('[{"pp"}, {}]'), "names axis 'pp', which its mesh lacks"),
        (shardy("nothing"), "cannot be read"),
        (shardy('[{"tp", "dp"}, {}]'), "out of the mesh's order"),
        ("sharding={devices=[2,2,2]0,1,2,3,4,5,7,6 last_tile_dim_replicate}", "no sharding over dp=2 × tp=4 satisfies"),
    ],
)
def test_what_no_pin_can_say_is_refused_with_tensor_and_reason(attributes: str, reason: str) -> None:
    text = constrained(attributes, dimensions="16,16", header=HEADER)
    with pytest.raises(AnnotationError, match=reason) as caught:
        plan(text, EIGHT, PlanOptions(mesh={"dp": 2, "tp": 4}))
    assert caught.value.where == "y f32[16,16]"


@pytest.mark.parametrize(
    ("sizes", "mesh", "expected"),
    [
        ({"x": 2, "y": 4}, {"y": 4, "x": 2}, {"x": ("x",), "y": ("y",)}),  # by name and size
        ({"x": 2, "y": 4}, {"a": 2, "b": 4}, {"x": ("a",), "y": ("b",)}),  # by devices
        ({"x": 2, "y": 4}, {"a": 4, "b": 2}, {"x": ("b",), "y": ("a",)}),  # by size
        ({"x": 4, "y": 2}, {"a": 2, "b": 2, "c": 2}, {"x": ("a", "b"), "y": ("c",)}),
        ({"x": 8}, {"x": 2, "y": 4}, {"x": ("x", "y")}),
        ({"x": 2, "y": 4, "z": 1}, {"a": 8}, {"z": ()}),
        ({"x": 2, "y": 4}, {"a": 8, "b": 4, "c": 2}, {"x": ("c",), "y": ("b",)}),  # another number of devices
        ({"x": 2, "y": 2}, {"b": 8, "a": 2}, {}),  # either of them could be a
    ],
)
def test_axes_of_the_program_and_ours(
    sizes: dict[str, int], mesh: dict[str, int], expected: dict[str, tuple[str, ...]]
) -> None:
    assert ProgramMesh(sizes=sizes).on(Mesh.of(mesh)) == expected
