"""Rows that neighbours exchange where shards of one size take the place of shards of another.

As XLA's partitioner does it (`benchmarks/probe_moves.py` holds every move of uneven shards against it): a permute for
every distance between neighbours, as long as the rows of all that it serves; distances that serve different shards
share one.
"""

from __future__ import annotations

from collections.abc import Iterable


def sent_rows(length: int, rows: int, wanted: Iterable[tuple[int, int]]) -> list[int]:
    """Rows that each permute sends so that every shard has what it wants.

    length: rows of the whole array; shards that lie behind them hold padding alone, and send nothing. rows: of every
    shard, which lie one behind the other. wanted: where the rows begin and end that each shard wants.
    """
    served: dict[int, set[int]] = {}
    spans: dict[int, tuple[int, int]] = {}
    for shard, (begin, end) in enumerate(wanted):
        for source in range(begin // rows, min(-(-end // rows), -(-length // rows))):
            if source != shard:
                first, last = max(begin - source * rows, 0), min(end - source * rows, rows)
                low, high = spans.get(shard - source, (first, last))
                spans[shard - source] = (min(low, first), max(high, last))
                served.setdefault(shard - source, set()).add(shard)
    permutes: list[tuple[set[int], int, int]] = []
    for distance in sorted(spans, key=abs):
        shards, (low, high) = served[distance], spans[distance]
        for at, (others, first, last) in enumerate(permutes):
            if not others & shards:
                permutes[at] = (others | shards, min(first, low), max(last, high))
                break
        else:
            permutes.append((shards, low, high))
    return [last - first for _, first, last in permutes]


def evenly(rows: int, shards: int) -> list[tuple[int, int]]:
    """Where so many rows of each shard begin and end."""
    return [(rows * shard, rows * (shard + 1)) for shard in range(shards)]


def parts_of(whole: int, part: int, shards: int, parts: int) -> list[tuple[int, int]]:
    """The same of the parts of shards of `whole` rows, of which the last ones may have fewer than `part`, or none."""
    return [
        (whole * i + min(part * k, whole), whole * i + min(part * (k + 1), whole))
        for i in range(shards)
        for k in range(parts)
    ]
