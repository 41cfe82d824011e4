"""A small training step as HLO text, and the same in numpy."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.plans.layouts import Layout
from shardwright.plans.plan import Plan

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


@functools.cache
def training_step() -> str:
    """`(w, x, y) -> (w, loss)` of a linear model under gradient descent; w is donated."""

    def step(w: jax.Array, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w - y) ** 2))(w)
        return w - 0.1 * gradient, loss

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 4), (16, 8), (16, 4))]
    return jax.jit(step, donate_argnums=0, keep_unused=True).lower(*shapes).as_text("hlo")


def inputs() -> Arrays:
    rng = np.random.default_rng(0)
    w, x, y = (rng.normal(size=shape).astype(np.float32) for shape in ((8, 4), (16, 8), (16, 4)))
    return w, x, y


def reference(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.floating]:
    """One step in float64."""
    error = x.astype(np.float64) @ w - y
    return w - 0.1 * (2 / error.size) * x.T @ error, np.mean(error**2)


def layouts(plan: Plan, first_device: int = 0) -> tuple[list[Layout], list[Layout]]:
    """Of arguments and outputs, on the devices from `first_device` on."""
    arguments, outputs = (
        [Layout.of(variable, plan.mesh, first_device) for variable in variables]
        for variables in (plan.parameters, plan.outputs)
    )
    return arguments, outputs
