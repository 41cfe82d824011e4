"""Steps with manual regions (`jax.shard_map`) run by their plans as JAX runs them on the region's own mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import shardwright as sw
from examples.ring_attention.train import ring_attention
from shardwright.plans.plan import Plan
from shardwright.report.proof import prove
from shardwright.xla import BoundaryArray, load_program
from shardwright.xla.compiling import compile_planned

#: A function of JAX arrays, and its arguments.
Case = tuple[Callable[..., Any], tuple[Any, ...]]


def mesh_of(**sizes: int) -> Mesh:
    devices = np.array(jax.devices()[: np.prod(list(sizes.values()))]).reshape(*sizes.values())
    return Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def numbers(seed: int, *shape: int, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float32)


def difference(x: Any, y: Any) -> Any:
    return ((x - y) ** 2).mean()


def with_gradient(model: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """The loss of a model of weights and inputs, and its gradient by the weights."""
    return jax.value_and_grad(lambda w, x, y: difference(model(w, x), y))


# ---- five regions, forward and backward -------------------------------------------


def ring(devices: int) -> Case:
    """Keys and values go round; a scan, an axis's number, permutes."""
    attend = ring_attention(mesh_of(cp=devices), "cp")

    def loss(w: Any, x: Any, y: Any) -> Any:
        q, k, v = jnp.einsum("bte,pehd->pbthd", x, w)
        return difference(attend(q, k, v).reshape(x.shape), y)

    return jax.value_and_grad(loss), (numbers(0, 3, 32, 4, 8, scale=0.3), numbers(1, 2, 32, 32), numbers(2, 2, 32, 32))


def experts(devices: int) -> Case:
    """Rows are sent to the device of their expert and back."""

    def region(x: Any, a: Any, b: Any) -> Any:
        blocks = x.reshape(devices, -1, x.shape[-1])
        here = jax.lax.all_to_all(blocks, "ep", 0, 1, tiled=True)
        here = jnp.einsum("enf,efd->end", jax.nn.gelu(jnp.einsum("end,edf->enf", here, a)), b)
        return x + jax.lax.all_to_all(here, "ep", 1, 0, tiled=True).reshape(x.shape)

    spec = P("ep")
    mixture = jax.shard_map(region, mesh=mesh_of(ep=devices), in_specs=(spec,) * 3, out_specs=spec)
    weights = numbers(0, devices, 16, 32, scale=0.3), numbers(1, devices, 32, 16, scale=0.3)
    return with_gradient(lambda w, x: mixture(jnp.tanh(x), *w)), (
        weights,
        numbers(2, devices**2 * 4, 16),
        numbers(3, devices**2 * 4, 16),
    )


def kernel(devices: int) -> Case:
    """An interpreted Pallas kernel with gradients by itself, on both axes of a mesh."""

    def body(a: Any, b: Any, out: Any) -> None:
        out[...] = jnp.dot(a[...], b[...], preferred_element_type=jnp.float32)

    def product(a: Any, b: Any) -> Any:
        rows, columns = a.shape[0], b.shape[1]
        return pl.pallas_call(
            body, grid=(rows // 4,), out_shape=jax.ShapeDtypeStruct((rows, columns), a.dtype), interpret=True,
            in_specs=[pl.BlockSpec((4, a.shape[1]), lambda i: (i, 0)), pl.BlockSpec(b.shape, lambda i: (0, 0))],
            out_specs=pl.BlockSpec((4, columns), lambda i: (i, 0)),
        )(a, b)  # fmt: skip

    dot = jax.custom_vjp(product)
    dot.defvjp(lambda a, b: (product(a, b), (a, b)), lambda r, g: (product(g, r[1].T), product(r[0].T, g)))
    region = jax.shard_map(
        lambda x, w: jax.lax.psum(dot(x, w), "model"), mesh=mesh_of(data=devices // 2, model=2),
        in_specs=(P("data", "model"), P("model")), out_specs=P("data"), check_vma=False,
    )  # fmt: skip
    return with_gradient(lambda w, x: region(jnp.tanh(x), w)), (
        numbers(0, 32, 16, scale=0.3),
        numbers(1, 32, 32),
        numbers(2, 32, 16),
    )


def pipeline(stages: int) -> Case:
    """Each tick every device computes its stage and hands its rows on; the backward pass goes through the scan."""
    count = 3

    def region(w: Any, xs: Any) -> Any:
        here, w = jax.lax.axis_index("stage"), w[0]

        def tick(rows: Any, t: Any) -> tuple[Any, Any]:
            rows = jnp.where(here == 0, xs[jnp.minimum(t, count - 1)], rows)
            rows = rows + jnp.tanh(rows @ w)
            return jax.lax.ppermute(rows, "stage", [(i, i + 1) for i in range(stages - 1)]), rows

        first = jax.lax.pcast(jnp.zeros_like(xs[0]), ("stage",), to="varying")
        _, ticks = jax.lax.scan(tick, first, jnp.arange(count + stages - 1))
        return jax.lax.psum(jnp.where(here == stages - 1, ticks[stages - 1 :], 0.0), "stage")

    piped = jax.shard_map(region, mesh=mesh_of(stage=stages), in_specs=(P("stage"), P()), out_specs=P())
    return with_gradient(piped), (
        numbers(0, stages, 8, 8, scale=0.3),
        numbers(1, count, 4, 8),
        numbers(2, count, 4, 8),
    )


def layers(devices: int) -> Case:
    """A region in a scan under `jax.checkpoint`, on both axes of a mesh."""

    def region(q: Any, k: Any) -> Any:
        k = jax.lax.all_gather(k, "cp", axis=1, tiled=True)
        return jnp.einsum("bts,bsd->btd", jax.nn.softmax(jnp.einsum("btd,bsd->bts", q, k)), k)

    spec = P("data", "cp")
    attend = jax.shard_map(region, mesh=mesh_of(data=2, cp=devices // 2), in_specs=(spec,) * 2, out_specs=spec)

    def loss(w: Any, x: Any, y: Any) -> Any:
        layer = jax.checkpoint(lambda x, w: (x + jnp.tanh(attend(x @ w, x)), None))
        return difference(jax.lax.scan(layer, x, w)[0], y)

    return jax.value_and_grad(loss), (numbers(0, 2, 16, 16, scale=0.2), numbers(1, 4, 16, 16), numbers(2, 4, 16, 16))


# ---- regions that leave axes free ----------------------------------------------------


def sharded_by_hand(devices: int) -> Case:
    """Weights' rows are gathered and their gradients scattered by hand, along `data` alone: `tensor` is free."""

    def region(w: Any, x: Any, y: Any) -> tuple[Any, Any]:
        whole = [jax.lax.all_gather(each, "data", axis=0, tiled=True) for each in w]
        loss, slopes = jax.value_and_grad(lambda w: difference(jax.nn.gelu(x @ w[0]) @ w[1], y))(whole)
        slopes = [jax.lax.psum_scatter(each, "data", scatter_dimension=0, tiled=True) / 2 for each in slopes]
        return jax.lax.pmean(loss, "data"), slopes

    part = P("data")
    step = jax.shard_map(
        region, mesh=mesh_of(data=2, tensor=devices // 2), in_specs=(part,) * 3, out_specs=(P(), part),
        axis_names={"data"}, check_vma=False,
    )  # fmt: skip
    weights = [numbers(0, 128, 512, scale=0.1), numbers(1, 512, 128, scale=0.1)]
    return step, (weights, numbers(2, 64, 128), numbers(3, 64, 128))


def nested(devices: int) -> Case:
    """A region over `model` in one over `data`, with a gradient written by hand: JAX does not lower its own."""

    def forward(x: Any, a: Any) -> Any:
        return jax.lax.psum(jnp.tanh(x @ a).sum(-1), "model")

    def backward(x: Any, a: Any, slope: Any) -> Any:
        return x.T @ (slope[:, None] * (1 - jnp.tanh(x @ a) ** 2))

    def outer(x: Any, a: Any) -> tuple[Any, Any]:
        columns = P(None, "model")
        y = jax.shard_map(forward, in_specs=(P(), columns), out_specs=P(), axis_names={"model"})(x, a)
        slope = jax.shard_map(
            backward, in_specs=(P(), columns, P()), out_specs=columns, axis_names={"model"}, check_vma=False
        )(x, a, 2 * y)
        return y, jax.lax.psum(slope, "data")

    mesh = mesh_of(data=2, model=devices // 2)
    region = jax.shard_map(
        outer, mesh=mesh, in_specs=(P("data"), P()), out_specs=(P("data"), P()), axis_names={"data"}, check_vma=False
    )
    return region, (numbers(0, 4, 8), numbers(1, 8, 8, scale=0.3))


@pytest.mark.dear
@pytest.mark.parametrize(
    ("case", "written_for", "devices"),
    [
        (ring, 4, 8), (experts, 8, 8), (experts, 4, 4), (kernel, 8, 8), (pipeline, 4, 8), (layers, 8, 8),
        (sharded_by_hand, 8, 8), (nested, 8, 8),
    ],
)  # fmt: skip
def test_a_planned_region_computes_what_jax_does(case: Callable[[int], Case], written_for: int, devices: int) -> None:
    step, arguments = case(written_for)
    text = sw.lower(step, *jax.tree.map(lambda each: jax.ShapeDtypeStruct(each.shape, each.dtype), arguments)).as_text()
    planned = sw.plan(text, devices, cache=False, stages=1, micro_batches=1, remat="none")
    assert isinstance(planned, Plan)
    outputs, collectives = run(planned, *jax.tree.leaves(arguments))
    for actual, expected in zip(outputs, jax.tree.leaves(jax.jit(step)(*arguments)), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())
    proof = prove(planned, collectives)
    assert proof.observed_wire_bytes == proof.predicted_wire_bytes, proof.explain(everything=True)


def run(planned: Plan, *arguments: Any) -> tuple[list[np.ndarray], Any]:
    """Outputs of a plan, compiled once, and the collectives that XLA made."""
    program = compile_planned(planned.require_hlo(), planned, want_executable=True)
    loaded = load_program(
        program.serialized, is_serialized=True, mesh=planned.mesh,
        arguments=[BoundaryArray.of(variable) for variable in planned.parameters],
        outputs=[BoundaryArray.of(variable) for variable in planned.outputs], donated=[],
    )  # fmt: skip
    placed = [jax.device_put(each, layout) for each, layout in zip(arguments, loaded.argument_shardings, strict=True)]
    outputs = zip(loaded.run(placed), planned.outputs, strict=True)
    return [np.asarray(each)[tuple(map(slice, variable.shape))] for each, variable in outputs], program.collectives


def test_a_gradient_that_jax_cannot_lower_is_refused_with_a_remedy() -> None:
    def outer(x: Any) -> Any:
        inner = jax.shard_map(
            lambda x: jax.lax.psum(jnp.sin(x), "b"), in_specs=P(None, "b"), out_specs=P(), axis_names={"b"}
        )
        return inner(x)

    region = jax.shard_map(outer, mesh=mesh_of(a=2, b=2), in_specs=P("a"), out_specs=P("a"), axis_names={"a"})
    with pytest.raises(sw.UnsupportedProgramError, match=r"shard_map in another one[\s\S]*custom_vjp"):
        sw.lower(jax.grad(lambda x: region(x).sum()), jax.ShapeDtypeStruct((8, 8), "float32"))
