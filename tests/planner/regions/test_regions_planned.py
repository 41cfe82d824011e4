"""Manual regions (`shard_map`) are planned around: manual axes as the program says, all other axes free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.clusters.cluster import Cluster
from shardwright.cost import hardware_profile
from shardwright.errors import MicroBatchError, OptionError, PlanCheckError, UnsupportedProgramError
from shardwright.hlo import parse
from shardwright.planner.attention import fuse_attention, kernel_limits
from shardwright.planner.graph.inlining import inline_calls
from shardwright.planner.graph.manual_regions import find_inside, torn_region
from shardwright.planner.plans.verify import check_plan
from shardwright.planner.search.manual_meshes import manual_meshes
from shardwright.plans.plan import Plan
from shardwright.plans.plan_json import decode, encode
from shardwright.plans.shardings import TensorSharding

ROOT = Path(__file__).resolve().parents[3]


def _mesh(**sizes: int) -> Mesh:
    count = int(np.prod(list(sizes.values())))
    devices = np.array(jax.devices()[:count]).reshape(*sizes.values())
    return Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def _text(step: Callable[..., Any], *shapes: tuple[int, ...]) -> str:
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(step).lower(*arguments).as_text("hlo")


def _gathered(sizes: dict[str, int], axes: set[str]) -> str:
    """Rows of x are gathered by hand over `axes`, and multiplied with w."""
    inside = jax.shard_map(
        lambda x, w: jnp.tanh(jax.lax.all_gather(x, tuple(axes), axis=0, tiled=True) @ w),
        mesh=_mesh(**sizes),
        in_specs=(P(tuple(axes)), P()),
        out_specs=P(),
        axis_names=axes,
        check_vma=False,
    )
    return _text(lambda x, w, v: ((inside(x, w) @ v) ** 2).sum(), (64, 512), (512, 512), (512, 512))


def _plan(text: str, devices: int = 8, **options: Any) -> Plan:
    planned = sw.plan(text, devices, cache=False, **options)
    assert isinstance(planned, Plan)
    return planned


def _borders(planned: Plan) -> list[tuple[TensorSharding, TensorSharding]]:
    module = parse(planned.require_hlo())
    entries = {entry.name: entry for entry in planned.instructions}
    return [(entries[i.name].operands[0][0], entries[i.name].result[0]) for i in find_inside(module).borders]


@pytest.fixture(scope="module")
def gathered() -> Plan:
    return _plan(_gathered({"free": 2, "cp": 4}, {"cp"}))


def test_manual_axes_lie_as_specs_say_and_free_ones_split_what_is_inside(gathered: Plan) -> None:
    assert gathered.manual_axes == {"cp": ("cp",)}
    assert gathered.mesh.sizes == {"free": 2, "cp": 4}
    (rows, _), (_, inside_weight), (product, whole) = _borders(gathered)
    assert "cp" in rows.dims[0]
    assert "cp" not in inside_weight.axes + product.axes + whole.axes
    dots = [entry for entry in gathered.instructions if entry.opcode == "dot"]
    inside = find_inside(parse(gathered.require_hlo())).axes
    names = {instruction.name for instruction in inside}
    (inner,) = (dot for dot in dots if dot.name in names)
    (outer,) = (dot for dot in dots if dot.name not in names)
    used = {axis for value in (*inner.operands, inner.result) for sharding in value for axis in sharding.axes}
    assert used == {"free"}
    assert any("cp" in sharding.axes for value in (*outer.operands, outer.result) for sharding in value)


def test_collectives_inside_are_listed_priced_and_explained(gathered: Plan) -> None:
    (own,) = (each for each in gathered.collectives if each.cause.startswith("of the program"))
    assert (own.kind, own.axes, own.count) == ("all-gather", ("cp",), 1)
    assert own.payload_bytes in (64 * 512 * 4, 64 * 256 * 4)
    (note,) = gathered.regions
    assert (note.count, note.axes, note.collectives, note.wire_bytes) == (1, "cp=4", 1, own.wire_bytes)
    assert "1 manual over cp=4" in gathered.explain()


def test_a_plan_with_regions_is_read_as_it_was_written(gathered: Plan) -> None:
    again = decode(sw.Plan.to_json(gathered), gathered.hlo_text)
    assert (again.manual_axes, again.regions) == (gathered.manual_axes, gathered.regions)
    assert "manual_axes" not in encode(_plan(_text(lambda x: x * 2, (8, 8))))


def test_the_checker_refuses_manual_axes_inside_and_other_layouts_at_the_border(gathered: Plan) -> None:
    module = parse(gathered.require_hlo())
    inside = find_inside(module)
    names = {i.name for i in inside.axes if i not in inside.borders and i.opcode == "dot"}
    border = next(i.name for i, edge in inside.borders.items() if edge.enters and edge.parts[0] > 1)
    wrong = TensorSharding((("cp",), ()))
    split = [
        replace(entry, operands=((wrong,), *entry.operands[1:]), result=(wrong,)) if entry.name in names else entry
        for entry in gathered.instructions
    ]
    whole = [
        replace(entry, operands=((TensorSharding(((), ())),),)) if entry.name == border else entry
        for entry in gathered.instructions
    ]
    for entries, problem in ((split, "uses manual axes cp"), (whole, "as its region says")):
        with pytest.raises(PlanCheckError, match=problem):
            check_plan(module, replace(gathered, instructions=tuple(entries)))


def test_meshes_keep_manual_sizes_and_fill_the_cluster() -> None:
    text = _gathered({"cp": 4}, {"cp"})
    planned = _plan(text, 16)
    assert planned.mesh.sizes["cp"] == 4
    assert planned.mesh.device_count == 16
    with pytest.raises(UnsupportedProgramError, match="4 devices or a multiple, and the cluster has 6") as refusal:
        _plan(text, 6)
    assert "plan for 4, 8 or 12 devices" in refusal.value.remedy
    with pytest.raises(OptionError, match="no axis for cp=4"):
        _plan(text, mesh={"a": 8})
    assert _plan(text, mesh={"a": 2, "b": 4}).manual_axes == {"cp": ("b",)}


def test_vast_clusters_have_few_meshes() -> None:
    inside = find_inside(inline_calls(parse(_gathered({"cp": 4}, {"cp"}))))
    cluster = Cluster.load(ROOT / "cluster_configs" / "h100_64x8.json", for_planning=True)
    some = manual_meshes(cluster, inside, is_vast=True)
    assert len(some) < 10 < len(manual_meshes(cluster, inside))
    assert {mesh.device_count for mesh in some} == {512}
    assert all(mesh.sizes["cp"] == 4 for mesh in some)


def test_meshes_of_several_regions_go_together_or_are_refused() -> None:
    def both(first: dict[str, int], second: dict[str, int]) -> str:
        one, other = _total(first), _total(second)
        return _text(lambda x: (one(x)[:, :8], other(x * 2)), (48, 32))

    planned = _plan(both({"cp": 8}, {"data": 2, "model": 4}))
    assert planned.manual_axes == {"data": ("data",), "model": ("model",)}
    with pytest.raises(UnsupportedProgramError, match="do not go together"):
        _plan(both({"a": 2, "b": 3}, {"c": 3, "d": 2}), 6)


def _total(sizes: dict[str, int]) -> Callable[[Any], Any]:
    axes = tuple(sizes)
    return jax.shard_map(lambda x: jax.lax.psum(x, axes), mesh=_mesh(**sizes), in_specs=P(axes), out_specs=P())


def test_nested_regions_bar_the_axes_of_both() -> None:
    def inner(x: Any, a: Any) -> Any:
        return jax.lax.psum(jnp.tanh(x @ a).sum(-1), "model")

    def outer(x: Any, a: Any) -> Any:
        return jax.shard_map(inner, in_specs=(P(), P(None, "model")), out_specs=P(), axis_names={"model"})(x, a)

    mesh = _mesh(data=2, model=4)
    step = jax.shard_map(outer, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"), axis_names={"data"})
    planned = _plan(_text(lambda x, a: step(x, a).sum(), (4, 8), (8, 8)))
    places = find_inside(parse(planned.require_hlo())).places
    (dot,) = (place for i, place in places.items() if i.opcode == "dot")
    assert dict(dot.axes) == {"data": 2, "model": 4}


def test_a_batch_that_is_not_manual_is_cut_into_micro_batches_with_its_region() -> None:
    def ring(q: Any, k: Any) -> Any:
        own = jax.lax.axis_index("cp").astype(jnp.float32)
        rows = jnp.tanh(jnp.einsum("btd,bsd->bts", q, k) + own)
        return jnp.einsum("bts,bsd->btd", rows, jax.lax.ppermute(k, "cp", [(i, (i + 1) % 4) for i in range(4)]))

    rows = P(None, "cp")
    region = jax.shard_map(ring, mesh=_mesh(cp=4), in_specs=(rows, rows), out_specs=rows)

    def step(w: Any, x: Any) -> Any:
        return jax.grad(lambda w: (region(x @ w, x) ** 2).mean())(w)

    text = _text(step, (32, 32), (8, 64, 32))
    planned = _plan(text, 4, micro_batches=2)
    module = parse(planned.require_hlo())
    assert torn_region(module) is None
    borders = find_inside(module).borders
    assert {i.shape.leaves[0].dimensions[0] for i, edge in borders.items() if i.shape.leaves[0].rank == 3} == {
        4,
        16,
    }  # 16: parts side by side
    with pytest.raises(MicroBatchError):
        _plan(_gathered({"cp": 4}, {"cp"}), micro_batches=2)


def test_attention_in_a_region_is_left_to_it() -> None:
    def attend(q: Any) -> Any:
        scores = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, q), axis=-1)
        return jnp.einsum("bhts,bshd->bthd", scores, q)

    heads = P(None, None, "h")
    region = jax.shard_map(attend, mesh=_mesh(h=4), in_specs=heads, out_specs=heads)
    shape = jax.ShapeDtypeStruct((8, 128, 8, 64), jnp.bfloat16)
    limits = kernel_limits("on", hardware_profile("h100").attention)
    assert limits is not None
    for step, count in ((attend, 1), (region, 0)):
        text = jax.jit(lambda q, step=step: step(q).sum()).lower(shape).as_text("hlo")
        assert len(fuse_attention(inline_calls(parse(text)), limits).replaced) == count


def test_pipelines_are_not_asked_for_beside_regions() -> None:
    with pytest.raises(OptionError, match="manual regions"):
        _plan(_gathered({"cp": 4}, {"cp"}), stages=2)
