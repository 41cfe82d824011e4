"""Convolutions and their gradients, in one to three dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardwright.client.frontends.torch.lowerings.registry import Call, lowers


@lowers("convolution", "_convolution")
def _convolution(
    call: Call, x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: int, *_: Any,
) -> Any:  # fmt: skip
    """x: [batch, channels, space…], or without a batch."""
    del call
    is_single = x.ndim == weight.ndim - 1
    y = convolve(x[None] if is_single else x, weight, stride, padding, dilation, transposed, output_padding, groups)
    if bias is not None:
        y = y + bias.reshape(-1, *([1] * (y.ndim - 2)))
    return y[0] if is_single else y


@lowers("convolution_backward")
def _convolution_backward(
    call: Call, grad: Any, x: Any, weight: Any, bias_sizes: Any, stride: Any, padding: Any, dilation: Any,
    transposed: bool, output_padding: Any, groups: int, mask: Sequence[bool],
) -> Any:  # fmt: skip
    """Gradients of input, weight and bias, of those that are wanted."""
    del call, bias_sizes
    is_single = x.ndim == weight.ndim - 1
    grad, x = (grad[None], x[None]) if is_single else (grad, x)
    arguments = (stride, padding, dilation, transposed, output_padding, groups)
    of_x = jax.vjp(lambda x: convolve(x, weight, *arguments), x)[1](grad)[0] if mask[0] else None
    of_weight = jax.vjp(lambda weight: convolve(x, weight, *arguments), weight)[1](grad)[0] if mask[1] else None
    of_bias = jnp.sum(grad, axis=[d for d in range(grad.ndim) if d != 1]) if mask[2] else None
    return of_x[0] if is_single and of_x is not None else of_x, of_weight, of_bias


def convolve(
    x: Any, weight: Any, stride: Any, padding: Any, dilation: Any, transposed: bool, output_padding: Any, groups: int
) -> Any:
    """A convolution of [batch, channels, space…] with [out, in / groups, space…]; transposed: [in, out / groups, …]."""
    rank = x.ndim - 2
    stride, padding, dilation, output_padding = (
        _per_dimension(option, rank) for option in (stride, padding, dilation, output_padding)
    )
    space = "DHW"[3 - rank :]
    numbers = ("NC" + space, "OI" + space, "NC" + space)
    if not transposed:
        return lax.conv_general_dilated(
            x, weight, stride, [(p, p) for p in padding], rhs_dilation=dilation, dimension_numbers=numbers,
            feature_group_count=groups,
        )  # fmt: skip
    reach = [d * (size - 1) for d, size in zip(dilation, weight.shape[2:], strict=True)]
    pads = [(r - p, r - p + o) for r, p, o in zip(reach, padding, output_padding, strict=True)]
    flipped = jnp.flip(weight, tuple(range(2, weight.ndim)))
    inputs, outputs = weight.shape[:2]
    grouped = flipped.reshape(groups, inputs // groups, outputs, *weight.shape[2:])
    kernel = jnp.swapaxes(grouped, 1, 2).reshape(groups * outputs, inputs // groups, *weight.shape[2:])
    return lax.conv_general_dilated(
        x, kernel, [1] * rank, pads, lhs_dilation=stride, rhs_dilation=dilation, dimension_numbers=numbers,
        feature_group_count=groups,
    )  # fmt: skip


def _per_dimension(values: Any, rank: int) -> list[int]:
    values = [values] if isinstance(values, int) else list(values)
    return [int(value) for value in (values * rank if len(values) == 1 else values)]
