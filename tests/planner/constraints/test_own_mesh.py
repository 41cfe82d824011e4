"""Programs with a mesh of their own on another number of devices: its axes keep what they split, not their size."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import permutations, product
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from shardwright.client.annotate import annotate, keep_annotations
from shardwright.clusters.cluster import Cluster
from shardwright.errors import AnnotationError
from shardwright.hlo import Instruction, parse
from shardwright.options.plan_options import PlanOptions
from shardwright.planner import plan
from shardwright.planner.graph.imported_shardings import read_sharding
from shardwright.planner.graph.program_mesh import ProgramMesh
from shardwright.plans.plan import Plan
from shardwright.plans.shardings import Mesh
from tests.planner.constraints.test_lowered_shardings import lower_text, using
from tests.planner.running import xla_outputs
from tests.planner.search.test_meshes import cluster as nodes
from tests.tables import list_failing_rows

Specs = tuple[P, P]

ARGUMENTS = tuple(
    (np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float32)
    for seed, (shape, scale) in enumerate([((64, 128), 0.1), ((128, 64), 0.1), ((16, 64), 1.0)])
)


def mesh_of(**sizes: int) -> AbstractMesh:
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def plain(constrain: Callable[..., Any], w: Any, v: Any, x: Any) -> Any:
    return constrain(jax.nn.gelu(constrain(x, 0) @ w), 1) @ v


def scanned(constrain: Callable[..., Any], w: Any, v: Any, x: Any) -> Any:
    return jax.lax.scan(lambda c, _: (plain(constrain, w, v, c), None), x, None, length=2)[0]


def remat(constrain: Callable[..., Any], w: Any, v: Any, x: Any) -> Any:
    return jax.checkpoint(lambda w, v, x: plain(constrain, w, v, x))(w, v, x)


def branched(constrain: Callable[..., Any], w: Any, v: Any, x: Any) -> Any:
    return jax.lax.cond(x[0, 0] > 0, lambda x: constrain(x, 0) @ w, lambda x: constrain(x @ w, 1), x) @ v


def step_of(mesh: AbstractMesh | None, specs: Specs, model: Callable[..., Any] = plain) -> Callable[..., Any]:
    """A step whose inputs and hidden values are constrained; not at all without a mesh."""

    def held(x: Any, which: int) -> Any:
        return x if mesh is None else jax.lax.with_sharding_constraint(x, NamedSharding(mesh, specs[which]))

    def step(w: Any, v: Any, x: Any) -> Any:
        loss = lambda w, v: jnp.mean(model(held, w, v, x) ** 2)  # noqa: E731
        value, (dw, dv) = jax.value_and_grad(loss, (0, 1))(w, v)
        return w - 0.1 * dw, v - 0.1 * dv, value

    return step


def plan_on(text: str, devices: int | Cluster, **options: Any) -> Plan:
    return plan(text, Cluster.local(devices) if isinstance(devices, int) else devices, PlanOptions(**options))


def hold_so(planned: Plan) -> set[tuple[tuple[str, ...], ...]]:
    return {entry.result[0].dims for entry in planned.instructions if entry.opcode == "custom-call"}


BOTH = (P("dp"), P("dp", "tp"))
TWO = mesh_of(dp=2, tp=2)


# ---- which axes stand for which -------------------------------------------------------


OTHER_NUMBERS = (
    (ProgramMesh(sizes={"dp": 2, "tp": 2}), {"dp": 4, "tp": 2}, {"dp": ("dp",), "tp": ("tp",)}),
    (ProgramMesh(sizes={"dp": 4, "tp": 2}), {"dp": 2, "tp": 4}, {"dp": ("dp",), "tp": ("tp",)}),
    (ProgramMesh(sizes={"dp": 2, "x": 4}), {"x": 2, "dp": 4}, {"dp": ("dp",), "x": ("x",)}),  # not by devices
    (ProgramMesh(sizes={"dp": 2, "tp": 2}, split_axes=("dp", "tp")), {"dp": 8}, {"dp": ("dp",), "tp": ()}),
    (
        ProgramMesh(sizes={"dp": 2, "tp": 2}, split_axes=("dp", "tp")),
        {"a": 2, "b": 4},
        {"dp": ("a",), "tp": ("b",)},
    ),
    (
        ProgramMesh(sizes={"dp": 2, "tp": 2}, split_axes=("tp", "dp")),
        {"a": 2, "b": 4},
        {"tp": ("a",), "dp": ("b",)},
    ),
    (ProgramMesh(sizes={"dp": 4, "pp": 2}, split_axes=("pp",)), {"a": 4, "b": 2}, {"pp": ("b",), "dp": ("a",)}),
    (
        ProgramMesh(sizes={"dp": 4, "pp": 2}, split_axes=("pp",)),
        {"a": 4},
        {"pp": ("a",)},
    ),  # nothing for what is not used
    (
        ProgramMesh(sizes={"a": 2, "b": 2}, split_axes=("b", "a"), is_named=False),
        {"a": 4, "b": 1},
        {"b": ("a",), "a": ()},
    ),
)


def test_axes_of_another_number_of_devices() -> None:
    def check(own: ProgramMesh, mesh: dict[str, int], expected: dict[str, Any]) -> None:
        assert own.on(Mesh.of(mesh)) == expected

    assert list_failing_rows(check, OTHER_NUMBERS) == []


def _read(sharding: str) -> list[tuple[tuple[int, int | None], ...]]:
    text = f"HloModule m\n\nENTRY e {{\n  ROOT x = f32[48,48] parameter(0), sharding={sharding}\n}}\n"
    parameter: Instruction = parse(text).entry.root
    result = read_sharding(parameter, {}, 2)
    assert result is not None
    return [tuple((part.size, part.stride) for part in result.dims[dim].parts) for dim in range(2)]


@pytest.mark.parametrize("factors", [(2, 2, 2), (4, 4), (6,), (3, 4)])
def test_lists_of_devices_are_read_as_the_iotas_that_they_are(factors: tuple[int, ...]) -> None:
    count = prod(factors)
    for order, rows in product(permutations(range(len(factors))), [n for n in range(1, count + 1) if count % n == 0]):
        iota = f"<=[{','.join(map(str, factors))}]T({','.join(map(str, order))})"
        listed = ",".join(map(str, np.arange(count).reshape(factors).transpose(order).ravel()))
        tiles = f"devices=[{rows},{count // rows}]"
        expected = _read(f"{{{tiles}{iota}}}")
        if all(stride is not None for parts in expected for _, stride in parts):
            assert _read(f"{{{tiles}{listed}}}") == expected
    assert _read("{devices=[2,4]0,1,2,4,3,5,6,7}") == [((2, None),), ((4, None),)]


# ---- what is planned --------------------------------------------------------------------


# fmt: off
# A program's mesh, its two specs, devices; how many axes the constraints split.
SCALED: tuple[tuple[Any, ...], ...] = (
    (mesh_of(dp=2), (P("dp"), P("dp")), 8, 1), (TWO, BOTH, 8, 2), (TWO, BOTH, nodes(4, 4), 2), (TWO, BOTH, 6, 2),
    (TWO, BOTH, 1, 0), (TWO, BOTH, 3, 1), (mesh_of(dp=3), (P("dp"), P("dp")), 8, 1),
    (mesh_of(dp=4, tp=4), BOTH, 8, 2),
    (mesh_of(rows=2, columns=2), (P("rows"), P("rows", "columns")), 8, 2), (mesh_of(dp=2, pp=2, tp=4), BOTH, 8, 2),
    (TWO, (P(("dp", "tp")), P("dp", "tp")), 8, 2), (TWO, (P(("tp", "dp")), P("tp", "dp")), 8, 2),
    (mesh_of(a=2, b=2, c=2, d=2), (P("a", "b"), P("c", "d")), 8, 3),
    (mesh_of(a=2, b=2, c=2, d=2), (P(("a", "b")), P(("a", "b"), ("c", "d"))), 4, 2),
)
# fmt: on


@pytest.mark.dear
@pytest.mark.parametrize("partitioner", ["shardy", "gspmd"])
def test_axes_are_scaled_to_the_devices(partitioner: str) -> None:
    """What the two constraints split: as many axes as before, of all that the devices have factors for."""

    def check(mesh: AbstractMesh, specs: Specs, devices: int | Cluster, split: int) -> None:
        with using(partitioner):
            text = lower_text(step_of(mesh, specs), *ARGUMENTS, donate_argnums=(0, 1))
        planned = plan_on(text, devices)
        axes = {axis for dims in hold_so(planned) for dim in dims for axis in dim if planned.mesh.sizes[axis] > 1}
        assert len(axes) == split

    assert list_failing_rows(check, SCALED) == []


def test_meshes_of_the_user() -> None:
    meshes = (None, {"dp": 8}, {"dp": 2, "tp": 4}, {"dp": 4, "tp": 2}, {"a": 2, "b": 2, "c": 2})
    assert list_failing_rows(check_mesh_of_the_user, product((mesh_of(dp=2), TWO), meshes)) == []


def check_mesh_of_the_user(own: AbstractMesh, mesh: dict[str, int] | None) -> None:
    specs = BOTH if "tp" in own.axis_names else (P("dp"), P("dp"))
    planned = plan_on(lower_text(step_of(own, specs), *ARGUMENTS), 8, mesh=mesh)
    assert mesh is None or planned.mesh == Mesh.of(mesh)
    if mesh is not None and "dp" in mesh:
        last = ("tp",) if "tp" in mesh and "tp" in own.axis_names else ()
        assert hold_so(planned) == {(("dp",), ()), (("dp",), last)}
        assert any("has" in note and f"taken are dp (2) as dp={mesh['dp']}" in note for note in planned.notes)


@pytest.mark.dear
@pytest.mark.parametrize("model", [plain, scanned, remat, branched])
def test_numbers_stay(model: Callable[..., Any]) -> None:
    expected = jax.jit(step_of(None, BOTH, model))(*ARGUMENTS)
    text = lower_text(step_of(TWO, BOTH, model), *ARGUMENTS)
    planned = plan_on(text, 8)
    assert all({axis for dim in dims for axis in dim} <= {"dp", "tp"} for dims in hold_so(planned))
    for ours, theirs in zip(xla_outputs(planned, *ARGUMENTS), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5)


def test_arguments_and_outputs() -> None:
    def on(*axes: Any) -> NamedSharding:
        return NamedSharding(TWO, P(*axes))

    shardings = (on("tp"), on(None, "tp"), on("dp"))
    text = lower_text(
        step_of(TWO, BOTH), *ARGUMENTS, in_shardings=shardings, out_shardings=(on("tp"), on(None, "tp"), on())
    )
    planned = plan_on(text, 8, mesh={"dp": 4, "tp": 2})
    weights = [(("tp",), ()), ((), ("tp",))]
    assert [variable.sharding.dims for variable in planned.parameters] == [*weights, (("dp",), ())]
    assert [variable.sharding.dims for variable in planned.outputs] == [*weights, ()]


def test_a_third_axis_where_two_cannot_hold_them() -> None:
    """Dimensions of 2 · 67 that nothing pads split two ways, so of eight devices two lie on an axis of their own."""

    def step(x: Any) -> Any:
        return jax.lax.with_sharding_constraint(x[::-1, ::-1], NamedSharding(TWO, P("dp", "tp")))[::-1, ::-1]

    planned = plan_on(lower_text(step, np.zeros((134, 134), np.float32)), 8)
    assert planned.mesh.sizes["dp"] == planned.mesh.sizes["tp"] == 2
    assert len(planned.mesh.axes) == 3


def test_annotations_beside_constraints() -> None:
    def step(w: Any, x: Any) -> Any:
        rows = annotate(x, {0: "rows"})
        return jax.lax.with_sharding_constraint(rows @ w, NamedSharding(TWO, P("dp", "tp"))) * 2

    with keep_annotations():
        text = lower_text(step, ARGUMENTS[0], ARGUMENTS[2])
    searched = plan_on(text, 8).candidates[0].mesh  # one whose axes stand for fewer of them may be faster
    assert sorted(searched.sizes.items()) == [("dp", 2), ("rows", 2), ("tp", 2)]


# ---- what is refused --------------------------------------------------------------------


def test_a_refusal_names_a_mesh_that_works_and_how_to_do_without() -> None:
    text = lower_text(step_of(TWO, (P(("dp", "tp")), P("dp", "tp"))), *ARGUMENTS)
    with pytest.raises(AnnotationError, match="out of the mesh's order") as caught:
        plan_on(text, 8, mesh={"tp": 2, "dp": 4})
    named = re.search(r"pass mesh=\{([^}]*)\}", caught.value.remedy)
    assert named is not None
    mesh = {name: int(size) for name, size in re.findall(r"'(\w+)': (\d+)", named[1])}
    assert plan_on(text, 8, mesh=mesh).mesh == Mesh.of(mesh)
    assert 'constraints="ignore"' in caught.value.remedy
    assert hold_so(plan_on(text, 8, mesh={"tp": 2, "dp": 4}, constraints="ignore"))


def test_what_the_program_brings_along_is_left_out_on_request() -> None:
    """Without its constraints it is planned as if it had none; annotations count all the same."""
    weights = NamedSharding(TWO, P("tp"))
    text = lower_text(step_of(TWO, (P(None, "tp"), P())), *ARGUMENTS, in_shardings=(weights, None, None))
    free = plan_on(lower_text(step_of(None, BOTH), *ARGUMENTS), 8)
    ignoring = plan_on(text, 8, constraints="ignore")
    assert ignoring.mesh == free.mesh
    assert ignoring.cost.step_s == pytest.approx(free.cost.step_s)
    assert plan_on(text, 8).cost.step_s > free.cost.step_s
