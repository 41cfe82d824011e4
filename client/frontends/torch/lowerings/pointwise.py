"""Elementwise operators."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardwright.client.frontends.torch.lowerings.registry import (
    DEFAULT,
    TO_BOOL,
    TO_FLOAT,
    Call,
    compute_type,
    has_digits,
    is_array,
    lowers,
    pointwise,
)

_function: Any
for _name, _function in {
    "abs": jnp.abs,
    "neg": jnp.negative,
    "ceil": jnp.ceil,
    "floor": jnp.floor,
    "trunc": jnp.trunc,
    "sign": jnp.sign,
    "sgn": jnp.sign,
    "bitwise_not": jnp.invert,
    "square": jnp.square,
}.items():
    pointwise(_name)(_function)

for _name, _function in {
    "acos": jnp.arccos,
    "acosh": jnp.arccosh,
    "asin": jnp.arcsin,
    "asinh": jnp.arcsinh,
    "atan": jnp.arctan,
    "atanh": jnp.arctanh,
    "cos": jnp.cos,
    "cosh": jnp.cosh,
    "digamma": lax.digamma,
    "erf": lax.erf,
    "erfc": lax.erfc,
    "erfinv": lax.erf_inv,
    "exp": jnp.exp,
    "exp2": jnp.exp2,
    "expm1": jnp.expm1,
    "lgamma": lax.lgamma,
    "bessel_i0": jax.scipy.special.i0,
    "bessel_i0e": lax.bessel_i0e,
    "bessel_i1": jax.scipy.special.i1,
    "bessel_i1e": lax.bessel_i1e,
    "igamma": jax.scipy.special.gammainc,
    "igammac": jax.scipy.special.gammaincc,
    "ndtri": jax.scipy.special.ndtri,
    "special_log_ndtr": jax.scipy.special.log_ndtr,
    "zeta": jax.scipy.special.zeta,
    "log": jnp.log,
    "log10": jnp.log10,
    "log1p": jnp.log1p,
    "log2": jnp.log2,
    "reciprocal": lambda x: 1 / x,
    "rsqrt": lax.rsqrt,
    "sigmoid": jax.nn.sigmoid,
    "sin": jnp.sin,
    "sinh": jnp.sinh,
    "sqrt": jnp.sqrt,
    "tan": jnp.tan,
    "tanh": jnp.tanh,
    "atan2": jnp.arctan2,
}.items():
    pointwise(_name, kind=TO_FLOAT)(_function)

for _name, _function in {
    "isnan": jnp.isnan,
    "isinf": jnp.isinf,
    "isfinite": jnp.isfinite,
    "signbit": jnp.signbit,
    "eq": jnp.equal,
    "ne": jnp.not_equal,
    "lt": jnp.less,
    "le": jnp.less_equal,
    "gt": jnp.greater,
    "ge": jnp.greater_equal,
    "logical_and": jnp.logical_and,
    "logical_not": jnp.logical_not,
    "logical_or": jnp.logical_or,
    "logical_xor": jnp.logical_xor,
}.items():
    pointwise(_name, kind=TO_BOOL)(_function)

for _name, _function in {
    "maximum": jnp.maximum,
    "minimum": jnp.minimum,
    "fmax": jnp.fmax,
    "fmin": jnp.fmin,
    "fmod": jnp.fmod,
    "gcd": jnp.gcd,
    "hypot": jnp.hypot,
    "lcm": jnp.lcm,
    "remainder": jnp.remainder,
    "floor_divide": jnp.floor_divide,
    "copysign": jnp.copysign,
    "nextafter": jnp.nextafter,
    "bitwise_and": jnp.bitwise_and,
    "bitwise_or": jnp.bitwise_or,
    "bitwise_xor": jnp.bitwise_xor,
    "bitwise_left_shift": jnp.left_shift,
    "bitwise_right_shift": jnp.right_shift,
    "logaddexp": jnp.logaddexp,
    "logaddexp2": jnp.logaddexp2,
}.items():
    pointwise(_name)(_function)

pointwise("mul", keeps_digits=True)(jnp.multiply)


@pointwise("relu")
def _relu(x: Any) -> Any:
    return jnp.maximum(x, jnp.zeros((), x.dtype))


@pointwise("round")
def _round(x: Any, decimals: int = 0) -> Any:
    return x if x.dtype.kind in "iub" else jnp.round(x, decimals)


@pointwise("add", keeps_digits=True)
def _add(x: Any, y: Any, alpha: Any = 1) -> Any:
    if x.dtype == jnp.bool_:
        return jnp.logical_or(x, jnp.logical_and(y, bool(alpha)))
    return x + _scale(y, alpha)


@pointwise("sub", keeps_digits=True)
def _sub(x: Any, y: Any, alpha: Any = 1) -> Any:
    return x - _scale(y, alpha)


@pointwise("rsub", keeps_digits=True)
def _rsub(x: Any, y: Any, alpha: Any = 1) -> Any:
    return y - _scale(x, alpha)


def _scale(x: Any, factor: Any) -> Any:
    return x if not is_array(factor) and factor == 1 else x * factor


@lowers("div", "true_divide")
def _div(call: Call, x: Any, y: Any, rounding_mode: str | None = None) -> Any:
    is_wide = rounding_mode is None and any(map(has_digits, call.types[:2]))
    dtype = compute_type(call.types[:2], TO_FLOAT if rounding_mode is None else DEFAULT, widens=is_wide)
    x, y = (v.astype(dtype) if is_array(v) else v for v in (x, y))
    if rounding_mode is None:
        return jnp.true_divide(x, y)
    if rounding_mode == "floor":
        return jnp.floor_divide(x, y)
    return lax.div(*jnp.broadcast_arrays(x, jnp.asarray(y, dtype))) if dtype.kind in "iu" else jnp.trunc(x / y)


@pointwise("pow")
def _pow(x: Any, exponent: Any) -> Any:
    if is_array(exponent):
        return jnp.power(jnp.asarray(x, exponent.dtype), exponent)
    if isinstance(exponent, float):
        if exponent == 0.5:
            return jnp.sqrt(x)
        if exponent == -0.5:
            return lax.rsqrt(x)
        if exponent.is_integer():
            exponent = int(exponent)
    return jnp.power(x, exponent)


@lowers("where")
def _where(call: Call, condition: Any, x: Any, y: Any) -> Any:
    return jnp.where(condition, *(jnp.asarray(v).astype(call.dtype) for v in (x, y)))


@lowers("masked_fill")
def _masked_fill(call: Call, x: Any, mask: Any, value: Any) -> Any:
    return jnp.where(mask, jnp.asarray(value).astype(call.dtype), x)


@pointwise("clamp")
def _clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    if min is not None:
        x = jnp.maximum(x, min)
    return x if max is None else jnp.minimum(x, max)


@pointwise("clamp_min")
def _clamp_min(x: Any, min: Any) -> Any:
    return jnp.maximum(x, min)


@pointwise("clamp_max")
def _clamp_max(x: Any, max: Any) -> Any:
    return jnp.minimum(x, max)


@pointwise("polygamma", kind=TO_FLOAT, widens=True)
def _polygamma(order: int, x: Any) -> Any:
    return _derivative_of_digamma(order, x)


def _derivative_of_digamma(order: int, x: Any) -> Any:
    """Of that order; below ½ by reflection, (−1)ⁿ ψ⁽ⁿ⁾(1 − x) − π dⁿ/dxⁿ cot(πx)."""
    if order == 0:
        return lax.digamma(x)
    is_low = x < 0.5
    value = jax.scipy.special.polygamma(order, jnp.where(is_low, 1 - x, x))
    cotangent = 1 / jnp.tan(math.pi * (x - jnp.round(x)))
    return jnp.where(is_low, (-1) ** order * value - math.pi * _derive_cotangent(order, cotangent), value)


@pointwise("polygamma_", kind=TO_FLOAT, widens=True)
def _polygamma_in_place(x: Any, order: int) -> Any:
    return _derivative_of_digamma(order, x)


def _derive_cotangent(order: int, cotangent: Any) -> Any:
    """The derivative of that order of cot(πx), a polynomial in cot(πx): c′ = −π (1 + c²)."""
    polynomial = np.polynomial.Polynomial([0.0, 1.0])
    for _ in range(order):
        polynomial = polynomial.deriv() * np.polynomial.Polynomial([-math.pi, 0.0, -math.pi])
    total = jnp.zeros_like(cotangent)
    for coefficient in reversed(polynomial.coef):
        total = total * cotangent + coefficient
    return total


@pointwise("addcmul", widens=True)
def _addcmul(x: Any, y: Any, z: Any, value: Any = 1) -> Any:
    return x + _scale(y * z, value)


@pointwise("addcdiv", widens=True)
def _addcdiv(x: Any, y: Any, z: Any, value: Any = 1) -> Any:
    return x + _scale(y, value) / z if not _is_one(value) else x + y / z


def _is_one(value: Any) -> bool:
    return not is_array(value) and value == 1


@pointwise("lerp", widens=True)
def _lerp(start: Any, end: Any, weight: Any) -> Any:
    """start + weight · (end − start); from the end where weight ≥ ½, like PyTorch's."""
    if not is_array(weight):
        span = end - start
        return start + weight * span if abs(weight) < 0.5 else end - span * (1 - weight)
    return jnp.where(jnp.abs(weight) < 0.5, start + weight * (end - start), end - (end - start) * (1 - weight))


@pointwise("gelu", widens=True)
def _gelu(x: Any, approximate: str = "none") -> Any:
    if approximate == "tanh":
        return 0.5 * x * (1 + jnp.tanh(_gelu_inner(x)))
    return 0.5 * x * (1 + lax.erf(x * math.sqrt(0.5)))


@pointwise("gelu_backward", widens=True)
def _gelu_backward(grad: Any, x: Any, approximate: str = "none") -> Any:
    if approximate == "tanh":
        tanh = jnp.tanh(_gelu_inner(x))
        slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x * x)
        return grad * (0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * slope)
    distribution = 0.5 * (1 + lax.erf(x * math.sqrt(0.5)))
    density = jnp.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))
    return grad * (distribution + x * density)


def _gelu_inner(x: Any) -> Any:
    return math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)


@pointwise("silu", widens=True)
def _silu(x: Any) -> Any:
    return x * jax.nn.sigmoid(x)


@pointwise("silu_backward", widens=True)
def _silu_backward(grad: Any, x: Any) -> Any:
    sigmoid = jax.nn.sigmoid(x)
    return grad * sigmoid * (1 + x * (1 - sigmoid))


@pointwise("elu", widens=True)
def _elu(x: Any, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Any:
    return jnp.where(x > 0, x * scale, jnp.expm1(jnp.minimum(x, 0) * input_scale) * (alpha * scale))


@pointwise("leaky_relu")
def _leaky_relu(x: Any, negative_slope: Any = 0.01) -> Any:
    return jnp.where(x > 0, x, x * negative_slope)


@pointwise("hardtanh")
def _hardtanh(x: Any, min_val: Any = -1, max_val: Any = 1) -> Any:
    return jnp.clip(x, min_val, max_val)


@pointwise("softplus", widens=True)
def _softplus(x: Any, beta: Any = 1, threshold: Any = 20) -> Any:
    return jnp.where(x * beta > threshold, x, jnp.log1p(jnp.exp(jnp.minimum(x * beta, threshold))) / beta)


@pointwise("threshold_backward")
def _threshold_backward(grad: Any, x: Any, threshold: Any) -> Any:
    return jnp.where(x <= threshold, jnp.zeros((), grad.dtype), grad)


@pointwise("hardshrink_backward", "softshrink_backward")
def _shrink_backward(grad: Any, x: Any, bound: Any) -> Any:
    return jnp.where((x >= -bound) & (x <= bound), jnp.zeros((), grad.dtype), grad)


@pointwise("sigmoid_backward")
def _sigmoid_backward(grad: Any, y: Any) -> Any:
    return grad * (1 - y) * y


@pointwise("tanh_backward")
def _tanh_backward(grad: Any, y: Any) -> Any:
    return grad * (1 - y * y)


@lowers("_to_copy", "to")
def _to_copy(call: Call, x: Any, **_: Any) -> Any:
    if x.dtype.kind in "fV" and call.dtype.kind in "iu" and np.dtype(x.dtype) != call.dtype:
        x = jnp.trunc(x)
    return x.real if x.dtype.kind == "c" and call.dtype.kind != "c" else x


@lowers("nan_to_num")
def _nan_to_num(call: Call, x: Any, nan: Any = None, posinf: Any = None, neginf: Any = None) -> Any:
    del call
    if x.dtype.kind in "iub":
        return x
    return jnp.nan_to_num(x, nan=0.0 if nan is None else nan, posinf=posinf, neginf=neginf)


@pointwise("complex", kind=TO_FLOAT)
def _complex(real: Any, imaginary: Any) -> Any:
    return lax.complex(*jnp.broadcast_arrays(real, imaginary))


@pointwise("polar", kind=TO_FLOAT)
def _polar(size: Any, angle: Any) -> Any:
    return lax.complex(*jnp.broadcast_arrays(size * jnp.cos(angle), size * jnp.sin(angle)))


@lowers("conj", "_conj", "conj_physical", "_conj_physical")
def _conj(call: Call, x: Any) -> Any:
    del call
    return jnp.conj(x)


@lowers("angle")
def _angle(call: Call, x: Any) -> Any:
    del call
    return jnp.angle(x)


@lowers("frexp")
def _frexp(call: Call, x: Any) -> Any:
    del call
    return jnp.frexp(x)
