"""Fourier transforms, top-k and grouped convolutions that are split: each device computes its part without a gather."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardwright.clusters.cluster import Cluster
from shardwright.options.plan_options import PlanOptions
from shardwright.planner import plan
from shardwright.planner.xla_version import xla_version
from shardwright.plans.plan import Plan
from shardwright.user_plans import compile_and_prove
from tests.planner.programs import Program, lower
from tests.planner.test_numbers import assert_same, run_planned, run_single

BATCH, LENGTH, WIDTH, LAYERS, SEARCHED = 16, 24, 16, 3, 12
DATA_AND_MODEL, DATA = {"data": 4, "model": 2}, {"data": 8}


def normal(*shape: int) -> np.ndarray:
    return (np.random.default_rng(0).normal(size=shape) * 0.3).astype(np.float32)


def training(loss: Any, params: Any, x: np.ndarray) -> Program:
    def step(params: Any, x: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda w, g: w - 0.5 * g, params, gradients), value

    return step, (params, x), (0,)


def mixing(batch: int = BATCH) -> Program:
    """Layers that mix by a Fourier transform (FNet: Lee-Thorp et al., 2022), in a loop."""

    def layer(x: Any, weight: Any) -> Any:
        mixed = jnp.fft.fft2(x.astype(jnp.complex64)).real / (LENGTH * WIDTH) ** 0.5
        return jnp.tanh((x + mixed) @ weight), None

    def loss(params: Any, x: Any) -> Any:
        return jnp.mean(lax.scan(layer, x, params)[0] ** 2)

    return training(loss, normal(LAYERS, WIDTH, WIDTH), normal(batch, LENGTH, WIDTH))


def choosing() -> Program:
    """The largest features of each word, more than are searched for in rounds."""

    def loss(params: Any, x: Any) -> Any:
        largest, where = lax.top_k(x @ params, SEARCHED)
        return jnp.mean(largest * (1 + where)) + jnp.mean(largest**2)

    return training(loss, normal(WIDTH, WIDTH), normal(BATCH, LENGTH, WIDTH))


def convolving(batch: int = BATCH) -> Program:
    """Groups of several features each, as ResNeXt has them, then two features of each one's own."""

    def loss(params: Any, x: Any) -> Any:
        hidden = x
        for kernel, groups in zip(params, (4, WIDTH), strict=True):
            hidden = lax.conv_general_dilated(
                hidden, kernel, (2,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=groups
            )
        return jnp.mean(jnp.tanh(hidden) ** 2)

    return training(loss, [normal(3, WIDTH // 4, WIDTH), normal(3, 1, 2 * WIDTH)], normal(batch, LENGTH, WIDTH))


@pytest.mark.parametrize(
    ("program", "opcode", "mesh"),
    [
        pytest.param(mixing(), "fft", DATA_AND_MODEL, id="fft"),
        pytest.param(mixing(14), "fft", DATA, id="fft, padded", marks=pytest.mark.dear),
        pytest.param(choosing(), "topk", DATA_AND_MODEL, id="topk"),
        pytest.param(convolving(), "convolution", DATA_AND_MODEL, id="convolution", marks=pytest.mark.dear),
        pytest.param(convolving(14), "convolution", DATA, id="convolution, padded"),
    ],
)
def test_a_split_batch_stays_split(program: Program, opcode: str, mesh: dict[str, int]) -> None:
    planned = plan(lower(program), Cluster.local(8), PlanOptions(mesh=mesh, force="data"))
    assert isinstance(planned, Plan)
    computed = [entry for entry in planned.instructions if entry.opcode == opcode]
    assert computed
    assert all("data" in entry.operands[0][0].axes for entry in computed)
    assert {each.kind for each in planned.collectives} == {"all-reduce"}
    proof = compile_and_prove(planned)
    assert proof.holds, proof.explain()
    assert_same(run_planned(program, planned), run_single(program))


def convolve(x: Any, kernel: Any) -> Any:
    return lax.conv_general_dilated(
        x, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=4
    )


KERNEL = normal(3, WIDTH // 4, WIDTH)


@pytest.mark.parametrize(
    ("function", "x"),
    [
        (jnp.fft.fft, jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.complex64)),
        (lambda x: lax.top_k(x, SEARCHED), jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)),
        (lambda x: convolve(x, KERNEL), jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), jnp.float32)),
    ],
    ids=["fft", "topk", "convolution"],
)
def test_xla_by_itself_would_gather(function: Any, x: Any) -> None:
    """A failure means that XLA was mended, and needs no manual computation any more.

    XLA:CPU splits the batch of Fourier transforms by itself from jaxlib 0.12 on.
    """
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    compiled = jax.jit(function, in_shardings=rows, out_shardings=rows).lower(x).compile()
    is_mended = function is jnp.fft.fft and xla_version() >= (0, 12)
    assert ("all-gather" in compiled.as_text()) != is_mended


def test_xla_by_itself_would_sum_a_grouped_kernel_twice() -> None:
    """A failure means that XLA was mended: an idle axis of the mesh multiplies the gradient no more."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    rows, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ()))
    x = normal(BATCH, LENGTH, WIDTH)

    def differentiate(x: Any, cotangent: Any) -> Any:
        return jax.vjp(lambda kernel: convolve(x, kernel), KERNEL)[1](cotangent)[0]

    split = jax.jit(differentiate, in_shardings=(rows, rows), out_shardings=whole)(x, x)
    np.testing.assert_allclose(split, 2 * jax.jit(differentiate)(x, x), rtol=1e-4, atol=1e-4)
