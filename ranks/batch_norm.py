"""Batch normalization over the batches of all ranks.

Flax does the same in its own layers under `sw.ranks.jit`: `BatchNorm(axis_name=sw.ranks.AXIS)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardwright.ranks.collectives import allreduce
from shardwright.ranks.operations import ReduceOp
from shardwright.ranks.process_sets import ProcessSet


def batch_norm_moments(
    x: Any, axes: int | Sequence[int] = 0, *, process_set: ProcessSet | None = None
) -> tuple[Any, Any]:
    """Mean and variance over `axes` of all ranks' `x`, whose batches may differ in length.

    x: [batch, …, features]. Both results have the other dimensions; the variance is that of the population. In
    `sw.ranks.jit` gradients flow through them; outside they are numbers. Two rounds, because the mean of squares minus
    the square of the mean loses digits.
    """
    axes = (axes,) if isinstance(axes, int) else tuple(axes)
    values = jnp.asarray(x)
    wide = values.astype(jnp.promote_types(values.dtype, jnp.float32))
    count = jnp.asarray(np.prod([values.shape[axis] for axis in axes]), wide.dtype)
    total, number = allreduce((wide.sum(axes), count), ReduceOp.SUM, name="batch_norm mean", process_set=process_set)
    mean = total / number
    squares = jnp.square(wide - jnp.expand_dims(mean, axes)).sum(axes)
    variance = allreduce(squares, ReduceOp.SUM, name="batch_norm variance", process_set=process_set) / number
    return mean, variance


def batch_norm(
    x: Any,
    scale: Any = None,
    offset: Any = None,
    axes: int | Sequence[int] = 0,
    *,
    epsilon: float = 1e-5,
    process_set: ProcessSet | None = None,
) -> tuple[Any, Any, Any]:
    """`(y, mean, variance)`: x normalized over `axes` of all ranks, times `scale`, plus `offset` (each [features])."""
    axes = (axes,) if isinstance(axes, int) else tuple(axes)
    mean, variance = batch_norm_moments(x, axes, process_set=process_set)
    inverse = lax.rsqrt(jnp.expand_dims(variance, axes) + epsilon)
    y = (x - jnp.expand_dims(mean, axes)) * inverse
    if scale is not None:
        y = y * jnp.asarray(scale)
    if offset is not None:
        y = y + jnp.asarray(offset)
    return y.astype(jnp.asarray(x).dtype), mean, variance
