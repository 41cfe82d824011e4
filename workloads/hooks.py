"""Names for the dimensions of activations: nothing for the planner's input, constraints in an expert's program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax

Axes = tuple[str | None, ...]
Constrain = Callable[[jax.Array, Axes], jax.Array]

_CONSTRAIN: ContextVar[Constrain | None] = ContextVar("constrain", default=None)


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """`x`, laid out as the expert in charge wants dimensions of these names; `x` itself where there is none."""
    apply = _CONSTRAIN.get()
    return x if apply is None else apply(x, axes)


@contextmanager
def constrained_by(apply: Constrain) -> Iterator[None]:
    """Programs traced inside have their named activations laid out by `apply`."""
    token = _CONSTRAIN.set(apply)
    try:
        yield
    finally:
        _CONSTRAIN.reset(token)
