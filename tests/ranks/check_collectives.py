"""Run as every rank: each collective, operation and type against numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import shardwright as sw
from shardwright import ranks
from shardwright.errors import CollectiveError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FLOATS = ("float16", BFLOAT16, "float32", "float64")
COMPLEX = ("complex64", "complex128")
#: Elements in the record, in one message, and not a power of two.
LENGTHS = (3, 4099)


def values(rank: int, shape: tuple[int, ...], dtype: object) -> np.ndarray:
    dtype = np.dtype(dtype)
    random = np.random.default_rng([rank, *shape])
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return random.integers(limits.min, limits.max, shape, dtype, endpoint=True)
    if dtype == np.dtype(bool):
        return random.integers(0, 2, shape).astype(bool)
    real = random.uniform(-2, 2, shape)
    return (real + 1j * random.uniform(-2, 2, shape) if dtype.kind == "c" else real).astype(dtype)


def expected(op: str, rows: np.ndarray) -> np.ndarray:
    kind = rows.dtype.kind
    if op in ("min", "max"):
        return (np.minimum if op == "min" else np.maximum).reduce(rows, axis=0)
    wide = rows if kind in "iu" else rows.astype("complex128" if kind == "c" else "float64")
    with np.errstate(over="ignore"):
        total = (np.multiply if op == "product" else np.add).reduce(wide, axis=0, dtype=wide.dtype)
    return total / len(rows) if op == "average" else total


def same(actual: object, expected: np.ndarray, dtype: object, what: object) -> None:
    actual = np.asarray(actual)
    dtype = np.dtype(dtype)
    assert actual.dtype == dtype, (what, actual.dtype)
    assert actual.shape == expected.shape, (what, actual.shape, expected.shape)
    if dtype.kind in "iub":
        assert np.array_equal(actual, expected), (what, actual, expected)
    else:
        tolerance = {2: 3e-2, 4: 1e-5}.get(dtype.itemsize if dtype.kind != "c" else dtype.itemsize // 2, 1e-13)
        wide = "complex128" if dtype.kind == "c" else "float64"
        assert np.allclose(actual.astype(wide), expected.astype(wide), rtol=tolerance, atol=tolerance), (
            what,
            actual,
            expected,
        )


def refused(call: object, pattern: str) -> None:
    with pytest.raises(CollectiveError) as caught:
        call()  # type: ignore[operator]
    assert pattern in str(caught.value), caught.value


def check_allreduce(rank: int, size: int) -> None:
    for length in LENGTHS:
        for dtype in (*INTEGERS, *FLOATS, *COMPLEX, "bool"):
            kind = np.dtype(dtype).kind if np.dtype(dtype) != BFLOAT16 else "f"
            allowed = {"b": ("min", "max"), "c": ("sum", "average", "product")}.get(
                kind, ("sum", "min", "max", "product", *(("average",) if kind == "f" else ()))
            )
            rows = np.stack([values(place, (length,), dtype) for place in range(size)])
            for op in ("sum", "average", "min", "max", "product"):
                call = lambda rows=rows, op=op: ranks.allreduce(rows[rank], op)  # noqa: E731
                if op in allowed:
                    same(call(), expected(op, rows), dtype, (op, dtype, length))
                else:
                    refused(call, str(np.dtype(dtype)))


def check_kinds(rank: int, size: int) -> None:
    total = sum(range(size))
    for array in (np.float32(rank), jnp.float32(rank), np.full((2, 0, 3), rank, "f"), jnp.full((7, 900), rank)):
        found = ranks.allreduce(array, "sum")
        assert isinstance(found, jax.Array if isinstance(array, jax.Array) else type(array)), type(found)
        assert found.shape == array.shape
        assert np.all(np.asarray(found) == total)
    assert ranks.allreduce(rank, "sum") == total
    assert type(ranks.allreduce(rank, "sum")) is int
    assert ranks.allreduce(float(rank)) == total / size
    big = 2**62 + 1
    assert ranks.allreduce(big if rank == 0 else 0, "sum") == big
    swapped = ranks.allreduce(np.full(3, rank, ">f8"), "sum")
    assert swapped.dtype == np.dtype(">f8")
    assert swapped[0] == total
    result = ranks.allreduce(np.ones(5000, "f"))
    result += 1  # results can be written to
    tree = {"a": [np.float32([rank]), np.int32([rank, 1])], "b": (jnp.ones((40, 40)) * rank, None)}
    found = ranks.allreduce(tree, "sum", name="tree")
    assert found["a"][1].tolist() == [total, size]
    assert found["b"][1] is None
    assert np.all(np.asarray(found["b"][0]) == total)
    fused = ranks.grouped_allreduce([np.full(1024, rank + at, "f") for at in range(100)], "sum")
    assert all(np.all(array == total + size * at) for at, array in enumerate(fused))
    pieces = np.full((5 << 20) + 3, rank, "f")
    assert np.all(ranks.allreduce(pieces, "sum") == total)
    nan = ranks.allreduce(np.float32([np.nan if rank == 0 else 1] * 2000), "max")
    assert np.isnan(nan).all()
    scaled = ranks.allreduce(np.ones(3000, "f"), "sum", prescale_factor=0.5, postscale_factor=4.0)
    assert np.all(scaled == 2.0 * size)
    refused(lambda: ranks.allreduce(np.int32([1]), "sum", prescale_factor=0.5), "would round")
    half = ranks.allreduce(np.full(4000, 1.001, "f"), compression=ranks.Compression.fp16)
    assert half.dtype == np.float32
    assert np.allclose(half, 1.001, atol=1e-3)
    refused(lambda: ranks.allreduce(object()), "is no array")


def adasum(rows: list[np.ndarray]) -> np.ndarray:
    """The formula, over ranks that are a power of two."""
    if len(rows) == 1:
        return rows[0]
    a, b = adasum(rows[: len(rows) // 2]), adasum(rows[len(rows) // 2 :])
    return (1 - a @ b / (2 * a @ a)) * a + (1 - a @ b / (2 * b @ b)) * b


def check_adasum(rank: int, size: int) -> None:
    for length in LENGTHS:
        rows = [values(place, (length,), "float64") for place in range(size)]
        same(ranks.allreduce(rows[rank], "adasum"), adasum(rows), "float64", "adasum")
    assert np.allclose(ranks.allreduce([np.ones(3000, "f"), np.zeros(3, "f")], "adasum")[0], 1)


def check_moves(rank: int, size: int) -> None:
    for scale in (1, 3000):
        for dtype in (*INTEGERS, *FLOATS, *COMPLEX, "bool", "datetime64[s]", "S3"):
            parts = [
                np.arange((place + 1) * scale * 2).reshape(-1, 2).astype("i8").astype(dtype) for place in range(size)
            ]
            gathered = ranks.allgather(parts[rank])
            assert gathered.dtype == np.dtype(dtype)
            assert np.array_equal(gathered, np.concatenate(parts))
            sent = ranks.broadcast(parts[size - 1] if rank == size - 1 else np.zeros_like(parts[size - 1]), size - 1)
            assert np.array_equal(sent, parts[size - 1])
            assert sent.dtype == np.dtype(dtype)
    empty = ranks.allgather(np.zeros((0 if rank == 0 else 2, 3), "f"))
    assert empty.shape == (2 * (size - 1), 3)
    assert ranks.allgather(rank) == list(range(size))
    odd = np.array([-0.0, np.nan, rank], "f")
    found = ranks.broadcast(odd, 0)
    assert np.signbit(found[0])
    assert np.isnan(found[1])
    assert found[2] == 0
    key = ranks.broadcast(jax.random.key(rank), 0)
    assert jnp.array_equal(jax.random.key_data(key), jax.random.key_data(jax.random.key(0)))
    for width in (1, 2000):
        splits = [[(source + target) % 3 for target in range(size)] for source in range(size)]
        send = np.concatenate([np.full((splits[rank][to], width), 10 * rank + to, "f8") for to in range(size)])
        received, counts = ranks.alltoall(send, splits[rank])
        assert counts.tolist() == [splits[source][rank] for source in range(size)]
        wanted = [np.full((splits[source][rank], width), 10 * source + rank, "f8") for source in range(size)]
        assert np.array_equal(received, np.concatenate(wanted))
        assert received.dtype == np.float64
    assert ranks.alltoall(np.arange(size) + 10 * rank).tolist() == [10 * source + rank for source in range(size)]


def check_reducescatter(rank: int, size: int) -> None:
    for rows, width in ((2 * size + 1, 3), (2 * size, 2), (1, 2), (4 * size + 3, 700)):
        for dtype, op in (("float32", "average"), ("int64", "sum"), ("float64", "sum"), ("int32", "max")):
            arrays = [values(place, (rows, width), dtype) // 4 for place in range(size)]
            whole = expected(op, np.stack(arrays))
            starts = [place * (rows // size) + min(place, rows % size) for place in range(size + 1)]
            same(
                ranks.reducescatter(arrays[rank], op), whole[starts[rank] : starts[rank + 1]], dtype, ("rs", dtype, op)
            )
    two = ranks.grouped_reducescatter([np.ones((size, 3000), "f"), np.full((size + 1, 5), 2, "f")], "sum")
    assert np.all(two[0] == size)
    assert np.all(two[1] == 2 * size)
    assert len(two[1]) == (2 if rank == 0 else 1)


def check_process_sets(rank: int, size: int) -> None:
    even, odd = ranks.ProcessSet(range(0, size, 2)), ranks.ProcessSet(range(1, size, 2))
    mine, other = (odd, even) if rank % 2 else (even, odd)
    for count in (1, 5000):
        total = ranks.allreduce(np.full(count, rank, "f"), "sum", process_set=mine)
        assert np.all(total == sum(mine.ranks))
    if rank % 2:
        assert ranks.broadcast(np.float32(rank), odd.ranks[-1], process_set=odd) == odd.ranks[-1]
    refused(lambda: ranks.barrier(other), "is not in")
    assert (mine.rank(), mine.size(), other.included()) == (rank // 2, len(mine.ranks), False)


def check_background(rank: int, size: int) -> None:
    handles = [ranks.allreduce_async(np.full(3000 * at + 1, rank, "f"), "sum", name=f"g{at}") for at in range(5)]
    gathered = ranks.allgather(np.int32([rank]))  # waits for those before it
    assert all(ranks.poll(handle) for handle in handles)
    assert gathered.tolist() == list(range(size))
    assert all(ranks.synchronize(handle)[0] == sum(range(size)) for handle in handles)
    failing = ranks.allreduce_async(np.ones(rank + 1, "f"))
    refused(lambda: ranks.synchronize(failing), "disagree")


def check_differences(rank: int, size: int) -> None:
    ranks.allreduce(np.ones(3, "f"), name="known")
    last = rank == size - 1
    refused(lambda: ranks.allreduce(np.ones(4 if last else 3, "f"), name="known"), f"rank {size - 1}: allreduce")
    refused(lambda: ranks.allreduce(np.ones(9000, "f" if last else "i4"), "sum"), "float32[9000]")
    refused(lambda: ranks.allreduce(np.ones(3, "f"), "sum" if last else "max"), "allreduce max")
    refused(lambda: ranks.barrier() if last else ranks.allgather(np.ones(3)), "barrier")
    refused(lambda: ranks.allreduce(np.ones(3) if not last else "text"), "is no array")
    refused(lambda: ranks.broadcast_object(object(), 0), "object" if rank == 0 else "failed")
    assert ranks.allreduce(1, "sum") == size  # the job goes on


def check_objects(rank: int, size: int) -> None:
    everyone = ranks.allgather_object({"rank": rank, "a": (np.arange(rank * 900), "é"), 3: None})
    assert [entry["rank"] for entry in everyone] == list(range(size))
    assert [len(entry["a"][0]) for entry in everyone] == [place * 900 for place in range(size)]
    sent = ranks.broadcast_object({"lr": 0.1, "steps": [1, 2]} if rank == size - 1 else None, size - 1)
    assert sent == {"lr": 0.1, "steps": [1, 2]}


def check_join(rank: int, size: int) -> None:
    for width in (1, 4000):
        seen = []
        for step in ranks.joined(range(3 + rank)):
            average = ranks.allreduce(np.full(width, 10 * rank + step, "f"), name="gradient")
            extreme = ranks.allreduce(np.full(width, -1 - rank, "i4"), "max")
            rows = ranks.allgather(np.full((1, width), rank, "f"))
            seen.append((float(average[-1]), int(extreme[0]), len(rows)))
        active = [[place for place in range(size) if step < 3 + place] for step in range(3 + rank)]
        wanted = [
            (np.mean([10 * place + step for place in places]), -1 - places[0], len(places))
            for step, places in enumerate(active)
        ]
        assert np.allclose(seen, wanted), (seen, wanted)
    assert ranks.join() == size - 1
    if rank == 0:
        refused(ranks.join, "has joined")
    else:
        refused(lambda: ranks.broadcast(np.ones(2), 0), "has joined")


def check_jit(rank: int, size: int) -> None:
    @ranks.jit
    def compute(x, scalar):
        return {"sum": ranks.allreduce(x, "sum"), "scalar": ranks.allreduce(scalar), "all": ranks.allgather(x),
                "root": ranks.broadcast(x * 2, 1), "rows": ranks.reducescatter(jnp.ones((size, 2)), "sum"),
                "to": ranks.alltoall(jnp.arange(size) + 10 * rank)}  # fmt: skip

    x = np.full((2, 3), rank, "f")
    found = jax.device_get(compute(x, float(rank)))
    assert np.all(found["sum"] == sum(range(size)))
    assert found["scalar"] == np.mean(range(size))
    assert found["all"].shape == (2 * size, 3)
    assert np.all(found["root"] == 2)
    assert np.all(found["rows"] == size)
    refused(lambda: jax.jit(ranks.allreduce)(x), "sw.ranks.jit")


CHECKS = [
    check_allreduce, check_kinds, check_adasum, check_moves, check_reducescatter, check_process_sets, check_background,
    check_differences, check_objects, check_join, check_jit,
]  # fmt: skip


def main() -> None:
    sw.ranks.init(timeout_s=60)
    for check in CHECKS:
        check(ranks.rank(), ranks.size())
        ranks.barrier()
        print("ok", check.__name__, flush=True)
    ranks.shutdown()


if __name__ == "__main__":
    main()
