"""Gradients that are applied some steps late, as an optimizer of optax."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from shardwright.errors import OptionError


class StaleState(NamedTuple):
    """applied: updates so far, up to the number of pending ones. pending: gradients, the oldest first. inner: the
    optimizer's own state.
    """

    applied: jax.Array
    pending: tuple[Any, ...]
    inner: Any


def stale(optimizer: optax.GradientTransformation, steps: int) -> optax.GradientTransformationExtraArgs:
    """An optimizer that applies each gradient `steps` updates after it was computed.

    Bounded staleness (Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server",
    2013) at its bound, the same on every device and in every run. The first `steps` updates are zero and leave the
    optimizer's state as it was. Its state holds that many gradients: slots of the variables, laid out as such.

    Raises OptionError unless `steps` is a number from 0; 0 is the optimizer itself.
    """
    if type(steps) is not int or steps < 0:
        raise OptionError(f"{steps!r} steps", where="stale(steps=)", remedy="give a number from 0")
    inner = optax.with_extra_args_support(optimizer)
    if steps == 0:
        return inner

    def init(params: Any) -> StaleState:
        zeros = tuple(jax.tree.map(jnp.zeros_like, params) for _ in range(steps))
        return StaleState(jnp.zeros((), jnp.int32), zeros, inner.init(params))

    def update(gradients: Any, state: StaleState, params: Any = None, **extra: Any) -> tuple[Any, StaleState]:
        oldest, *younger = state.pending
        is_due = state.applied >= steps
        updates, changed = inner.update(oldest, state.inner, params, **extra)
        updates = jax.tree.map(lambda each: jnp.where(is_due, each, jnp.zeros_like(each)), updates)
        kept = jax.tree.map(lambda new, old: jnp.where(is_due, new, old), changed, state.inner)
        count = jnp.minimum(state.applied + 1, steps)
        return updates, StaleState(count, (*younger, gradients), kept)

    return optax.GradientTransformationExtraArgs(init, update)
