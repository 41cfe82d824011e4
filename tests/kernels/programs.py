"""Kernels in Pallas: a product and attention, for CUDA by Triton, or interpreted."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import sqrt
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

import shardwright as sw

TRITON = {"compiler_params": triton.CompilerParams(num_warps=4, num_stages=2)}
INTERPRETED = {"interpret": True}


def _product(x: Any, y: Any, out: Any) -> None:
    out[...] = jnp.dot(x[...], y[...], preferred_element_type=jnp.float32).astype(out.dtype)


def multiply_whole(x: Any, y: Any, *, block: int = 16, **how: Any) -> Any:
    """[rows, inner] times [inner, columns], by blocks of rows and columns that have to divide them."""
    (rows, inner), columns = x.shape, y.shape[1]
    size = x.dtype.itemsize * (rows * inner + inner * columns + rows * columns)
    return pl.pallas_call(
        _product,
        out_shape=jax.ShapeDtypeStruct((rows, columns), x.dtype),
        grid=(rows // block, columns // block),
        in_specs=[pl.BlockSpec((block, inner), lambda i, j: (i, 0)), pl.BlockSpec((inner, block), lambda i, j: (0, j))],
        out_specs=pl.BlockSpec((block, block), lambda i, j: (i, j)),
        cost_estimate=pl.CostEstimate(flops=2 * rows * inner * columns, transcendentals=0, bytes_accessed=size),
        **how,
    )(x, y)


def multiplication(parts: tuple[int, ...] = (), **how: Any) -> Callable[..., Any]:
    """A product with a gradient: three kernels, each split by the rule."""
    kernel = sw.partition(partial(multiply_whole, **how), "i k, k j -> i j", reduction="k", parts=parts)

    @jax.custom_vjp
    def multiply(x: Any, y: Any) -> Any:
        return kernel(x, y)

    multiply.defvjp(
        lambda x, y: (kernel(x, y), (x, y)), lambda saved, g: (kernel(g, saved[1].T), kernel(saved[0].T, g))
    )
    return multiply


def _dot(a: Any, b: Any) -> Any:
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def _weights(q: Any, k: Any) -> Any:
    scores = _dot(q, k.T) / sqrt(q.shape[-1])
    powers = jnp.exp(scores - scores.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def _attend(q: Any, k: Any, v: Any, out: Any) -> None:
    out[...] = _dot(_weights(q[...], k[...]).astype(v.dtype), v[...]).astype(out.dtype)


def _attend_back(q: Any, k: Any, v: Any, g: Any, dq: Any, dk: Any, dv: Any) -> None:
    weights = _weights(q[...], k[...])
    of_weights = _dot(g[...], v[...].T)
    of_scores = weights * (of_weights - (weights * of_weights).sum(1, keepdims=True)) / sqrt(q.shape[-1])
    of_scores = of_scores.astype(q.dtype)
    dq[...] = _dot(of_scores, k[...]).astype(dq.dtype)
    dk[...] = _dot(of_scores.T, q[...]).astype(dk.dtype)
    dv[...] = _dot(weights.astype(v.dtype).T, g[...]).astype(dv.dtype)


def _over_heads(
    kernel: Any, arrays: tuple[Any, ...], results: int, *, block: int = 0, products: int, **how: Any
) -> Any:
    """A kernel for each sequence and head of [batch, heads, length, width], and each block of rows if there is one."""
    (batch, heads, length, width), keys = arrays[0].shape, arrays[1].shape[2]
    rows = block or length
    mine = pl.BlockSpec((None, None, rows, width), lambda b, h, i: (b, h, i, 0))
    all_keys = pl.BlockSpec((None, None, keys, width), lambda b, h, i: (b, h, 0, 0))
    shape = jax.ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype)
    scores = batch * heads * length * keys
    size = sum(array.size for array in (*arrays, *([shape] * results))) * arrays[0].dtype.itemsize
    return pl.pallas_call(
        kernel,
        out_shape=[shape] * results,
        grid=(batch, heads, length // rows),
        in_specs=[mine, *([all_keys] * (len(arrays) - 1))],
        out_specs=[mine] * results,
        cost_estimate=pl.CostEstimate(flops=2 * products * scores * width, transcendentals=scores, bytes_accessed=size),
        **how,
    )(*arrays)


def attend_whole(q: Any, k: Any, v: Any, *, block: int = 16, **how: Any) -> Any:
    return _over_heads(_attend, (q, k, v), 1, block=block, products=2, **how)[0]


def attend_back_whole(q: Any, k: Any, v: Any, g: Any, **how: Any) -> Any:
    return tuple(_over_heads(_attend_back, (q, k, v, g), 3, products=5, **how))


def attention(parts: tuple[int, ...] = (), **how: Any) -> Callable[..., Any]:
    """Attention with a gradient: two kernels, split along batch and heads, forward along rows too."""
    rule, back = "b h t d, b h s d, b h s d -> b h t d", ", ".join(["b h t d"] * 4) + " -> b h t d, b h t d, b h t d"
    forward = sw.partition(partial(attend_whole, **how), rule, need_replication=("s", "d"), parts=parts)
    backward = sw.partition(partial(attend_back_whole, **how), back, need_replication=("t", "d"), parts=parts)

    @jax.custom_vjp
    def attend(q: Any, k: Any, v: Any) -> Any:
        return forward(q, k, v)

    attend.defvjp(lambda q, k, v: (forward(q, k, v), (q, k, v)), lambda saved, g: backward(*saved, g))
    return attend
