"""Tests of values: whether an array is a softmax of scores, and whether one is the gradient behind it.

Arrays have keys last.
"""

from __future__ import annotations

import numpy as np

from shardwright.planner.attention.elementwise import Array
from shardwright.planner.attention.tuning import CLOSE, HIDDEN


def softmax(scores: Array) -> Array:
    with np.errstate(all="ignore"):
        exponentials = np.exp(scores - scores.max(-1, keepdims=True))
        result: Array = exponentials / exponentials.sum(-1, keepdims=True)
        return result


def slope_of(scores: Array, at_scores: Array, at_zero: Array) -> float | None:
    """The scale of which `at_scores` is the softmax of scale · scores, with whatever mask and bias; None if it is none.

    at_zero: the same array where all scores are 0. Rows without a key that they see are passed over.
    """
    with np.errstate(all="ignore"):
        rows = np.asarray(np.isfinite(at_scores).all(-1) & np.isfinite(at_zero).all(-1))
        seen = (at_zero > 0) & (at_scores > 0) & rows[..., None]
        changes = np.where(seen, np.log(at_scores) - np.log(at_zero), 0.0)
    rows &= np.asarray(np.abs(at_scores).sum(-1) > 0)
    if not rows.any() or np.abs(at_scores.sum(-1) - 1)[rows].max() > CLOSE:
        return None
    rows &= np.asarray(np.abs(at_scores - at_zero).max(-1) > 0)  # one that sees no key is the same for all scores
    seen &= rows[..., None]
    x, y = _centered(scores, seen), _centered(changes, seen)
    norm = float((x * x).sum())
    if norm == 0:
        return None
    slope = float((x * y).sum()) / norm
    is_linear = np.abs(y - slope * x).max() <= CLOSE * max(1.0, float(np.abs(y).max()))
    return slope if is_linear and slope != 0 else None


def problem_of(scores: Array, at_scores: Array, at_zero: Array) -> str | None:
    """Why an array that is like probabilities is no softmax of scores by `slope_of`; None for any other array."""
    with np.errstate(all="ignore"):
        totals = at_scores.sum(-1, keepdims=True)
        rows = np.isfinite(totals) & (totals > 0)
        if not rows.any() or (at_scores[rows[..., 0]] < 0).any():
            return None
        if np.abs(totals - 1)[rows].max() <= CLOSE:
            return "its scores are not multiplied by a constant alone ahead of their softmax"
        slope = slope_of(scores, at_scores / totals, at_zero / at_zero.sum(-1, keepdims=True))
    return None if slope is None else "its probabilities do not sum to 1: they are dropped, or divided by more"


def _centered(values: Array, seen: Array) -> Array:
    """Values less their row's mean, over what is seen."""
    counts = np.maximum(seen.sum(-1, keepdims=True), 1)
    chosen = np.where(seen, values, 0.0)
    result: Array = np.where(seen, chosen - chosen.sum(-1, keepdims=True) / counts, 0.0)
    return result


def gradient_factor(value: Array, probabilities: Array, gradient: Array, rows: Array) -> float | None:
    """The constant by which `value` is that times the gradient of the scores; None if it is another array.

    gradient: of the probabilities. rows: that are compared.
    """
    inner = (probabilities * gradient).sum(-1, keepdims=True)
    expected = np.where(rows[..., None], probabilities * (gradient - inner), 0.0)
    value = np.where(rows[..., None], value, 0.0)
    norm = float((expected * expected).sum())
    if norm == 0 or not np.isfinite(value).all():
        return None
    factor = float((value * expected).sum()) / norm
    is_equal = np.abs(value - factor * expected).max() <= CLOSE * max(float(np.abs(value).max()), 1e-12)
    return factor if is_equal and factor != 0 else None


def is_close(first: Array, second: Array, rows: Array) -> bool:
    """Whether two arrays agree in some rows."""
    difference = np.abs(first - second).max(-1)[rows]
    return bool(rows.any()) and bool(np.isfinite(difference).all()) and float(difference.max()) <= CLOSE


def find_hidden(logits: Array) -> Array:
    """Rows of which no key is seen."""
    return np.asarray(~(logits.max(-1) > HIDDEN))


def kind_of(value: Array, rows: Array) -> str:
    """What an array is in some rows: `zero`, `even` (all keys alike), `nan`, or `other`."""
    part = value[rows]
    if not np.isfinite(part).all():
        return "nan"
    if not np.abs(part).max() > 0:
        return "zero"
    return "even" if np.ptp(part, axis=-1).max() <= CLOSE * float(np.abs(part).max()) else "other"
