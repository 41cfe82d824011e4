"""The compiled programs of collectives: each process gives its own part, one program runs on the mesh of the ranks.

Programs are cached by mesh, body, shape and type. Bodies are functions of the module, because a closure would be a new
key every time; lengths are rounded up (`round_up`), so that arrays of many lengths share programs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from shardwright.errors import CollectiveError, RankLostError
from shardwright.ranks import adasum, programs_cache, watch
from shardwright.ranks.operations import ReduceOp
from shardwright.ranks.process_sets import AXIS, ProcessSet

_Body = Callable[[Any], Any]


def round_up(length: int) -> int:
    """The next length with a program: eight lengths a power of two, at most an eighth of padding."""
    step = 1 << max(0, length.bit_length() - 4)
    return -(-length // step) * step


def power_of_two(length: int) -> int:
    """The next power of two; 1 for 0."""
    return 1 << max(0, length - 1).bit_length()


# ---- bodies ----------------------------------------------------------------------
def gather_all(part: Any) -> Any:
    """[1, n] of each rank → [ranks, n] at each."""
    return lax.all_gather(part, AXIS, tiled=True)


def sum_all(part: Any) -> Any:
    """The sum over ranks."""
    return lax.psum(part, AXIS)  # type: ignore[no-untyped-call]


def min_all(part: Any) -> Any:
    """The minimum over ranks; NaN where any is."""
    return _with_nan(part, lax.pmin(part, AXIS))  # type: ignore[no-untyped-call]


def max_all(part: Any) -> Any:
    """The maximum over ranks; NaN where any is."""
    return _with_nan(part, lax.pmax(part, AXIS))  # type: ignore[no-untyped-call]


def _with_nan(part: Any, extreme: Any) -> Any:
    if not jnp.issubdtype(part.dtype, jnp.floating):
        return extreme
    return jnp.where(lax.pmax(jnp.isnan(part).astype(jnp.uint8), AXIS) > 0, jnp.nan, extreme).astype(part.dtype)  # type: ignore[no-untyped-call]


def multiply_all(part: Any) -> Any:
    """The product over ranks, in the input's type."""
    return jnp.prod(lax.all_gather(part, AXIS), axis=0, dtype=part.dtype)


def adasum_all(part: Any) -> Any:
    """Adasum over ranks: in pairs where they are a power of two, else of everything gathered."""
    size = lax.axis_size(AXIS)
    value = part.astype(jnp.promote_types(part.dtype, jnp.float32))
    if size & (size - 1):
        return adasum.tree(list(lax.all_gather(value, AXIS)), _combine).astype(part.dtype)
    for pairs in adasum.pairs_of_rounds(size):
        value = _combine(*lax.all_gather(value, AXIS, axis_index_groups=pairs))
    return value.astype(part.dtype)


def _combine(first: Any, second: Any) -> Any:
    return adasum.combine(first, second, jnp.vdot, jnp.where)


def scatter_sum(part: Any) -> Any:
    """[1, ranks, n] of each rank → [1, n], its part of the sum."""
    return lax.psum_scatter(part[0], AXIS, scatter_dimension=0, tiled=True)  # type: ignore[no-untyped-call]


def exchange_blocks(part: Any) -> Any:
    """[1, ranks, n] of each rank, a block for each → [1, ranks, n], a block from each."""
    return lax.all_to_all(part[0], AXIS, 0, 0, tiled=True)[None]  # type: ignore[no-untyped-call]


REDUCE_BODIES: dict[ReduceOp, _Body] = {
    ReduceOp.SUM: sum_all,
    ReduceOp.AVERAGE: sum_all,  # divided afterwards, by the number of ranks that have data
    ReduceOp.MIN: min_all,
    ReduceOp.MAX: max_all,
    ReduceOp.PRODUCT: multiply_all,
    ReduceOp.ADASUM: adasum_all,
}


# ---- running ---------------------------------------------------------------------
@programs_cache.of_one_generation
@functools.cache
def _program(mesh: Mesh, body: _Body, replicated: bool) -> Any:
    out = PartitionSpec() if replicated else PartitionSpec(AXIS)  # type: ignore[no-untyped-call]
    mapped = jax.shard_map(body, mesh=mesh, in_specs=PartitionSpec(AXIS), out_specs=out, check_vma=False)  # type: ignore[no-untyped-call]
    return jax.jit(mapped)


def run(process_set: ProcessSet, body: _Body, part: Any, *, replicated: bool = False) -> jax.Array:
    """Start a body on `part` ([1, …], numpy or on this rank's device); this rank's part of what it returns.

    replicated: the body returns the same at every rank. 64-bit types stay what they are. Returns before it has run.
    Raises CollectiveError and RankLostError.
    """
    wide = np.dtype(part.dtype).itemsize >= 8
    with jax.enable_x64(True) if wide else contextlib.nullcontext():
        try:
            result: jax.Array = _program(process_set.mesh, body, replicated)(process_set.put(part))
            return result.addressable_data(0)
        except CollectiveError:
            raise
        except (RuntimeError, ValueError) as error:
            raise to_collective_error(error, process_set) from error


def fetch(result: jax.Array, process_set: ProcessSet) -> np.ndarray:
    """The result on the host, once it is there; no copy on CPUs. Raises CollectiveError and RankLostError."""
    try:
        return np.asarray(result)
    except (RuntimeError, ValueError) as error:
        raise to_collective_error(error, process_set) from error


def is_broken_collective(error: Exception) -> bool:
    """Whether an error of XLA comes from a library of collectives."""
    return any(library in str(error) for library in ("Gloo", "NCCL", "RCCL"))


def to_collective_error(error: Exception, process_set: ProcessSet) -> CollectiveError:
    """The meaning of a failure of XLA in a collective."""
    text = str(error).strip().split("\n")[0]
    if "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower():
        return CollectiveError(f"a collective needs more memory: {text}", where=repr(process_set))
    stall = watch.current().stall
    return RankLostError(
        f"a collective broke off: {text}" + (f"; before, {stall}" if stall else ""),
        where=repr(process_set),
        remedy="look at the other ranks' output: the first that failed is the cause",
    )
