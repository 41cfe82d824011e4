"""Delayed gradients, as an optimizer of optax."""

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
    """Wrap an optimizer: each gradient is applied `steps` updates after its computation.

    Bounded staleness (Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server",
    2013) at its bound, the same on every device and in every run. The first `steps` updates are zero and leave the
    optimizer's state unchanged. The state has `steps` gradients: slots of the variables, sharded alike.

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
        updates = jax.tree.map(lambda leaf: jnp.where(is_due, leaf, jnp.zeros_like(leaf)), updates)
        next_inner = jax.tree.map(lambda new, old: jnp.where(is_due, new, old), changed, state.inner)
        count = jnp.minimum(state.applied + 1, steps)
        return updates, StaleState(count, (*younger, gradients), next_inner)

    return optax.GradientTransformationExtraArgs(init, update)
