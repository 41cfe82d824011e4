"""Ranks with fewer batches than others: `join` goes on with the others' collectives, and gives nothing to them.

A rank that has joined gives the neutral element (zeros to sums) and no rows to gathers; averages divide by the ranks
that have data. With batches at two of four ranks a step averages two gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

import numpy as np

from shardwright.ranks import fusion, job, messages, watch
from shardwright.ranks.agreement import Follow, agree_without_data, build_join_error
from shardwright.ranks.process_sets import ProcessSet

_T = TypeVar("_T")


def join(process_set: ProcessSet | None = None) -> int:
    """Say that this rank has no data left, and take part in the others' collectives until all have none.

    Returns the rank that came last (the largest of several), whose parameters are the newest. The others may call
    `allreduce`, `allgather`, `allgather_object` and `barrier` meanwhile; anything else is a CollectiveError at all
    ranks. Functions of `sw.ranks.jit` cannot wait for a rank that has joined: give them batches of weight zero.
    """
    chosen = job.resolve_process_set(process_set)
    return job.current().dispatcher.run(lambda: _join(chosen))  # type: ignore[no-any-return]


def _join(process_set: ProcessSet) -> int:
    while True:
        before = process_set.last_active
        with watch.current().collective(process_set.ranks, watch.JOINED):
            agreement = agree_without_data(process_set)
        if not agreement.active_places():
            process_set.last_active = (True,) * process_set.size()
            return max(rank for rank, active in zip(process_set.ranks, before, strict=True) if active)
        follow = agreement.follow()
        if follow is Follow.REFUSE:
            raise build_join_error(process_set, agreement, "join")
        if follow is Follow.GATHER:
            messages.gather_rest(process_set, agreement, np.zeros(0, np.uint8))
        if follow is Follow.REDUCE:
            for buffer in fusion.decode(agreement.active_messages(), "join"):
                fusion.take_part(process_set, buffer)


def joined(batches: Iterable[_T], process_set: ProcessSet | None = None) -> Iterator[_T]:
    """This rank's batches, and `join` after the last one: `for batch in sw.ranks.joined(loader): …`."""
    yield from batches
    join(process_set)
