"""Reductions along dimensions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardwright.client.frontends.torch.lowerings.registry import Call, axes_of, is_array, lowers, widen


@lowers("sum")
def _sum(call: Call, x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    del dtype
    return jnp.sum(_in_result_type(x, call), axis=axes_of(dim, x.ndim), keepdims=keepdim)


@lowers("mean")
def _mean(call: Call, x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    del dtype
    return jnp.mean(_in_result_type(x, call), axis=axes_of(dim, x.ndim), keepdims=keepdim)


@lowers("nansum")
def _nansum(call: Call, x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    del dtype
    return jnp.nansum(_in_result_type(x, call), axis=axes_of(dim, x.ndim), keepdims=keepdim)


@lowers("prod")
def _prod(call: Call, x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    del dtype
    return jnp.prod(_in_result_type(x, call), axis=axes_of(dim, x.ndim), keepdims=keepdim)


def _in_result_type(x: Any, call: Call) -> Any:
    return x.astype(call.dtype) if x.dtype != call.dtype else x


@lowers("amax")
def _amax(call: Call, x: Any, dim: Any = (), keepdim: bool = False) -> Any:
    del call
    return jnp.max(x, axis=axes_of(dim, x.ndim), keepdims=keepdim)


@lowers("amin")
def _amin(call: Call, x: Any, dim: Any = (), keepdim: bool = False) -> Any:
    del call
    return jnp.min(x, axis=axes_of(dim, x.ndim), keepdims=keepdim)


@lowers("any", "_is_any_true")
def _any(call: Call, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    del call
    return jnp.any(x != 0, axis=axes_of(dim, x.ndim), keepdims=keepdim)


@lowers("all", "_is_all_true")
def _all(call: Call, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    del call
    return jnp.all(x != 0, axis=axes_of(dim, x.ndim), keepdims=keepdim)


@lowers("max", "max.dim")
def _max(call: Call, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return _extreme(call, x, dim, keepdim, jnp.max, jnp.argmax, jnp.maximum)


@lowers("min", "min.dim")
def _min(call: Call, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return _extreme(call, x, dim, keepdim, jnp.min, jnp.argmin, jnp.minimum)


def _extreme(call: Call, x: Any, dim: Any, keepdim: bool, value: Any, index: Any, of_two: Any) -> Any:
    if is_array(dim):  # of two tensors
        return of_two(x.astype(call.dtype), dim.astype(call.dtype))
    if dim is None:
        return value(x)
    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int64)
    return value(x, axis=dim, keepdims=keepdim), index(x, axis=dim, keepdims=keepdim)


@lowers("argmax")
def _argmax(call: Call, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return jnp.argmax(x, axis=dim if x.ndim else None, keepdims=keepdim).reshape(call.shape)


@lowers("argmin")
def _argmin(call: Call, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return jnp.argmin(x, axis=dim if x.ndim else None, keepdims=keepdim).reshape(call.shape)


@lowers("aminmax")
def _aminmax(call: Call, x: Any, *, dim: Any = None, keepdim: bool = False) -> Any:
    del call
    axes = axes_of(dim, x.ndim)
    return jnp.min(x, axis=axes, keepdims=keepdim), jnp.max(x, axis=axes, keepdims=keepdim)


@lowers("var", "var.dim", "var.correction")
def _var(call: Call, x: Any, *args: Any, **kwargs: Any) -> Any:
    del call
    return _variance(x, *args, **kwargs)[0]


@lowers("var_mean", "var_mean.correction", "var_mean.dim")
def _var_mean(call: Call, x: Any, *args: Any, **kwargs: Any) -> Any:
    del call
    return _variance(x, *args, **kwargs)


def _variance(
    x: Any, dim: Any = None, unbiased: Any = True, keepdim: bool = False, *, correction: Any = None
) -> tuple[Any, Any]:
    if isinstance(dim, bool):  # of the overload without dimensions
        dim, unbiased = None, dim
    axes = axes_of(dim, x.ndim)
    correction = float(unbiased) if correction is None else correction
    x = widen(x)
    mean = jnp.mean(x, axis=axes, keepdims=True)
    square = jnp.square(jnp.abs(x - mean)) if x.dtype.kind == "c" else jnp.square(x - mean)
    count = 1
    for axis in axes:
        count *= x.shape[axis]
    total = jnp.sum(square, axis=axes, keepdims=keepdim)
    divisor = max(count - correction, 0)
    return total / divisor, mean if keepdim else jnp.squeeze(mean, axes)


@lowers("linalg_vector_norm")
def _vector_norm(call: Call, x: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """(Σ |x|^ord)^(1/ord)."""
    del dtype
    axes = axes_of(dim, x.ndim)
    x = widen(jnp.abs(x).astype(call.dtype))
    if ord == float("inf"):
        return jnp.max(x, axis=axes, keepdims=keepdim)
    if ord == float("-inf"):
        return jnp.min(x, axis=axes, keepdims=keepdim)
    if ord == 0:
        return jnp.sum(x != 0, axis=axes, keepdims=keepdim)
    if ord == 1:
        return jnp.sum(x, axis=axes, keepdims=keepdim)
    if ord == 2:
        return jnp.sqrt(jnp.sum(x * x, axis=axes, keepdims=keepdim))
    return jnp.power(jnp.sum(jnp.power(x, ord), axis=axes, keepdims=keepdim), 1 / ord)


@lowers("logsumexp")
def _logsumexp(call: Call, x: Any, dim: Any, keepdim: bool = False) -> Any:
    x = widen(_in_result_type(x, call))
    return jax.nn.logsumexp(x, axis=axes_of(dim, x.ndim), keepdims=keepdim)


@lowers("_softmax", "_safe_softmax")
def _softmax(call: Call, x: Any, dim: int, half_to_float: Any = False) -> Any:
    """exp(x) / Σ exp(x); a row of −∞ alone is 0 in the safe form."""
    del half_to_float
    x = widen(_in_result_type(x, call))
    axes = axes_of(dim, x.ndim)
    largest = lax.stop_gradient(jnp.max(x, axis=axes, keepdims=True))
    is_safe = "_safe_softmax" in str(call.node.target)
    if is_safe:
        largest = jnp.where(jnp.isneginf(largest), jnp.zeros((), x.dtype), largest)
    exponential = jnp.exp(x - largest)
    total = jnp.sum(exponential, axis=axes, keepdims=True)
    return exponential / (jnp.where(total == 0, jnp.ones((), x.dtype), total) if is_safe else total)


@lowers("_log_softmax")
def _log_softmax(call: Call, x: Any, dim: int, half_to_float: bool = False) -> Any:
    del half_to_float
    x = widen(_in_result_type(x, call))
    axes = axes_of(dim, x.ndim)
    shifted = x - jnp.max(x, axis=axes, keepdims=True)
    return shifted - jnp.log(jnp.sum(jnp.exp(shifted), axis=axes, keepdims=True))


@lowers("_softmax_backward_data")
def _softmax_backward(call: Call, grad: Any, y: Any, dim: int, input_dtype: Any) -> Any:
    del call, input_dtype
    product = widen(grad) * widen(y)
    return product - widen(y) * jnp.sum(product, axis=axes_of(dim, y.ndim), keepdims=True)


@lowers("_log_softmax_backward_data")
def _log_softmax_backward(call: Call, grad: Any, y: Any, dim: int, input_dtype: Any) -> Any:
    del call, input_dtype
    grad = widen(grad)
    return grad - jnp.exp(widen(y)) * jnp.sum(grad, axis=axes_of(dim, y.ndim), keepdims=True)


@lowers("count_nonzero")
def _count_nonzero(call: Call, x: Any, dim: Any = None) -> Any:
    del call
    return jnp.sum(x != 0, axis=axes_of(dim, x.ndim))
