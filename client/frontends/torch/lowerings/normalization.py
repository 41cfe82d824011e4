"""Normalization over features, groups and batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardwright.client.frontends.torch.lowerings.registry import Call, lowers, widen


@lowers("native_layer_norm")
def _layer_norm(call: Call, x: Any, normalized_shape: Sequence[int], weight: Any, bias: Any, eps: float) -> Any:
    """(y, mean, 1 / √(variance + eps)) over the last dimensions."""
    axes = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    wide = widen(x)
    mean = jnp.mean(wide, axis=axes, keepdims=True)
    rstd = lax.rsqrt(jnp.mean(jnp.square(wide - mean), axis=axes, keepdims=True) + eps)
    y = (wide - mean) * rstd
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    mean, rstd = (v.reshape(tuple(r.shape)) for v, r in zip((mean, rstd), call.result[1:], strict=True))
    return y, mean, rstd


@lowers("native_layer_norm_backward")
def _layer_norm_backward(
    call: Call, grad: Any, x: Any, normalized_shape: Sequence[int], mean: Any, rstd: Any, weight: Any, bias: Any,
    mask: Sequence[bool],
) -> Any:  # fmt: skip
    """With n = (x − mean) · rstd and g = grad · weight: rstd · (g − mean(g) − n · mean(g · n))."""
    del call
    first = x.ndim - len(normalized_shape)
    inner, outer = tuple(range(first, x.ndim)), tuple(range(first))
    grad, wide = widen(grad), widen(x)
    n = (wide - mean) * rstd
    of_x = of_weight = of_bias = None
    if mask[0]:
        g = grad if weight is None else grad * weight
        g_mean = jnp.mean(g, axis=inner, keepdims=True)
        of_x = rstd * (g - g_mean - n * jnp.mean(g * n, axis=inner, keepdims=True))
    if mask[1] and weight is not None:
        of_weight = jnp.sum(grad * n, axis=outer)
    if mask[2] and bias is not None:
        of_bias = jnp.sum(grad, axis=outer)
    return of_x, of_weight, of_bias


@lowers("_fused_rms_norm")
def _rms_norm(call: Call, x: Any, normalized_shape: Sequence[int], weight: Any, eps: Any) -> Any:
    """(x · weight / √(mean(x²) + eps), 1 / √(mean(x²) + eps))."""
    axes = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    wide = widen(x)
    eps = float(np.finfo(wide.dtype).eps) if eps is None else eps
    rstd = lax.rsqrt(jnp.mean(jnp.square(wide), axis=axes, keepdims=True) + eps)
    y = wide * rstd
    return y if weight is None else y * weight, rstd.reshape(tuple(call.result[1].shape))


@lowers("_fused_rms_norm_backward")
def _rms_norm_backward(
    call: Call, grad: Any, x: Any, normalized_shape: Sequence[int], rstd: Any, weight: Any, mask: Sequence[bool]
) -> Any:
    del call
    first = x.ndim - len(normalized_shape)
    inner, outer = tuple(range(first, x.ndim)), tuple(range(first))
    grad, n = widen(grad), widen(x) * rstd
    g = grad if weight is None else grad * weight
    of_x = rstd * (g - n * jnp.mean(g * n, axis=inner, keepdims=True)) if mask[0] else None
    return of_x, jnp.sum(grad * n, axis=outer) if mask[1] and weight is not None else None


@lowers("native_group_norm")
def _group_norm(
    call: Call, x: Any, weight: Any, bias: Any, batch: int, channels: int, inner: int, groups: int, eps: float
) -> Any:
    del call, inner
    parts = widen(x).reshape(batch, groups, -1)
    mean = jnp.mean(parts, axis=2)
    rstd = lax.rsqrt(jnp.mean(jnp.square(parts - mean[..., None]), axis=2) + eps)
    y = ((parts - mean[..., None]) * rstd[..., None]).reshape(x.shape)
    shape = (1, channels, *([1] * (x.ndim - 2)))
    y = y if weight is None else y * weight.reshape(shape)
    return y if bias is None else y + bias.reshape(shape), mean, rstd


@lowers("native_group_norm_backward")
def _group_norm_backward(
    call: Call, grad: Any, x: Any, mean: Any, rstd: Any, weight: Any, batch: int, channels: int, inner: int,
    groups: int, mask: Sequence[bool],
) -> Any:  # fmt: skip
    del call, inner
    grouped = (batch, groups, -1)
    wide, grad = widen(x), widen(grad)
    n = ((wide.reshape(grouped) - mean[..., None]) * rstd[..., None]).reshape(x.shape)
    outer = (0, *range(2, x.ndim))
    of_x = of_weight = of_bias = None
    if mask[0]:
        g = grad if weight is None else grad * weight.reshape(1, channels, *([1] * (x.ndim - 2)))
        g, flat = g.reshape(grouped), n.reshape(grouped)
        g_mean = jnp.mean(g, axis=2, keepdims=True)
        of_x = (rstd[..., None] * (g - g_mean - flat * jnp.mean(g * flat, axis=2, keepdims=True))).reshape(x.shape)
    if mask[1]:
        of_weight = jnp.sum(grad * n, axis=outer)
    if mask[2]:
        of_bias = jnp.sum(grad, axis=outer)
    return of_x, of_weight, of_bias


@lowers("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit.no_stats", "cudnn_batch_norm",
        "_native_batch_norm_legit_no_training", "_batch_norm_with_update", "_batch_norm_no_update",
        "_native_batch_norm_legit_functional")  # fmt: skip
def _batch_norm(call: Call, x: Any, weight: Any, bias: Any, *rest: Any) -> Any:
    """(y, saved mean, saved 1 / √(variance + eps), new running mean, new running variance) over all but dimension 1.

    The running ones have the unbiased variance; without training they normalize, and stay.
    """
    name = str(call.node.target)
    running_mean, running_var, training, momentum, eps = _batch_norm_options(name, rest)
    axes = (0, *range(2, x.ndim))
    shape = (1, -1, *([1] * (x.ndim - 2)))
    wide = widen(x)
    if training:
        mean = jnp.mean(wide, axis=axes)
        variance = jnp.mean(jnp.square(wide - mean.reshape(shape)), axis=axes)
        rstd = lax.rsqrt(variance + eps)
        if running_mean is not None:
            count = math.prod(x.shape[axis] for axis in axes)
            unbiased = variance * (count / max(count - 1, 1))
            running_mean = (1 - momentum) * running_mean + momentum * mean
            running_var = (1 - momentum) * running_var + momentum * unbiased
        saved = mean, rstd
    else:
        mean, rstd = widen(running_mean), lax.rsqrt(widen(running_var) + eps)
        saved = jnp.zeros((0,), mean.dtype), jnp.zeros((0,), mean.dtype)
    y = (wide - mean.reshape(shape)) * rstd.reshape(shape)
    y = y if weight is None else y * weight.reshape(shape)
    y = y if bias is None else y + bias.reshape(shape)
    results = [y, *saved]
    results += [jnp.zeros((0,), jnp.uint8)] * (len(call.result) - 3) if "functional" not in name else []
    fitted = [r.reshape(tuple(t.shape)) for r, t in zip(results, call.result, strict=False)]
    return (*fitted, running_mean, running_var)


def _batch_norm_options(name: str, rest: Sequence[Any]) -> tuple[Any, Any, bool, float, float]:
    if "no_stats" in name:
        training, momentum, eps = rest
        return None, None, training, momentum, eps
    if "no_training" in name or "no_update" in name:
        running_mean, running_var, momentum, eps = rest
        return running_mean, running_var, False, momentum, eps
    if "with_update" in name:
        running_mean, running_var, momentum, eps = rest
        return running_mean, running_var, True, momentum, eps
    running_mean, running_var, training, momentum, eps = rest
    return running_mean, running_var, training, momentum, eps


@lowers("native_batch_norm_backward", "cudnn_batch_norm_backward")
def _batch_norm_backward(
    call: Call, grad: Any, x: Any, weight: Any, running_mean: Any, running_var: Any, save_mean: Any, save_rstd: Any,
    train: bool, eps: float, mask: Sequence[bool],
) -> Any:  # fmt: skip
    """With n = (x − mean) · rstd: weight · rstd · (grad − mean(grad) − n · mean(grad · n)) in training."""
    del call
    axes = (0, *range(2, x.ndim))
    shape = (1, -1, *([1] * (x.ndim - 2)))
    grad, wide = widen(grad), widen(x)
    if train:
        mean, rstd = save_mean, save_rstd
    else:
        mean, rstd = widen(running_mean), lax.rsqrt(widen(running_var) + eps)
    n = (wide - mean.reshape(shape)) * rstd.reshape(shape)
    grad_sum, product_sum = jnp.sum(grad, axis=axes), jnp.sum(grad * n, axis=axes)
    of_x = None
    if mask[0]:
        scale = rstd if weight is None else rstd * weight
        inner = grad
        if train:
            count = math.prod(x.shape[axis] for axis in axes)
            inner = grad - (grad_sum / count).reshape(shape) - n * (product_sum / count).reshape(shape)
        of_x = inner * scale.reshape(shape)
    return of_x, product_sum if mask[1] else None, grad_sum if mask[2] else None
