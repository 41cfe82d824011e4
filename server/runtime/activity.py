"""What this executor's threads are busy with, for the master's watchdog and for people."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import jax

from shardwright.server.black_box import BlackBox, Work
from shardwright.server.tuning import BUSY_S


@dataclass(frozen=True, slots=True)
class _Work:
    """One command in one thread. where: its present place, asked for when it is told."""

    sequence: int
    since_s: float
    where: Callable[[], str]


class Activity:
    """Work of several threads; `busy_with` may be called by any other. box: where it is written down."""

    def __init__(self, box: BlackBox | None = None) -> None:
        self._box = box
        self._works: dict[str, _Work] = {}  # by thread: each replaces its own entry only

    @contextmanager
    def at(self, thread: str, sequence: int, where: Callable[[], str]) -> Iterator[None]:
        """Within, `thread` is busy with the command of this number."""
        self._works[thread] = _Work(sequence, time.monotonic(), where)
        try:
            with nullcontext() if self._box is None else self._box.at(Work(sequence=sequence)):
                yield
        finally:
            del self._works[thread]

    def busy_with(self) -> tuple[int, str]:
        """(sequence number, place) of the oldest command that has taken a second or more; (0, "") without one."""
        works = list(self._works.values())
        oldest = min(works, key=lambda work: work.sequence, default=None)
        if oldest is None or time.monotonic() - oldest.since_s < BUSY_S:
            return 0, ""
        try:
            return oldest.sequence, oldest.where()
        except Exception:  # arrays may be donated or freed while they are looked at
            return oldest.sequence, ""


def devices_computing(arrays: list[jax.Array], position_of: Callable[[jax.Device], int]) -> str:
    """`device 3`, `devices 0, 2`: those of this process where a shard is not computed yet; empty without one."""
    shards = [shard for array in arrays if not array.is_deleted() for shard in array.addressable_shards]
    late = {position_of(shard.device) for shard in shards if not shard.data.is_ready()}
    numbers = ", ".join(map(str, sorted(late)))
    return f"device{'s' * (len(late) > 1)} {numbers}" if late else ""
