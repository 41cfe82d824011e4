"""Losses over classes given by index."""

from __future__ import annotations

from typing import Any

import jax
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


def _multi_margin(x: Any, target: Any, p: Any, margin: Any, weight: Any, reduction: int) -> Any:
    """Σ max(0, margin − x[target] + x[i])^p / classes, over the other classes."""
    x, target = jnp.atleast_2d(x), target.reshape(-1, 1)
    chosen = jnp.take_along_axis(x, target, axis=1)
    losses = jnp.maximum(margin - chosen + x, 0) ** p
    if weight is not None:
        losses = losses * weight[target]
    is_other = lax.broadcasted_iota(target.dtype, x.shape, 1) != target
    return _reduce(jnp.sum(jnp.where(is_other, losses, 0), axis=1) / x.shape[1], reduction)


def _reduce(losses: Any, reduction: int) -> Any:
    if reduction == _NONE:
        return losses
    return jnp.mean(losses) if reduction == _MEAN else jnp.sum(losses)


@lowers("multi_margin_loss")
def _multi_margin_loss(
    call: Call, x: Any, target: Any, p: Any = 1, margin: Any = 1, weight: Any = None, reduction: int = _MEAN
) -> Any:
    return _multi_margin(widen(x), target, p, margin, weight, reduction).reshape(call.shape)


@lowers("multi_margin_loss_backward")
def _multi_margin_loss_backward(
    call: Call, grad: Any, x: Any, target: Any, p: Any, margin: Any, weight: Any = None, reduction: int = _MEAN
) -> Any:
    del call
    loss, transpose = jax.vjp(lambda x: _multi_margin(x, target, p, margin, weight, reduction), widen(x))
    return transpose(grad.reshape(loss.shape).astype(loss.dtype))[0]


def _find_listed(target: Any) -> Any:
    """Which of the targets are before the first −1."""
    return jnp.cumsum(target < 0, axis=1) == 0


def _multilabel_margin(x: Any, target: Any, is_target: Any, reduction: int) -> Any:
    """Σ max(0, 1 − x[j] + x[i]) / classes, over the targets j before the first −1 and all i that are none."""
    is_listed = _find_listed(target)
    chosen = jnp.take_along_axis(x, jnp.where(is_listed, target, 0), axis=1)
    losses = jnp.maximum(1 - chosen[:, :, None] + x[:, None, :], 0)
    is_counted = is_listed[:, :, None] & (is_target == 0)[:, None, :]
    return _reduce(jnp.sum(jnp.where(is_counted, losses, 0), axis=(1, 2)) / x.shape[1], reduction)


@lowers("multilabel_margin_loss_forward")
def _multilabel_margin_loss(call: Call, x: Any, target: Any, reduction: int) -> Any:
    """(loss, 1 at every target)."""
    shape = target.shape
    x, target = jnp.atleast_2d(widen(x)), jnp.atleast_2d(target)
    is_listed = _find_listed(target)
    rows = lax.broadcasted_iota(target.dtype, target.shape, 0)
    is_target = jnp.zeros(x.shape, x.dtype).at[rows, jnp.where(is_listed, target, 0)].max(is_listed.astype(x.dtype))
    loss = _multilabel_margin(x, target, is_target, reduction)
    return loss.reshape(tuple(call.result[0].shape)), is_target.reshape(shape)


@lowers("multilabel_margin_loss_backward")
def _multilabel_margin_loss_backward(call: Call, grad: Any, x: Any, target: Any, reduction: int, is_target: Any) -> Any:
    x, target, is_target = (jnp.atleast_2d(value) for value in (widen(x), target, is_target))
    loss, transpose = jax.vjp(lambda x: _multilabel_margin(x, target, is_target, reduction), x)
    return transpose(grad.reshape(loss.shape).astype(loss.dtype))[0].reshape(call.shape)
