"""Values rounded to those that integers with a scale hold, and products of integers."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from shardwright.client.frontends.torch.lowerings.registry import Call, lowers


@lowers("fake_quantize_per_tensor_affine_cachemask")
def _of_tensor(call: Call, x: Any, scale: Any, zero_point: Any, least: int, most: int) -> Any:
    """(rounded values, which of them were inside)."""
    del call
    return _round(x, jnp.asarray(scale, jnp.float32), zero_point, least, most)


@lowers("_fake_quantize_per_tensor_affine_cachemask_tensor_qparams")
def _by_tensors(call: Call, x: Any, scale: Any, zero_point: Any, is_on: Any, least: int, most: int) -> Any:
    del call
    rounded, mask = _round(x, scale, zero_point, least, most)
    is_on = is_on.reshape(()) != 0
    return jnp.where(is_on, rounded, x), mask | ~is_on


@lowers("fake_quantize_per_channel_affine_cachemask")
def _of_channels(call: Call, x: Any, scale: Any, zero_point: Any, axis: int, least: int, most: int) -> Any:
    del call
    shape = [-1 if dim == axis % x.ndim else 1 for dim in range(x.ndim)]
    return _round(x, scale.reshape(shape), zero_point.reshape(shape), least, most)


def _round(x: Any, scale: Any, zero_point: Any, least: int, most: int) -> Any:
    codes = jnp.round(x.astype(jnp.float32) * (1 / scale)) + zero_point
    return (jnp.clip(codes, least, most) - zero_point) * scale, (codes >= least) & (codes <= most)


@lowers("_int_mm")
def _integer_product(call: Call, x: Any, y: Any) -> Any:
    del call
    return lax.dot(x, y, preferred_element_type=jnp.int32)
