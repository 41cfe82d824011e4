"""Negative log likelihood: one class of many by index."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from shardwright.client.frontends.torch.lowerings.registry import Call, lowers, widen

_MEAN, _NONE = 1, 0


@lowers("nll_loss_forward", "nll_loss2d_forward")
def _nll_loss(call: Call, x: Any, target: Any, weight: Any, reduction: int, ignore_index: int) -> Any:
    """(loss, total weight) of log probabilities [batch, classes, …]."""
    del call
    axis = 1 if x.ndim > 1 else 0
    is_kept = target != ignore_index
    classes = jnp.where(is_kept, target, 0)
    x = widen(x)
    chosen = jnp.squeeze(jnp.take_along_axis(x, jnp.expand_dims(classes, axis), axis=axis, mode="clip"), axis)
    weights = _weights(weight, classes, is_kept, x.dtype)
    losses = jnp.where(is_kept, -chosen * weights, 0)
    total = jnp.sum(weights)
    if reduction == _NONE:
        return losses, jnp.zeros((), x.dtype)
    return jnp.sum(losses) / total if reduction == _MEAN else jnp.sum(losses), total


@lowers("nll_loss_backward", "nll_loss2d_backward")
def _nll_loss_backward(
    call: Call, grad: Any, x: Any, target: Any, weight: Any, reduction: int, ignore_index: int, total: Any
) -> Any:
    """−weight at the target's class, 0 elsewhere: a comparison with every class, which is elementwise."""
    del call
    axis = 1 if x.ndim > 1 else 0
    is_kept = target != ignore_index
    classes = jnp.where(is_kept, target, 0)
    grad = widen(grad)
    share = grad / total if reduction == _MEAN else grad
    share = jnp.where(is_kept, -share * _weights(weight, classes, is_kept, grad.dtype), 0)
    numbers = lax.broadcasted_iota(target.dtype, x.shape, axis)
    is_class = numbers == jnp.expand_dims(classes, axis)
    return jnp.where(is_class, jnp.expand_dims(share, axis), jnp.zeros((), grad.dtype))


def _weights(weight: Any, classes: Any, is_kept: Any, dtype: Any) -> Any:
    if weight is None:
        return is_kept.astype(dtype)
    return jnp.where(is_kept, jnp.take(weight, classes, mode="clip"), 0).astype(dtype)
