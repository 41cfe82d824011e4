"""Adasum: a sum that takes out what two gradients have in common, so that more ranks need no smaller learning rate.

adasum(a, b) = (1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b: the sum of orthogonal gradients, the average of parallel ones.
Ranks combine in pairs, at distances 1, 2, 4, …; those beyond the largest power of two first join a partner below it.
Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def combine(first: Any, second: Any, dot: Callable[[Any, Any], Any], where: Callable[..., Any]) -> Any:
    """Adasum of two arrays of the same shape. A gradient of zeros leaves the other one as it is."""
    common, first_norm, second_norm = dot(first, second), dot(first, first), dot(second, second)
    first_share = 1 - where(first_norm > 0, common / where(first_norm > 0, 2 * first_norm, 1), 0)
    second_share = 1 - where(second_norm > 0, common / where(second_norm > 0, 2 * second_norm, 1), 0)
    return first_share * first + second_share * second


def tree(values: Sequence[Any], pair: Callable[[Any, Any], Any]) -> Any:
    """All values, combined in pairs."""
    power = 1 << (len(values).bit_length() - 1)
    partials = [*values[:power]]
    for extra, value in enumerate(values[power:]):
        partials[extra] = pair(partials[extra], value)
    while len(partials) > 1:
        partials = [pair(partials[at], partials[at + 1]) for at in range(0, len(partials), 2)]
    return partials[0]


def pairs_of_rounds(size: int) -> list[list[list[int]]]:
    """For each round of a power of two of ranks, the pairs that combine: the same as `tree`, at every rank."""
    distances = [1 << step for step in range(size.bit_length() - 1)]
    return [[[at, at | distance] for at in range(size) if not at & distance] for distance in distances]


def adasum_rows(rows: np.ndarray) -> np.ndarray:
    """Adasum of equal arrays, one a rank, on the host."""
    wide = np.dtype("float64") if rows.dtype.itemsize == 8 else np.dtype("float32")
    return np.asarray(tree(list(rows.astype(wide)), _combine_on_host)).astype(rows.dtype)


def _combine_on_host(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return np.asarray(combine(first, second, np.vdot, np.where)).astype(first.dtype)
