"""Run as every rank, or by one process alone: integers of every width through every collective, to the last bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright import ranks
from shardwright.errors import CollectiveError

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
#: Elements that travel in the record, and in messages of their own.
LENGTHS = (6, 6000)
_REDUCE = {"sum": np.add, "min": np.minimum, "max": np.maximum, "product": np.multiply}


def rows_of(size: int, length: int, dtype: str) -> np.ndarray:
    """[ranks, length]: near both ends of the type, where doubles lose the last bit."""
    limits = np.iinfo(dtype)
    random = np.random.default_rng([size, length])
    rows = random.integers(limits.min, limits.max, (size, length), dtype, endpoint=True)
    rows[:, ::3] = limits.max // 2 + 1 + np.arange(size, dtype=dtype)[:, None] % 3
    return rows


def same(actual: object, expected: np.ndarray, what: object) -> None:
    array = np.asarray(actual)
    assert array.dtype == expected.dtype, (what, array.dtype)
    assert np.array_equal(array, expected), (what, array, expected)


def my_rows(whole: np.ndarray, rank: int, size: int) -> np.ndarray:
    starts = [place * (len(whole) // size) + min(place, len(whole) % size) for place in range(size + 1)]
    return whole[starts[rank] : starts[rank + 1]]


def check_reductions(rank: int, size: int) -> None:
    for length in LENGTHS:
        for dtype in INTEGERS:
            rows = rows_of(size, length, dtype)
            for op, ufunc in _REDUCE.items():
                whole = ufunc.reduce(rows, axis=0, dtype=rows.dtype)
                same(ranks.allreduce(rows[rank], op), whole, ("allreduce", op, dtype, length))
                same(ranks.reducescatter(rows[rank], op), my_rows(whole, rank, size), ("scatter", op, dtype, length))
            for call in (ranks.allreduce, ranks.reducescatter):
                with pytest.raises(CollectiveError, match=f"average of {dtype}"):
                    call(rows[rank])
                with pytest.raises(CollectiveError, match="would round"):
                    call(rows[rank], "sum", prescale_factor=0.5)


def check_groups(rank: int, size: int) -> None:
    rows = [rows_of(size, 3000, dtype) for dtype in INTEGERS]
    for call in (ranks.grouped_allreduce, ranks.grouped_reducescatter):
        for array, found in zip(rows, call([array[rank] for array in rows], "sum"), strict=True):
            whole = array.sum(axis=0, dtype=array.dtype)
            same(found, whole if call is ranks.grouped_allreduce else my_rows(whole, rank, size), array.dtype)


def check_moves(rank: int, size: int) -> None:
    for length in LENGTHS:
        for dtype in (*INTEGERS, "bool"):
            rows = rows_of(size, length, "int64").astype(dtype)
            same(ranks.allgather(rows[rank]), rows.reshape(-1), ("gather", dtype))
            same(ranks.broadcast(rows[rank], size - 1), rows[-1], ("broadcast", dtype))
            splits = [length // size] * size
            wanted = rows[:, : sum(splits)].reshape(size, size, -1)[:, rank].reshape(-1)
            found, _ = ranks.alltoall(rows[rank, : sum(splits)], splits)
            same(found, wanted, ("alltoall", dtype))


def check_kinds(rank: int, size: int) -> None:
    """JAX's arrays and Python's integers keep 64 bits though jax_enable_x64 is off."""
    big = 2**62 + 1
    with jax.enable_x64(True):
        array = jnp.full(5000, big if rank == 0 else 0)
    for call in (ranks.allreduce, ranks.reducescatter):
        found = call(array, "sum")
        assert isinstance(found, jax.Array)
        assert found.dtype == np.int64
        assert np.all(np.asarray(found) == big)
    assert ranks.allreduce(big if rank == 0 else 0, "sum") == big
    assert ranks.allreduce([big if rank == 0 else 0, np.zeros(5000)], "sum")[0] == big
    assert ranks.allreduce([-3, np.zeros(5000)], "product")[0] == (-3) ** size
    if size > 1:
        for rest in ([], [np.zeros(5000, np.int64)]):
            with pytest.raises(CollectiveError, match="64 bits"):
                ranks.allreduce([2**62, *rest], "sum")


def check_jit(rank: int, size: int) -> None:
    @ranks.jit
    def compute(arrays):
        return {
            dtype: (
                [ranks.allreduce(x, op) for op in _REDUCE],
                [ranks.reducescatter(x, op) for op in _REDUCE],
                (ranks.allgather(x), ranks.broadcast(x, 0), ranks.alltoall(x)),
            )
            for dtype, x in arrays.items()
        }

    rows_by_type = {dtype: rows_of(size, 6, dtype) for dtype in INTEGERS}
    with jax.enable_x64(True):
        found = compute({dtype: rows[rank] for dtype, rows in rows_by_type.items()})
    for dtype, rows in rows_by_type.items():
        reduced, scattered, moved = found[dtype]
        for at, (op, ufunc) in enumerate(_REDUCE.items()):
            whole = ufunc.reduce(rows, axis=0, dtype=rows.dtype)
            same(reduced[at], whole, ("jit", op, dtype))
            same(scattered[at], my_rows(whole, rank, size), ("jit scatter", op, dtype))
        blocks = rows.reshape(size, size, -1)[:, rank].reshape(-1)
        for array, wanted in zip(moved, (rows.reshape(-1), rows[0], blocks), strict=True):
            same(array, wanted, ("jit", dtype))


CHECKS = [check_reductions, check_groups, check_moves, check_kinds, check_jit]


def main() -> None:
    ranks.init(timeout_s=60)
    for check in CHECKS:
        check(ranks.rank(), ranks.size())
        print("ok", check.__name__, flush=True)
    ranks.shutdown()


if __name__ == "__main__":
    main()
