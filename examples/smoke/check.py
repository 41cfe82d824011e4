"""Runs a function on servers and compares the result with plain JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import shardwright as sw


def check(session: sw.Session, function: Callable[..., jax.Array], *arrays: np.ndarray, **options: Any) -> None:
    """Print a summary of the plan of `function(*arrays)`, and its result's relative difference from plain JAX's.

    options: of `session.parallelize`. Exits on a difference of more than rounding.
    """
    step = session.parallelize(function, **options)
    result, expected = np.asarray(step(*arrays)), np.asarray(jax.jit(function)(*arrays))
    difference = float(np.abs(result - expected).max() / np.abs(expected).max())
    plan = step.plan
    layouts = ", ".join(f"{variable.name} {variable.sharding}" for variable in (*plan.parameters, *plan.outputs))
    kinds = sorted({collective.kind for collective in plan.collectives}) or ["no collective"]
    print(f"{function.__name__}: mesh {plan.mesh}; {layouts}; {', '.join(kinds)}; differs by {difference:.0e}")
    if difference > 1e-5:
        raise SystemExit(f"{function.__name__} differs from plain JAX by {difference:.1e} of the largest value")
