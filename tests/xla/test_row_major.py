"""Fourier transforms, which XLA:CPU computes in row-major order only, whatever layout their readers prefer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.client.annotate import annotate
from shardwright.client.lowering import lower
from shardwright.clusters.cluster import Cluster
from shardwright.options.plan_options import PlanOptions
from shardwright.planner import plan
from shardwright.user_plans import compile_and_prove
from tests.planner.running import xla_outputs

X = (np.random.default_rng(0).normal(size=(8, 16, 4, 4)) * (1 + 1j)).astype(np.complex64)


@pytest.mark.parametrize(
    "transform",
    [jnp.fft.fft, jnp.fft.ifft2, lambda x: jnp.fft.rfft(x.real), lambda x: jnp.fft.irfftn(x, axes=(1, 2, 3))],
    ids=["fft", "ifft2", "rfft", "irfftn"],
)
@pytest.mark.parametrize("force", ["data", None], ids=["split", "free"])
def test_a_transform_is_pinned_without_a_call(transform: Any, force: str | None) -> None:
    """XLA:TPU refuses a `LayoutConstraint` of complex numbers (libtpu 0.0.42.1: UNIMPLEMENTED)."""
    text = sw.plan(lower(transform, X).hlo_text, 8, force=force).emit()
    assert "custom_call" not in text
    assert text.count("stablehlo.fft") == text.count("stablehlo.optimization_barrier") == 1


@pytest.mark.dear
@pytest.mark.parametrize("pins", [{0: "data", 1: "model"}, {1: "data"}, {0: "data"}])
def test_what_a_transform_hands_on_may_be_gathered_along_any_dimension(pins: dict[int, str]) -> None:
    def step(x: jax.Array) -> jax.Array:
        return jnp.fft.fft2(annotate(jnp.fft.fft2(x) * 2, pins))

    planned = plan(lower(step, X).hlo_text, Cluster.local(8), PlanOptions(mesh={"data": 4, "model": 2}))
    (out,) = xla_outputs(planned, X)
    np.testing.assert_allclose(out, step(X), rtol=1e-4, atol=1e-3)
    assert compile_and_prove(planned).holds
