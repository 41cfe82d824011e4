"""Products of matrices, and factorizations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardwright.client.frontends.torch.lowerings.registry import Call, is_array, lowers, widen


@lowers("_trilinear")
def _trilinear(
    call: Call, x: Any, y: Any, z: Any, new_x: Sequence[int], new_y: Sequence[int], new_z: Sequence[int],
    summed: Sequence[int], unroll_dim: int = 1,
) -> Any:  # fmt: skip
    """Σ x y z, each with new dimensions of size 1 at the places given, over dimensions."""
    del call, unroll_dim
    rank = x.ndim + len(new_x)
    operands: list[Any] = []
    for value, new in ((x, new_x), (y, new_y), (z, new_z)):
        operands += [value, [n for n in range(rank) if n not in new]]
    return jnp.einsum(*operands, [n for n in range(rank) if n not in summed])


@lowers("mm", "bmm", "mv", "dot", "matmul")
def _matmul(call: Call, x: Any, y: Any, *_: Any) -> Any:
    del call
    return jnp.matmul(x, y)


@lowers("linear")
def _linear(call: Call, x: Any, weight: Any, bias: Any = None) -> Any:
    del call
    y = lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())))
    return y if bias is None else y + bias


@lowers("_grouped_mm")
def _multiply_groups(call: Call, x: Any, y: Any, ends: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    """A product for each group: of rows of x, of columns of y, or of the dimension that both sum over; ends: theirs."""
    del call, bias, out_dtype
    if x.ndim == y.ndim == 3:
        return jnp.matmul(x, y)
    sizes = jnp.diff(ends, prepend=0).astype(jnp.int32)
    if y.ndim == 3:
        return lax.ragged_dot(x, y, sizes)
    if x.ndim == 3:
        return lax.ragged_dot(y.T, x.swapaxes(1, 2), sizes).T
    contracted = lax.RaggedDotDimensionNumbers(  # type: ignore[no-untyped-call]
        (((1,), (0,)), ((), ())), lhs_ragged_dimensions=[1], rhs_group_dimensions=[]
    )
    return lax.ragged_dot_general(x, y, sizes, contracted)


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


@lowers("cholesky")
def _cholesky_factor(call: Call, x: Any, upper: bool = False) -> Any:
    del call
    return jnp.linalg.cholesky(x, upper=upper)


@lowers("cholesky_solve")
def _cholesky_solve(call: Call, b: Any, factor: Any, upper: bool = False) -> Any:
    factor, b = _with_batch(factor, b)
    half = _solve_by(factor, b, lower=not upper, is_adjoint=upper)
    return _solve_by(factor, half, lower=not upper, is_adjoint=not upper).reshape(call.shape)


@lowers("cholesky_inverse")
def _cholesky_inverse(call: Call, factor: Any, upper: bool = False) -> Any:
    return _cholesky_solve(call, jnp.eye(factor.shape[-1], dtype=factor.dtype), factor, upper)


@lowers("triangular_solve")
def _triangular_solve(
    call: Call, b: Any, a: Any, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> Any:
    """(x of a x = b, a)."""
    del call
    wide, b = _with_batch(a, b)
    x = lax.linalg.triangular_solve(
        wide, b, left_side=True, lower=not upper, transpose_a=transpose, unit_diagonal=unitriangular
    )
    return x, jnp.broadcast_to(a, wide.shape)


def _with_batch(a: Any, b: Any) -> tuple[Any, Any]:
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return jnp.broadcast_to(a, batch + a.shape[-2:]), jnp.broadcast_to(b, batch + b.shape[-2:])


def _solve_by(factor: Any, b: Any, *, lower: bool, is_adjoint: bool, is_unit: bool = False) -> Any:
    return lax.linalg.triangular_solve(
        factor, b, left_side=True, lower=lower, transpose_a=is_adjoint, conjugate_a=is_adjoint, unit_diagonal=is_unit
    )


@lowers("linalg_lu_factor_ex")
def _lu_factor(call: Call, x: Any, *, pivot: bool = True, check_errors: bool = False) -> Any:
    del pivot, check_errors
    factors, pivots, _ = lax.linalg.lu(x)
    return factors, pivots + 1, jnp.zeros(tuple(call.result[2].shape), jnp.int32)


@lowers("linalg_lu")
def _lu(call: Call, x: Any, *, pivot: bool = True) -> Any:
    del call, pivot
    factors, _, permutation = lax.linalg.lu(x)
    return _unpack(factors, permutation)


@lowers("lu_unpack")
def _lu_unpack(call: Call, factors: Any, pivots: Any, unpack_data: bool = True, unpack_pivots: bool = True) -> Any:
    p, lower, upper = _unpack(factors, _permutation(pivots, factors.shape[-2]))
    empty = [jnp.zeros(tuple(result.shape), factors.dtype) for result in call.result]
    return p if unpack_pivots else empty[0], *((lower, upper) if unpack_data else empty[1:])


def _unpack(factors: Any, permutation: Any) -> tuple[Any, Any, Any]:
    """(P, L, U) with P L U the matrix."""
    rows, columns = factors.shape[-2:]
    size = min(rows, columns)
    lower = jnp.tril(factors[..., :, :size], -1) + jnp.eye(rows, size, dtype=factors.dtype)
    upper = jnp.triu(factors[..., :size, :])
    p = jax.nn.one_hot(permutation, rows, dtype=factors.dtype)
    return jnp.matrix_transpose(p), lower, upper


def _permutation(pivots: Any, rows: int) -> Any:
    """The order of rows behind exchanges, which PyTorch counts from 1."""
    return lax.linalg.lu_pivots_to_permutation(pivots - 1, rows)


@lowers("linalg_lu_solve")
def _lu_solve(call: Call, factors: Any, pivots: Any, b: Any, *, left: bool = True, adjoint: bool = False) -> Any:
    del call
    permutation = _permutation(pivots, factors.shape[-2])
    if left:
        return _solve_by_lu(factors, permutation, b, is_adjoint=adjoint)
    b = jnp.matrix_transpose(b).conj()
    return jnp.matrix_transpose(_solve_by_lu(factors, permutation, b, is_adjoint=not adjoint)).conj()


def _solve_by_lu(factors: Any, permutation: Any, b: Any, *, is_adjoint: bool) -> Any:
    """x of a x = b, or of aᴴ x = b."""
    factors, b = _with_batch(factors, b)
    permutation = jnp.broadcast_to(permutation, b.shape[:-1])[..., None]
    if not is_adjoint:
        half = _solve_by(
            factors, jnp.take_along_axis(b, permutation, axis=-2), lower=True, is_adjoint=False, is_unit=True
        )
        return _solve_by(factors, half, lower=False, is_adjoint=False)
    half = _solve_by(factors, b, lower=False, is_adjoint=True)
    x = _solve_by(factors, half, lower=True, is_adjoint=True, is_unit=True)
    return jnp.take_along_axis(x, jnp.argsort(permutation, axis=-2), axis=-2)


@lowers("_linalg_solve_ex")
def _solve(call: Call, a: Any, b: Any, *, left: bool = True, check_errors: bool = False) -> Any:
    """(x of a x = b or x a = b, LU, pivots, no errors)."""
    del check_errors
    factors, pivots, _ = lax.linalg.lu(a)
    is_vector = len(call.result[0].shape) == a.ndim - 1
    b = b[..., None] if is_vector else b
    x = _lu_solve(call, factors, pivots + 1, b, left=left)
    return x[..., 0] if is_vector else x, factors, pivots + 1, jnp.zeros(tuple(call.result[3].shape), jnp.int32)


@lowers("_linalg_det")
def _det(call: Call, x: Any) -> Any:
    """(determinant, LU, pivots)."""
    factors, pivots, _ = lax.linalg.lu(_as_factored(call, x))
    diagonal = jnp.diagonal(factors, axis1=-2, axis2=-1)
    return _parity(pivots, x.dtype) * jnp.prod(diagonal, axis=-1), factors, pivots + 1


@lowers("_linalg_slogdet")
def _slogdet(call: Call, x: Any) -> Any:
    """(sign, logarithm of the size, LU, pivots) of the determinant."""
    factors, pivots, _ = lax.linalg.lu(_as_factored(call, x))
    diagonal = jnp.diagonal(factors, axis1=-2, axis2=-1)
    sign = _parity(pivots, x.dtype) * jnp.prod(jnp.sign(diagonal), axis=-1)
    return sign, jnp.sum(jnp.log(jnp.abs(diagonal)), axis=-1), factors, pivots + 1


def _as_factored(call: Call, x: Any) -> Any:
    """What PyTorch factors for a determinant, and reads in its gradient: the transpose of a contiguous real matrix."""
    is_turned = call.types[0].is_contiguous() and x.dtype.kind != "c"
    return jnp.matrix_transpose(x) if is_turned else x


def _parity(pivots: Any, dtype: Any) -> Any:
    """1 for an even number of exchanged rows, else −1."""
    is_exchanged = pivots != jnp.arange(pivots.shape[-1], dtype=pivots.dtype)
    return (1 - 2 * (jnp.sum(is_exchanged, axis=-1) % 2)).astype(dtype)


@lowers("linalg_pinv")
def _pinv(call: Call, x: Any, *, atol: Any = None, rtol: Any = None, hermitian: bool = False) -> Any:
    """By singular values above the larger of both tolerances; of a Hermitian matrix the lower half is read."""
    del call
    if hermitian:
        values, vectors = jnp.linalg.eigh(x, UPLO="L", symmetrize_input=False)
        left, right = vectors, vectors
    else:
        left, values, adjoint = jnp.linalg.svd(x, full_matrices=False)
        right = jnp.matrix_transpose(adjoint).conj()
    sizes = jnp.abs(values)
    atol = jnp.zeros((), values.dtype) if atol is None else jnp.asarray(atol, values.dtype)
    if rtol is None:
        rtol = jnp.where(atol > 0, 0, max(x.shape[-2:]) * float(np.finfo(values.dtype).eps))
    largest = jnp.max(sizes, axis=-1, keepdims=True)
    is_kept = sizes > jnp.maximum(atol[..., None], jnp.asarray(rtol, values.dtype)[..., None] * largest)
    inverse = jnp.where(is_kept, 1 / jnp.where(is_kept, values, 1), 0)
    return jnp.matmul(right * inverse[..., None, :], jnp.matrix_transpose(left).conj())


@lowers("linalg_matrix_exp")
def _matrix_exp(call: Call, x: Any) -> Any:
    del call
    return jax.scipy.linalg.expm(widen(x))


@lowers("linalg_householder_product")
def _householder_product(call: Call, x: Any, scales: Any) -> Any:
    del call
    return lax.linalg.householder_product(x, scales)


@lowers("_cdist_forward")
def _cdist(call: Call, x: Any, y: Any, p: float, compute_mode: Any) -> Any:
    """Distances of all pairs of rows."""
    del call, compute_mode
    return _norm(x[..., :, None, :] - y[..., None, :, :], p)


@lowers("_pdist_forward")
def _pdist(call: Call, x: Any, p: float = 2) -> Any:
    """Distances of every two rows."""
    del call
    first, second = np.triu_indices(x.shape[0], 1)
    return _norm(x[first] - x[second], p)


def _norm(difference: Any, p: float) -> Any:
    size = jnp.abs(difference)
    if p == 0:
        return jnp.sum(size != 0, axis=-1)
    if p == float("inf"):
        return jnp.max(size, axis=-1)
    if p == 2:
        return jnp.sqrt(jnp.sum(size * size, axis=-1))
    return jnp.power(jnp.sum(jnp.power(size, p), axis=-1), 1 / p)


@lowers("_cdist_backward")
def _cdist_gradient(call: Call, grad: Any, x: Any, y: Any, p: float, distance: Any) -> Any:
    """Of `x`; rows that are equal have none."""
    del call
    return jnp.sum(_norm_gradient(grad, x[..., :, None, :] - y[..., None, :, :], p, distance), axis=-2)


@lowers("_pdist_backward")
def _pdist_gradient(call: Call, grad: Any, x: Any, p: float, distance: Any) -> Any:
    first, second = np.triu_indices(x.shape[0], 1)
    shares = _norm_gradient(grad, x[first] - x[second], p, distance)
    return jnp.zeros(call.shape, grad.dtype).at[first].add(shares).at[second].add(-shares)


def _norm_gradient(grad: Any, difference: Any, p: float, distance: Any) -> Any:
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
    return share * grad
