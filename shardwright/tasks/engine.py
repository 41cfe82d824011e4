"""Discrete-event simulation: lists of operations, one a stage, and transfers between them.

A stage runs its operations in order. A transfer begins once both its send and its receive were reached and the previous
transfer in its direction has left the channel. A computation begins once the stage has finished the previous one and
all transfers it waits for have arrived.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple


class Compute(NamedTuple):
    """Occupies the stage for `time_s`, once the transfers `waits` have arrived."""

    time_s: float
    waits: tuple[int, ...] = ()


class Send(NamedTuple):
    transfer: int


class Receive(NamedTuple):
    transfer: int


Operation = Compute | Send | Receive


class Transfer(NamedTuple):
    """busy_s: time on its channel; it arrives `latency_s` after that."""

    source: int
    target: int
    busy_s: float = 0.0
    latency_s: float = 0.0


class Times(NamedTuple):
    """Begin and end of operations and transfers; transfers end on arrival. `blocked`: per stage the operation that
    could never begin, or None.
    """

    operations: tuple[list[tuple[float, float]], ...]
    transfers: list[tuple[float, float]]
    blocked: tuple[int | None, ...]


def run_operations(
    stages: Sequence[Sequence[Operation]], transfers: Sequence[Transfer], *, capacity: int | None = None
) -> Times:
    """Follow all lists to their end, or until none can go on.

    capacity: how many transfers of one direction may be sent and not yet posted by the receiver before the next
    send blocks its stage; None for any number.
    """
    return _Simulation(stages, transfers, capacity).finish()


class _Simulation:
    def __init__(
        self, stages: Sequence[Sequence[Operation]], transfers: Sequence[Transfer], capacity: int | None
    ) -> None:
        self._stages = stages
        self._transfers = transfers
        self._capacity = capacity
        self._clock = [0.0] * len(stages)
        self._times: tuple[list[tuple[float, float]], ...] = tuple([] for _ in stages)
        self._reached: list[float | None] = [None] * len(transfers)  # by the first of its two ends
        self._carried: list[tuple[float, float] | None] = [None] * len(transfers)
        self._free: dict[tuple[int, int], float] = defaultdict(float)
        self._unposted: dict[tuple[int, int], int] = defaultdict(int)
        self._waiting: dict[int, int] = {}  # transfer → the stage that waits for its arrival
        self._full: dict[tuple[int, int], int] = {}  # channel → the stage that waits to send
        self._require_ready = list(range(len(stages)))

    def finish(self) -> Times:
        while self._require_ready:
            self._advance(self._require_ready.pop())
        ended = [len(times) == len(stage) for times, stage in zip(self._times, self._stages, strict=True)]
        blocked = tuple(None if end else len(times) for end, times in zip(ended, self._times, strict=True))
        return Times(self._times, [carried or (0.0, 0.0) for carried in self._carried], blocked)

    def _advance(self, stage: int) -> None:
        """Advance to the end, or to the first operation that waits for another stage."""
        operations, times = self._stages[stage], self._times[stage]
        clock = self._clock[stage]
        while len(times) < len(operations):
            operation = operations[len(times)]
            if isinstance(operation, Compute):
                begin = clock
                for number in operation.waits:
                    carried = self._carried[number]
                    if carried is None:
                        self._waiting[number] = stage
                        self._clock[stage] = clock
                        return
                    begin = max(begin, carried[1])
                clock = begin + operation.time_s
                times.append((begin, clock))
                continue
            transfer = self._transfers[operation.transfer]
            channel = (transfer.source, transfer.target)
            if isinstance(operation, Send):
                if self._capacity is not None and self._unposted[channel] >= self._capacity:
                    self._full[channel] = stage
                    self._clock[stage] = clock
                    return
                self._unposted[channel] += 1
            else:
                self._unposted[channel] -= 1
                if channel in self._full:
                    sender = self._full.pop(channel)
                    self._clock[sender] = max(self._clock[sender], clock)
                    self._require_ready.append(sender)
            self._reach(operation.transfer, transfer, clock)
            times.append((clock, clock))
        self._clock[stage] = clock

    def _reach(self, number: int, transfer: Transfer, clock: float) -> None:
        first = self._reached[number]
        if first is None:
            self._reached[number] = clock
            return
        channel = (transfer.source, transfer.target)
        begin = max(first, clock, self._free[channel])
        self._free[channel] = begin + transfer.busy_s
        self._carried[number] = (begin, begin + transfer.busy_s + transfer.latency_s)
        if number in self._waiting:
            self._require_ready.append(self._waiting.pop(number))
