"""A value's reshard between two stages: cut, sent, put together.

Both ends plan the same move (`moves.plan_resharding`) and number its pieces equally: nothing has to be agreed on while
a step runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import prod

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.errors import PlanError
from shardwright.plans.layouts import Slices
from shardwright.server.runtime.arrays import sharding_of
from shardwright.server.runtime.resharding import RowSection, TargetShard, plan_resharding
from shardwright.server.runtime.transport import PIECE_BITS, PendingPiece, StopSignal, Transport


class CrossMeshReshard:
    """What this process does of the move of one value between two stages; used for every micro-batch.

    sources: the value, in sections of its rows; one where it lies in one place. node_of: the node that owns a device.
    devices: this process' own, by position. is_donated: a program of the same step takes the value's buffers over,
    maybe before a receiver has read them; then copies are sent. is_rare: used a few times, so that it compiles a
    program for each shape of a piece rather than for each piece. Raises PlanError where both ends are of different
    arrays, or the move has too many pieces.
    """

    def __init__(
        self,
        sources: Sequence[RowSection],
        target: RowSection,
        *,
        node_of: Callable[[int], int],
        devices: Mapping[int, jax.Device],
        transport: Transport,
        is_donated: bool = False,
        is_rare: bool = False,
    ) -> None:
        parts = plan_resharding(sources, target, node_of)
        if sum(len(part.pieces) for part in parts) >= 1 << PIECE_BITS:
            raise PlanError(f"a value of {target} goes from one stage to another in too many pieces")
        self._transport = transport
        self._is_donated = is_donated
        self._is_rare = is_rare
        self._outgoing = [
            (piece, devices[piece.source]) for part in parts for piece in part.pieces if piece.source in devices
        ]
        self._incoming = [
            (part, [devices[position] for position in part.positions]) for part in parts if part.positions[0] in devices
        ]
        self._target = target.layout

    def send(self, first_number: int, array: jax.Array, section: int = 0) -> None:
        """Start to send this process' pieces of `array`, one of the sections; returns at once."""
        shards = {shard.device: shard.data for shard in array.addressable_shards}
        for piece, device in self._outgoing:
            if piece.section != section:
                continue
            shard = shards[device]
            if piece.cut is not None and self._is_rare:
                starts = np.asarray([part.start for part in piece.cut], np.int32)
                box = _compile_movable_cutter(piece.shape)(shard, starts)
            elif piece.cut is not None:
                box = _compile_cutter(_bounds(piece.cut))(shard)
            else:
                box = _copy(shard) if self._is_donated else shard
            self._transport.send(first_number + piece.number, box, piece.target)

    def receive(self, first_number: int) -> PendingValue:
        """Start to receive this process' shards; returns at once."""
        dtype = self._target.dtype
        arrivals = [
            [self._transport.receive(first_number + piece.number, piece, dtype) for piece in part.pieces]
            for part, _ in self._incoming
        ]
        return PendingValue(arrivals, self._assemble_shards)

    def _assemble_shards(self, boxes: Sequence[Sequence[jax.Array]]) -> jax.Array:
        shards: list[jax.Array] = []
        for (part, devices), pieces in zip(self._incoming, boxes, strict=True):
            first = self._shard(part, pieces, devices[0])
            shards += [first, *(jax.device_put(first, device) for device in devices[1:])]
        return jax.make_array_from_single_device_arrays(self._target.stored_shape, sharding_of(self._target), shards)

    def _shard(self, part: TargetShard, pieces: Sequence[jax.Array], device: jax.Device) -> jax.Array:
        if not pieces:
            zeros: jax.Array = jax.device_put(np.zeros(self._target.shard_shape, self._target.dtype), device)
            return zeros
        if len(pieces) == 1 and not any(part.padding):
            return pieces[0]
        return _compile_assembler(part.grids, part.padding)(*pieces)


class PendingValue:
    """An array of which pieces are on their way."""

    def __init__(
        self,
        arrivals: Sequence[Sequence[PendingPiece]],
        put_together: Callable[[Sequence[Sequence[jax.Array]]], jax.Array],
    ) -> None:
        self._arrivals = arrivals
        self._assemble_shards = put_together

    def wait(self, stop: StopSignal) -> jax.Array:
        """The array, once all pieces of this process are there. Raises what `stop` says."""
        return self._assemble_shards([[arrival.wait(stop) for arrival in part] for part in self._arrivals])


_Bounds = tuple[tuple[int, int], ...]


def _bounds(cut: Slices) -> _Bounds:
    return tuple((part.start, part.stop) for part in cut)


_OnDevice = Callable[..., jax.Array]


@jax.jit
def _copy(shard: jax.Array) -> jax.Array:
    return jnp.copy(shard)


@lru_cache(maxsize=4096)
def _compile_cutter(bounds: _Bounds) -> _OnDevice:
    return jax.jit(lambda shard: shard[tuple(slice(*bound) for bound in bounds)])


@lru_cache(maxsize=4096)
def _compile_movable_cutter(shape: tuple[int, ...]) -> _OnDevice:
    return jax.jit(lambda shard, starts: jax.lax.dynamic_slice(shard, starts, shape))


@lru_cache(maxsize=4096)
def _compile_assembler(grids: tuple[tuple[int, ...], ...], padding: tuple[int, ...]) -> _OnDevice:
    def assemble(*pieces: jax.Array) -> jax.Array:
        sections, at = [], 0
        for grid in grids:
            sections.append(_block(pieces[at : at + prod(grid)], grid))
            at += prod(grid)
        whole = sections[0] if len(sections) == 1 else jnp.concatenate(sections)
        return jnp.pad(whole, [(0, extra) for extra in padding])

    return jax.jit(assemble)


def _block(pieces: Sequence[jax.Array], grid: Sequence[int]) -> jax.Array:
    blocks = list(pieces)
    for dimension in reversed(range(len(grid))):  # row-major: the last dimension's neighbours stand together
        count = grid[dimension]
        blocks = [jnp.concatenate(blocks[at : at + count], axis=dimension) for at in range(0, len(blocks), count)]
    return blocks[0]
