"""Rows that neighbours exchange where shards of one size take the place of shards of another.

As XLA's partitioner does it (`xla/service/spmd/spmd_partitioner_util.cc`; `benchmarks/probe_moves.py` holds every move
of uneven shards against it), in one of two ways:

- `halo_permutes` (`ExchangeHaloCompact`): a shard's rows come from the others in pieces, and every permute carries one
  piece of each shard that still has any to send, to receivers that differ. It is as long as the rows that any of its
  pieces takes.
- `resize_permutes` (`ExchangeHaloAndGetValidData`, around all-to-alls): a permute for every distance between
  neighbours, as long as what the shard that is off the most wants of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class _RowRange(NamedTuple):
    """Rows `first` to `last` of their shard, `offset` rows behind the first that `receiver` wants."""

    offset: int
    number: int
    receiver: int
    first: int
    last: int


def halo_permutes(length: int, rows: int, wanted: Iterable[tuple[int, int]]) -> list[int]:
    """Rows that each permute sends so that every shard has what it wants, in XLA's order.

    length: rows of the whole array; shards that lie behind them hold padding alone, and send nothing. rows: of every
    shard, which lie one behind the other. wanted: where the rows begin and end that each shard wants.
    """
    queues: dict[int, list[_RowRange]] = {}
    for receiver, (begin, end) in enumerate(wanted):
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
    """Take the pieces of one permute out of what shards wait to send: the rows that it carries."""
    receivers: set[int] = set()
    start, limit = rows, 0
    for queue in waiting:
        piece = queue[0]
        # A few rows of one end and a few of the other would take all rows between them along.
        after = piece.last < start and limit == rows and piece.first == 0
        before = limit < piece.first and start == 0 and piece.last == rows
        if receivers and (piece.receiver in receivers or after or before):
            continue
        del queue[0]
        receivers.add(piece.receiver)
        start, limit = min(start, piece.first), max(limit, piece.last)
    return limit - start


def resize_permutes(length: int, rows: int, wanted: int, shards: int) -> list[int] | None:
    """Rows that each permute sends so that every shard of `rows` rows becomes one of `wanted`, in order; None where XLA
    gathers all shards instead.

    length: rows of the whole array. shards: how many there are.
    """
    gap = abs(wanted - rows)
    grow = wanted > rows
    reach = gap * (shards - 1)
    if (reach + gap if grow else reach) > 2 * wanted:
        if 2 * wanted >= shards * rows:
            return None
        return halo_permutes(length if grow else rows * shards, rows, even_bounds(wanted, shards))
    if grow and reach > rows and reach - gap >= rows * (shards - 1):
        return None
    return [min(reach - sent, rows) for sent in range(0, reach, rows)][: shards - 1]


def even_bounds(rows: int, shards: int) -> list[tuple[int, int]]:
    """Where so many rows of each shard begin and end."""
    return [(rows * shard, rows * (shard + 1)) for shard in range(shards)]


def part_bounds(whole: int, part: int, shards: int, parts: int) -> list[tuple[int, int]]:
    """The same of the parts of shards of `whole` rows, in `part` rows each: the last ones reach into the next shard."""
    return [(whole * i + part * k, whole * i + part * (k + 1)) for i in range(shards) for k in range(parts)]
