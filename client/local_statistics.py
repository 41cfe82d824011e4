"""`shardwright.local_statistics`: batch statistics of parts of the batch, as each rank of a data-parallel job has them.

A step is planned as what it means on one device: there the statistics of a batch normalization are those of the whole
batch, and splitting the batch costs two all-reduces a layer. Data-parallel jobs mostly compute them on each device
alone. Written into the program as groups of the batch, that is its meaning on any number of devices, in any plan.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp

from shardwright.errors import ArgumentError, OptionError


def local_statistics(normalize: Callable[[Any], Any], *, groups: int) -> Callable[[Any], Any]:
    """`normalize`, applied to each of `groups` equal parts of the batch, with statistics of that part alone.

    Args:
      normalize: takes an array [batch, …] (or a pytree of them), and returns one [batch, …], or a tuple of that and
        statistics of any shapes. Any function that can be mapped by `jax.vmap`.
      groups: parts of the batch, one after the other. As many as devices split the batch: what each rank of a
        data-parallel job computes, and no collective in such a plan. 1: the whole batch.

    Returns a function of the same argument. Its first result is [batch, …] again. Statistics are means over the parts,
    integers (such as counters) those of the first.

    Raises OptionError on a number of groups below 1; ArgumentError, when called, on a batch that they do not divide.

    `sw.local_statistics(batch_norm, groups=8)(x)`
    """
    if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1:
        raise OptionError(f"{groups!r} groups of a batch", where="groups", remedy="pass a number from 1, such as 8")
    if groups == 1:
        return normalize

    @wraps(normalize)
    def normalize_groups(x: Any) -> Any:
        result = jax.vmap(normalize)(jax.tree.map(lambda array: _split(array, groups), x))
        if type(result) is not tuple:
            return jax.tree.map(_join, result)
        normalized, *statistics = result
        return jax.tree.map(_join, normalized), *jax.tree.map(_average, statistics)

    return normalize_groups


def _split(array: Any, groups: int) -> Any:
    shape = tuple(array.shape)
    if not shape or shape[0] % groups:
        raise ArgumentError(
            f"an array of shape {list(shape)} has no batch that {groups} groups divide",
            where="local_statistics",
            remedy="choose a batch that is a multiple of the groups, or fewer groups",
        )
    return array.reshape(groups, shape[0] // groups, *shape[1:])


def _join(array: Any) -> Any:
    return array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])


def _average(array: Any) -> Any:
    return array.mean(0) if jnp.issubdtype(array.dtype, jnp.inexact) else array[0]
