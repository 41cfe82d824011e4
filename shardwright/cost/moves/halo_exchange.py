"""Halo exchange: rows exchanged by neighbors to change the shard size.

After XLA's partitioner (`xla/service/spmd/spmd_partitioner_util.cc`; `oracles/moves.py` compares every move of
uneven shards with it), in two forms:

- `halo_permutes` (`ExchangeHaloCompact`): a shard's rows come from the others in pieces. Every permute carries one
  piece of each shard with pieces left, to distinct receivers. Its length is the range of rows covering all its pieces.
- `resize_permutes` (`ExchangeHaloAndGetValidData`, around all-to-alls): one permute per distance between neighbors,
  with the length of the largest demand at that distance.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class _RowRange(NamedTuple):
    """Rows `first` to `last` of their shard, starting at row `offset` of the `receiver`'s range."""

    offset: int
    number: int
    receiver: int
    first: int
    last: int


def halo_permutes(length: int, rows: int, bounds: Iterable[tuple[int, int]]) -> list[int]:
    """Rows sent by each permute to give every shard its wanted range, in XLA's order.

    length: rows of the whole array; shards beyond it hold only padding, and send nothing. rows: per shard, consecutive.
        bounds: per shard, begin and end of its wanted rows.
    """
    queues: dict[int, list[_RowRange]] = {}
    for receiver, (begin, end) in enumerate(bounds):
        number, at = 0, begin
        while at < min(end, length):
            source, first = divmod(at, rows)
            last = min(rows, first + end - at)
            if source != receiver:
                queues.setdefault(source, []).append(_RowRange(at - begin, number, receiver, first, last))
            number, at = number + 1, at + last - first
    waiting = [sorted(queues[source]) for source in sorted(queues)]
    permutes = []
    while waiting:
        permutes.append(_take_permute(waiting, rows))
        waiting = [queue for queue in waiting if queue]
    return permutes


def _take_permute(waiting: Iterable[list[_RowRange]], rows: int) -> int:
    """Remove the pieces of one permute from the shards' send queues; returns the rows it carries."""
    receivers: set[int] = set()
    start, limit = rows, 0
    for queue in waiting:
        piece = queue[0]
        # Rows of both ends in one permute would include all rows between them.
        after = piece.last < start and limit == rows and piece.first == 0
        before = limit < piece.first and start == 0 and piece.last == rows
        if receivers and (piece.receiver in receivers or after or before):
            continue
        del queue[0]
        receivers.add(piece.receiver)
        start, limit = min(start, piece.first), max(limit, piece.last)
    return limit - start


def resize_permutes(length: int, rows: int, target_rows: int, shards: int) -> list[int] | None:
    """Rows sent by each permute to turn shards of `rows` rows into shards of `target_rows`, in order; None if XLA
    gathers all shards instead.

    length: rows of the whole array. shards: their number.
    """
    gap = abs(target_rows - rows)
    grow = target_rows > rows
    reach = gap * (shards - 1)
    if (reach + gap if grow else reach) > 2 * target_rows:
        if 2 * target_rows >= shards * rows:
            return None
        return halo_permutes(length if grow else rows * shards, rows, even_bounds(target_rows, shards))
    if grow and reach > rows and reach - gap >= rows * (shards - 1):
        return None
    return [min(reach - sent, rows) for sent in range(0, reach, rows)][: shards - 1]


def even_bounds(rows: int, shards: int) -> list[tuple[int, int]]:
    """Begin and end of each shard, in shards of equal numbers of rows."""
    return [(rows * shard, rows * (shard + 1)) for shard in range(shards)]


def part_bounds(whole: int, part: int, shards: int, parts: int) -> list[tuple[int, int]]:
    """Begin and end of the parts of shards of `whole` rows, in `part` rows each: the last ones reach into the next
    shard.
    """
    return [(whole * i + part * k, whole * i + part * (k + 1)) for i in range(shards) for k in range(parts)]
