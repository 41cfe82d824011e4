"""Many arrays as few messages: a group is one flat buffer a type, and a large buffer goes in pieces.

A program with many all-reduces costs as many messages on CPUs; a flat buffer costs one. XLA's Gloo loses bandwidth with
the size of a message, so large buffers go in pieces, by calls of their own, two under way at a time.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.ranks import programs
from shardwright.ranks.operations import REDUCIBLE, ReduceOp, check_bounds, divide, neutral
from shardwright.ranks.process_sets import ProcessSet
from shardwright.ranks.tuning import CPU_PIECE_BYTES, PIECE_BYTES

_OPS = tuple(ReduceOp)
_STEP = struct.Struct("<BBQ")
_BOUND = struct.Struct("<Q?")


@dataclass(frozen=True, slots=True)
class Buffer:
    """One flat message of a reduction: what ranks without data must know of it."""

    op: ReduceOp
    dtype: np.dtype
    length: int


def encode(buffers: Sequence[Buffer], bound: int, has_integers: bool) -> np.ndarray:
    """Bytes that name buffers, for `decode`; at most 224.

    bound: the largest magnitude of 64-bit scalars at this rank. has_integers: whether one of them is Python's.
    """
    raw = _BOUND.pack(bound, has_integers) + b"".join(
        _STEP.pack(_OPS.index(buffer.op), REDUCIBLE.index(buffer.dtype), buffer.length) for buffer in buffers
    )
    return np.frombuffer(raw, np.uint8)


def decode(messages: Sequence[np.ndarray], call: str) -> list[Buffer]:
    """The buffers that every rank's `encode` named.

    Raises CollectiveError, at all ranks, where a reduction of Python's integers may leave 64 bits.
    """
    data = messages[0].tobytes()
    steps = _STEP.iter_unpack(data[_BOUND.size :])
    buffers = [Buffer(_OPS[op], REDUCIBLE[dtype], length) for op, dtype, length in steps]
    bounds, have_integers = zip(*[_BOUND.unpack_from(message.tobytes()) for message in messages], strict=True)
    if any(have_integers):
        check_bounds(bounds, buffers[0].op, call)
    return buffers


def by_type(dtypes: Sequence[np.dtype]) -> list[list[int]]:
    """The positions of each type, in the order in which types come first."""
    groups: dict[np.dtype, list[int]] = {}
    for position, dtype in enumerate(dtypes):
        groups.setdefault(dtype, []).append(position)
    return list(groups.values())


def flatten(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Arrays of one type, one after the other."""
    if len(arrays) == 1:
        return arrays[0].reshape(-1)
    return np.concatenate([array.reshape(-1) for array in arrays])


def unflatten(flat: np.ndarray, shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    """Views of a flat buffer, one a shape."""
    views, start = [], 0
    for shape in shapes:
        size = math.prod(shape)
        views.append(flat[start : start + size].reshape(shape))
        start += size
    return views


# ---- on the host -----------------------------------------------------------------
def reduce_flat(process_set: ProcessSet, flat: np.ndarray, op: ReduceOp, divisor: int = 1) -> np.ndarray:
    """The reduction of a flat buffer of every rank, divided by `divisor`."""
    if process_set.size() == 1:
        return divide(flat.copy(), divisor)
    wire = flat.view(np.uint8) if flat.dtype == np.dtype(bool) else flat
    result = np.empty_like(wire)
    under_way: deque[tuple[int, int, jax.Array]] = deque()
    for start, length in pieces(process_set, wire.size, wire.dtype.itemsize, op):
        part = _pad(wire[start : start + length])
        under_way.append((start, length, programs.run(process_set, programs.REDUCE_BODIES[op], part[None])))
        if len(under_way) > 1:
            _store(process_set, result, under_way.popleft(), divisor)
    while under_way:
        _store(process_set, result, under_way.popleft(), divisor)
    return result.view(flat.dtype)


def pieces(process_set: ProcessSet, length: int, itemsize: int, op: ReduceOp) -> list[tuple[int, int]]:
    """Start and length of each piece of a buffer, in elements. Adasum's dot products take the whole buffer."""
    most = CPU_PIECE_BYTES if process_set.device.platform == "cpu" else PIECE_BYTES
    step = max(1, length) if op is ReduceOp.ADASUM else max(1, most // itemsize)
    return [(start, min(step, length - start)) for start in range(0, length, step)]


def take_part(process_set: ProcessSet, buffer: Buffer) -> None:
    """Run the collectives of `reduce_flat` with nothing to give: what a rank without data does."""
    dtype = np.dtype(np.uint8) if buffer.dtype == np.dtype(bool) else buffer.dtype
    body = programs.REDUCE_BODIES[buffer.op]
    for _, length in pieces(process_set, buffer.length, dtype.itemsize, buffer.op):
        part = np.full((1, programs.round_up(length)), neutral(buffer.op, buffer.dtype).astype(dtype))
        programs.fetch(programs.run(process_set, body, part), process_set)


def _pad(part: np.ndarray) -> np.ndarray:
    length = programs.round_up(part.size)
    if length == part.size:
        return part
    padded = np.zeros(length, part.dtype)
    padded[: part.size] = part
    return padded


def _store(process_set: ProcessSet, result: np.ndarray, piece: tuple[int, int, jax.Array], divisor: int) -> None:
    start, length, array = piece
    reduced = programs.fetch(array, process_set).reshape(-1)[:length]
    divide(reduced, divisor, out=result[start : start + length])


# ---- on accelerators -------------------------------------------------------------
def reduce_on_device(
    process_set: ProcessSet, arrays: Sequence[jax.Array], op: ReduceOp, divisor: int = 1
) -> list[jax.Array]:
    """Reduce arrays of one type on this rank's accelerator; results stay there.

    It sends the same messages as `reduce_flat`: each rank may hold its arrays on either side.
    """
    flat = jnp.concatenate([jnp.ravel(array) for array in arrays])
    wire = flat.astype(jnp.uint8) if flat.dtype == jnp.bool_ else flat
    reduced = [
        _reduce_piece(process_set, wire[start : start + length], op)
        for start, length in pieces(process_set, wire.size, wire.dtype.itemsize, op)
    ]
    whole = jnp.concatenate(reduced) if reduced else wire
    if divisor != 1:
        whole = (whole / divisor).astype(whole.dtype)
    parts = jnp.split(whole.astype(flat.dtype), np.cumsum([array.size for array in arrays])[:-1].tolist())
    return [part.reshape(array.shape) for part, array in zip(parts, arrays, strict=True)]


def _reduce_piece(process_set: ProcessSet, part: jax.Array, op: ReduceOp) -> jax.Array:
    padded = jnp.pad(part, (0, programs.round_up(part.size) - part.size))
    return programs.run(process_set, programs.REDUCE_BODIES[op], padded[None])[0, : part.size]
