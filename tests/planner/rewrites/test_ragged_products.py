"""Ragged products as tiles give JAX's numbers, with and without empty groups and rows behind the last one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright
from shardwright.clusters.cluster import Cluster
from shardwright.hlo import parse
from shardwright.planner.rewrites import ragged_products
from shardwright.planner.rewrites.ragged_products import tile_ragged_products
from tests.planner.attention.written_out import run

pytestmark = pytest.mark.dear

SIZES = {
    "uneven": (32, [5, 0, 20, 3]),
    "all rows": (33, [8, 8, 8, 9]),
    "one group": (16, [0, 0, 16, 0]),
    "no rows": (16, [0, 0, 0, 0]),
}


def _step(x: Any, w: Any, sizes: Any) -> Any:
    """Products of all three forms: of rows, and the gradients of rows and of matrices."""

    def loss(x: Any, w: Any) -> Any:
        return (jnp.sin(jax.lax.ragged_dot(x, w, sizes)) ** 2).sum()

    return jax.value_and_grad(loss, (0, 1))(x, w)


def _shapes(rows: int, groups: int, dtype: str = "float32") -> list[Any]:
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape in ((rows, 8), (groups, 8, 16))]
    return [*shapes, jax.ShapeDtypeStruct((groups,), "int32")]


@pytest.mark.parametrize("flops_per_byte", [0.01, 1.0, 200.0], ids=["short tiles", "tiles", "long tiles"])
@pytest.mark.parametrize("case", SIZES)
def test_numbers_are_jax_s(case: str, flops_per_byte: float, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, sizes = SIZES[case]
    text = shardwright.lower(_step, *_shapes(rows, len(sizes)), platform="cuda").as_text()
    monkeypatch.setattr(ragged_products, "TILE_FLOPS_PER_BYTE", flops_per_byte)
    module = tile_ragged_products(parse(text), None)
    assert not [each for each in module.instructions() if each.opcode == "ragged-dot"]
    random = np.random.default_rng(0)
    x, w = (random.standard_normal(shape.shape).astype(np.float32) for shape in _shapes(rows, len(sizes))[:2])
    arguments = [x, w, np.asarray(sizes, np.int32)]
    for one, other in zip(jax.tree.leaves(jax.jit(_step)(*arguments)), run(module, arguments), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * float(np.abs(one).max() + 1e-9))


def test_programs_for_gpus_hold_what_their_compilers_take() -> None:
    """XLA:GPU masks all rows by every group, XLA:CPU has no ragged product: neither is left. TPUs have one, but for
    gradients of matrices."""
    shapes = _shapes(4096, 4, "bfloat16")
    for platform, hardware, count in (("cuda", "h100", 0), ("tpu", "tpu-v5e", 2)):
        text = shardwright.lower(_step, *shapes, platform=platform).as_text()
        cluster = Cluster(name="c", platform=platform, hardware=hardware, nodes=Cluster.local(8).nodes)
        emitted = shardwright.plan(text, cluster, effort="fast", cache=False).emit()
        assert (emitted.count("mhlo.ragged_dot"), emitted.count('"chlo.ragged_dot"')) == (0, count)


def test_a_plan_of_tiles_makes_the_collectives_that_it_says() -> None:
    text = shardwright.lower(_step, *_shapes(512, 4), platform="cuda").as_text()
    plan = shardwright.plan(text, 4, force="mixed", effort="fast", cache=False)
    assert plan.prove().holds
