"""Losses over all alignments of a sequence with a shorter one (connectionist temporal classification)."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardwright.client.frontends.torch.lowerings.registry import Call, lowers, widen

#: Logarithm of nothing, finite so that slopes are.
_NOTHING = -1e30


@lowers("ctc_loss")
def _loss(call: Call, scores: Any, targets: Any, lengths: Any, target_lengths: Any, blank: int) -> Any:
    del call
    losses = _losses(widen(scores), targets, lengths, target_lengths, blank)
    return jnp.where(losses > -_NOTHING / 2, jnp.inf, losses)


@lowers("ctc_slope")
def _slope(call: Call, scores: Any, targets: Any, lengths: Any, target_lengths: Any, blank: int) -> Any:
    """That of what the scores are a softmax of, as PyTorch gives it: what the alignments take is missing there."""
    del call
    scores = widen(scores)
    losses, pull = jax.vjp(lambda x: _losses(x, targets, lengths, target_lengths, blank), scores)
    (of_scores,) = pull(jnp.ones_like(losses))
    is_inside = (jnp.arange(scores.shape[0])[:, None] < lengths)[..., None]
    return jnp.where(is_inside, jnp.exp(scores) + of_scores, 0)


def _losses(scores: Any, targets: Any, lengths: Any, target_lengths: Any, blank: int) -> Any:
    """−log Σ over alignments, of scores [time, batch, classes] and targets [batch, place].

    An alignment goes through the states blank, target 0, blank, target 1, … in order; a target may follow another
    without the blank in between, unless they are equal.
    """
    batch, count = targets.shape
    states = jnp.full((batch, 2 * count + 1), blank, targets.dtype).at[:, 1::2].set(targets)
    may_skip = (states != blank) & (states != jnp.roll(states, 2, axis=1)) & (jnp.arange(2 * count + 1) >= 2)
    of_states = jnp.take_along_axis(scores, jnp.broadcast_to(states, (scores.shape[0], *states.shape)), axis=2)
    first = jnp.where(jnp.arange(2 * count + 1) < 2, of_states[0], _NOTHING)
    back = functools.partial(jnp.pad, constant_values=_NOTHING)

    def advance(sums: Any, now: Any) -> Any:
        time, of_time = now
        stay, step = sums, back(sums[:, :-1], ((0, 0), (1, 0)))
        skip = jnp.where(may_skip, back(sums[:, :-2], ((0, 0), (2, 0))), _NOTHING)
        new = jnp.logaddexp(jnp.logaddexp(stay, step), skip) + of_time
        return jnp.where((time < lengths)[:, None], new, sums), None

    sums, _ = lax.scan(advance, first, (jnp.arange(1, scores.shape[0]), of_states[1:]))
    last = 2 * target_lengths[:, None]
    on_blank = jnp.take_along_axis(sums, jnp.clip(last, 0, 2 * count), axis=1)[:, 0]
    on_target = jnp.take_along_axis(sums, jnp.clip(last - 1, 0, 2 * count), axis=1)[:, 0]
    on_target = jnp.where(target_lengths > 0, on_target, _NOTHING)
    fits = (target_lengths <= count) & (lengths > 0)
    return jnp.where(fits, -jnp.logaddexp(on_blank, on_target), -_NOTHING)
