"""Products of matrices, and factorizations."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardwright.client.frontends.torch.lowerings.registry import Call, is_array, lowers


@lowers("mm", "bmm", "mv", "dot", "matmul")
def _matmul(call: Call, x: Any, y: Any, *_: Any) -> Any:
    del call
    return jnp.matmul(x, y)


@lowers("linear")
def _linear(call: Call, x: Any, weight: Any, bias: Any = None) -> Any:
    del call
    y = lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())))
    return y if bias is None else y + bias


@lowers("addmm", "baddbmm", "addmv")
def _addmm(call: Call, bias: Any, x: Any, y: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """beta · bias + alpha · x y; a bias times 0 does not count, whatever it holds."""
    del call
    product = _scale(jnp.matmul(x, y), alpha)
    return product if not is_array(beta) and beta == 0 else product + _scale(bias, beta)


@lowers("addbmm")
def _addbmm(call: Call, bias: Any, x: Any, y: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """beta · bias + alpha · Σ x y, over the batch."""
    del call
    product = _scale(jnp.einsum("bij,bjk->ik", x, y), alpha)
    return product if not is_array(beta) and beta == 0 else product + _scale(bias, beta)


def _scale(x: Any, factor: Any) -> Any:
    return x if not is_array(factor) and factor == 1 else x * jnp.asarray(factor).astype(x.dtype)


@lowers("linalg_cholesky_ex")
def _cholesky(call: Call, x: Any, *, upper: bool = False, check_errors: bool = False) -> Any:
    del check_errors
    lower = jnp.linalg.cholesky(x)
    return (jnp.matrix_transpose(lower).conj() if upper else lower), _no_errors(call)


@lowers("linalg_inv_ex")
def _inverse(call: Call, x: Any, *, check_errors: bool = False) -> Any:
    del check_errors
    return jnp.linalg.inv(x), _no_errors(call)


@lowers("linalg_solve_triangular")
def _solve_triangular(
    call: Call, a: Any, b: Any, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Any:
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (jnp.broadcast_to(matrix, batch + matrix.shape[-2:]) for matrix in (a, b))
    del call
    return lax.linalg.triangular_solve(a, b, left_side=left, lower=not upper, unit_diagonal=unitriangular)


@lowers("linalg_qr")
def _qr(call: Call, x: Any, mode: str = "reduced") -> Any:
    del call
    if mode == "r":
        return jnp.zeros((0,), x.dtype), jnp.linalg.qr(x, mode="r")
    return tuple(jnp.linalg.qr(x, mode=mode))


@lowers("_linalg_eigh")
def _eigh(call: Call, x: Any, UPLO: str = "L", compute_v: bool = True) -> Any:
    del compute_v
    values, vectors = jnp.linalg.eigh(x, UPLO=UPLO, symmetrize_input=False)
    return values, vectors.reshape(tuple(call.result[1].shape)) if call.result[1].numel() else vectors[..., :0, :0]


@lowers("_linalg_svd")
def _svd(call: Call, x: Any, full_matrices: bool = False, compute_uv: bool = True, *, driver: Any = None) -> Any:
    del driver
    if not compute_uv:
        empty = [jnp.zeros(tuple(result.shape), x.dtype) for result in call.result]
        return empty[0], jnp.linalg.svd(x, compute_uv=False), empty[2]
    return tuple(jnp.linalg.svd(x, full_matrices=full_matrices))


def _no_errors(call: Call) -> jax.Array:
    return jnp.zeros(tuple(call.result[1].shape), jnp.int32)


@lowers("_cdist_forward")
def _cdist(call: Call, x: Any, y: Any, p: float, compute_mode: Any) -> Any:
    """Distances of all pairs of rows."""
    del call, compute_mode
    difference = jnp.abs(x[..., :, None, :] - y[..., None, :, :])
    if p == 0:
        return jnp.sum(difference != 0, axis=-1)
    if p == float("inf"):
        return jnp.max(difference, axis=-1)
    if p == 2:
        return jnp.sqrt(jnp.sum(difference * difference, axis=-1))
    return jnp.power(jnp.sum(jnp.power(difference, p), axis=-1), 1 / p)


@lowers("_cdist_backward")
def _cdist_gradient(call: Call, grad: Any, x: Any, y: Any, p: float, distance: Any) -> Any:
    """Of `x`; rows that are equal have none."""
    del call
    difference = x[..., :, None, :] - y[..., None, :, :]
    size, distance, grad = jnp.abs(difference), distance[..., None], grad[..., None]
    if p == 0:
        share = jnp.zeros_like(difference)
    elif p == 1:
        share = jnp.sign(difference)
    elif p == float("inf"):
        share = jnp.where(size == distance, jnp.sign(difference), 0)
    else:
        ratio = jnp.where(distance == 0, 0, size / jnp.where(distance == 0, 1, distance))
        share = jnp.sign(difference) * jnp.where(ratio == 0, 0, jnp.power(jnp.where(ratio == 0, 1, ratio), p - 1))
    return jnp.sum(share * grad, axis=-2)
