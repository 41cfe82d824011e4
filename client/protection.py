"""What a session would restore after a loss, and what its journal may forget: pure, `recovery.py` has the threads.

| what happens                | what would be restored             | the journal                              |
|-----------------------------|------------------------------------|------------------------------------------|
| protection is turned on     | nothing: all begins anew           | holds all from here on                   |
| … beside arrays of before   | they could not be: not ready       | holds all from here on                   |
| a snapshot is under way     | as before                          | holds all since what would be restored   |
| it is complete              | it                                 | forgets what came before it              |
| three in a row have failed  | arrays could not be: not ready     | forgets what came before the next one    |
| a recovery gives up         | nothing is there: not ready        | is off; on again with the next call      |

The servers are told: the daemons keep what would be restored until another snapshot takes its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardwright.client.journal import Journal, Layouts, SentStep
from shardwright.client.limits import FAILED_SNAPSHOTS, SKIPPED_SNAPSHOTS
from shardwright.proto.v1 import master_pb2

if TYPE_CHECKING:
    from shardwright.client.calls import KnownArray
    from shardwright.client.step_result import StepResult
    from shardwright.plans.layouts import Layout


@dataclass(slots=True, kw_only=True)
class Snapshot:
    """live: arrays in it. position: entries of the journal before it. step: steps that the session had sent.

    number: of its step, once it is complete; 0: of the beginning, when there was nothing. epoch: of the session.
    named_arrays: arrays with handles, by the first ids of their names. result: of its step.
    """

    live: Layouts
    position: int
    step: int
    epoch: int
    number: int = 0
    named_arrays: Mapping[int, KnownArray] = field(default_factory=dict)
    result: StepResult | None = None

    @property
    def size_bytes(self) -> int:
        return sum(layout.size_bytes for layout in self.live.values())


class Protection:
    """Of one session; its users hold the stream's lock.

    base: what would be restored. pending: the snapshot under way. every: steps from one to the next, 0: nobody asked
    for protection. is_urgent: whether one is due at once.
    """

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.base: Snapshot | None = None
        self.pending: Snapshot | None = None
        self.every = 0
        self.is_urgent = False
        self._skipped = 0
        self._failed = 0  # in a row
        self._considered_step = 0  # steps that had been sent when a snapshot fell due last

    @property
    def is_on(self) -> bool:
        """Whether a loss is met with a recovery, which may have nothing to restore."""
        return self.journal.is_on

    @property
    def is_lost(self) -> bool:
        """Whether it was asked for, and is off since a recovery gave up."""
        return bool(self.every) and not self.is_on

    @property
    def message(self) -> master_pb2.Protection:
        """As the servers are told."""
        base = self.base
        is_ready = self.is_on and base is not None
        number = base.number if base is not None else 0
        return master_pb2.Protection(is_wanted=bool(self.every), is_ready=is_ready, snapshot=number)

    def is_due(self, sent_steps: int) -> bool:
        """Whether it is time for a snapshot."""
        return self.is_on and (self.is_urgent or sent_steps - self._considered_step >= self.every)

    @property
    def has_to_wait(self) -> bool:
        """Whether too many fell due: the next step waits for the one under way."""
        return self._skipped >= SKIPPED_SNAPSHOTS and self.pending is not None

    # ---- on and off ------------------------------------------------------------------------

    def ask(self, every: int) -> None:
        """A snapshot each `every` steps; the smallest number that was asked for counts."""
        self.every = min(self.every, every) if self.every else every

    def turn_on(self, sent_steps: int) -> bool:
        """Survive losses from now on; whether there are arrays of before, safe with the first complete snapshot."""
        journal = self.journal
        journal.is_on = True
        has_arrays = bool(journal.live)
        self._considered_step, self._failed = sent_steps, 0
        beginning = Snapshot(live={}, position=journal.position, step=sent_steps, epoch=journal.epoch)
        self.base = None if has_arrays else beginning
        return has_arrays

    def adopt(self, layouts: Mapping[int, Layout]) -> None:
        """Arrays that a client before has made: no journal can make them again."""
        self.journal.live.update(layouts)
        self.base = None

    def give_up(self) -> list[StepResult]:
        """All arrays are gone. Returns the results of steps that will have none."""
        entries = self.journal.entries
        unfinished = [entry.result for entry in entries if isinstance(entry, SentStep) and not entry.result.is_done]
        self.journal.clear()
        self.base = self.pending = None
        return unfinished

    # ---- snapshots -------------------------------------------------------------------------

    def may_begin(self, sent_steps: int) -> bool:
        """Whether the snapshot that is due can be taken now; else it is left out."""
        self._considered_step = sent_steps
        if self.pending is not None or not self.is_on:
            self._skipped += 1
            return False
        self.is_urgent = False
        return True

    def note_all(self, sent_steps: int, arrays: Mapping[int, KnownArray]) -> Snapshot:
        """A snapshot of what there is now, not sent yet."""
        journal = self.journal
        if self.base is None:
            journal.drop_before(journal.position)  # there is nothing that it could follow
        live, at = dict(journal.live), journal.position
        return Snapshot(live=live, position=at, step=sent_steps, epoch=journal.epoch, named_arrays=arrays)

    def begin(self, snapshot: Snapshot, result: StepResult) -> None:
        """It was sent."""
        snapshot.result = result
        self.pending = snapshot

    def complete(self, number: int) -> Snapshot | None:
        """The snapshot of this number is complete; None: it is not the one under way."""
        snapshot = self._end(number)
        if snapshot is not None:
            snapshot.number, self._failed = number, 0
            self.base = snapshot
            self.journal.drop_before(snapshot.position)
        return snapshot

    def fail(self, number: int) -> Snapshot | None:
        """Likewise, it has failed. The journal must not grow for ever: after some there is nothing to restore."""
        snapshot = self._end(number)
        if snapshot is not None:
            self._failed += 1
            if self.has_failed_too_often:
                self.base = None
        return snapshot

    @property
    def has_failed_too_often(self) -> bool:
        return self._failed == FAILED_SNAPSHOTS

    def forget(self, number: int) -> None:
        """Likewise, it was lost with the executors."""
        self._end(number)

    def _end(self, number: int) -> Snapshot | None:
        pending = self.pending
        if pending is None or pending.result is None or pending.result.number != number:
            return None
        self.pending, self._skipped = None, 0
        return pending

    # ---- losses ----------------------------------------------------------------------------

    def begin_recovery(self) -> Snapshot | None:
        """What is restored; the snapshot under way is forgotten, and after the recovery none may be left out."""
        self.pending, self._skipped = None, SKIPPED_SNAPSHOTS
        return self.base

    def end_recovery(self) -> None:
        """All was restored: but some parts have one copy only."""
        self.is_urgent = True
