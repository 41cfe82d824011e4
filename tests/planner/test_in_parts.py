"""Fourier transforms and top-k whose batch is split: each device computes its part, nothing is gathered."""

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
from shardwright.plans.plan import Plan
from shardwright.user_plans import compile_and_prove
from tests.planner.programs import Program, lower
from tests.planner.test_numbers import assert_same, run_planned, run_single

BATCH, LENGTH, WIDTH, LAYERS, SEARCHED = 16, 24, 16, 3, 12


def normal(*shape: int) -> np.ndarray:
    return (np.random.default_rng(0).normal(size=shape) * 0.3).astype(np.float32)


def training(loss: Any, params: Any) -> Program:
    def step(params: Any, x: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda w, g: w - 0.5 * g, params, gradients), value

    return step, (params, normal(BATCH, LENGTH, WIDTH)), (0,)


def mixing() -> Program:
    """Layers that mix by a Fourier transform (FNet: Lee-Thorp et al., 2022), in a loop."""

    def layer(x: Any, weight: Any) -> Any:
        mixed = jnp.fft.fft2(x.astype(jnp.complex64)).real / (LENGTH * WIDTH) ** 0.5
        return jnp.tanh((x + mixed) @ weight), None

    def loss(params: Any, x: Any) -> Any:
        return jnp.mean(lax.scan(layer, x, params)[0] ** 2)

    return training(loss, normal(LAYERS, WIDTH, WIDTH))


def choosing() -> Program:
    """The largest features of each word, more than are searched for in rounds."""

    def loss(params: Any, x: Any) -> Any:
        largest, where = lax.top_k(x @ params, SEARCHED)
        return jnp.mean(largest * (1 + where)) + jnp.mean(largest**2)

    return training(loss, normal(WIDTH, WIDTH))


@pytest.mark.parametrize(("program", "opcode"), [(mixing(), "fft"), (choosing(), "topk")], ids=["fft", "topk"])
def test_a_split_batch_stays_split(program: Program, opcode: str) -> None:
    planned = plan(lower(program), Cluster.local(8), PlanOptions(mesh={"data": 4, "model": 2}, force="data"))
    assert isinstance(planned, Plan)
    computed = [entry for entry in planned.instructions if entry.opcode == opcode]
    assert computed
    assert all("data" in entry.operands[0][0].axes for entry in computed)
    assert {each.kind for each in planned.collectives} == {"all-reduce"}
    proof = compile_and_prove(planned)
    assert proof.holds, proof.explain()
    assert_same(run_planned(program, planned), run_single(program))


@pytest.mark.parametrize(
    ("function", "dtype"),
    [(jnp.fft.fft, jnp.complex64), (lambda x: lax.top_k(x, SEARCHED), jnp.float32)],
    ids=["fft", "topk"],
)
def test_xla_by_itself_would_gather(function: Any, dtype: Any) -> None:
    """A failure means that XLA was mended, and needs no manual computation any more."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    x = jax.ShapeDtypeStruct((BATCH, WIDTH), dtype)
    compiled = jax.jit(function, in_shardings=rows, out_shardings=rows).lower(x).compile()
    assert "all-gather" in compiled.as_text()
