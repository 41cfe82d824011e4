"""Training that goes on after a loss of workers: snapshots, the journal, and the replay of steps.

| what happens             | what is done                                                          |
|--------------------------|-----------------------------------------------------------------------|
| every so many steps      | a numbered step has the nodes' daemons keep all arrays of the session |
| the snapshot is complete | the journal forgets what came before it                               |
| the executors are lost   | new steps are held; those without an outcome are kept                 |
| the executors run again  | arrays of the newest complete snapshot come back under their old ids  |
| then                     | what the journal holds is sent again, under new numbers               |
| another loss meanwhile   | the same again, from the same snapshot                                |
| other nodes run then     | calls are made again for those: `relocation.py`                       |

A step names the generation of executors that it is for: what was sent before a loss can not run after it. Programs are
pure functions of their arguments, so that a step that runs again gives the same bits.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from shardwright.client.cluster_view import ClusterView
from shardwright.client.connection import NodeInfo, nodes_of, team_of
from shardwright.client.handles import Handles
from shardwright.client.journal import Entry, ReleasedArrays, SentArrays, SentStep
from shardwright.client.limits import (
    FAILED_SNAPSHOTS,
    RECOVERY_ATTEMPTS,
    RECOVERY_PATIENCE_S,
    RECOVERY_POLL_S,
    RECOVERY_REPORT_S,
)
from shardwright.client.protection import Protection, Snapshot
from shardwright.client.step_result import StepResult
from shardwright.client.stream import InterruptedByRecoveryError, StepStream
from shardwright.client.transfer import Upload
from shardwright.errors import (
    ServerUnavailableError,
    SessionError,
    ShardwrightError,
    StepTimeoutError,
    UnsupportedProgramError,
    WorkerLostError,
)
from shardwright.proto.v1 import master_pb2
from shardwright.protocol import wire
from shardwright.units import format_bytes

if TYPE_CHECKING:
    from shardwright.client.programs import StepProgram
    from shardwright.plans.layouts import Layout

T = TypeVar("T")

#: What a call to a node may fail with after a loss.
_BROKEN = (WorkerLostError, ServerUnavailableError, SessionError)

_log = logging.getLogger("shardwright")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """A loss that training survived.

    loss: what was lost. snapshot_step: steps that the session had sent when the restored snapshot was taken.
    restored_bytes: of its arrays; 0: all began anew. replayed_steps: steps that ran again, or for the first time.
    lost_s: seconds from the loss until all of them had run.
    """

    loss: str
    snapshot_step: int
    restored_bytes: int
    replayed_steps: int
    lost_s: float

    def __str__(self) -> str:
        source = f"a snapshot (after step {self.snapshot_step})" if self.restored_bytes else "the beginning"
        restored = f"restored {format_bytes(self.restored_bytes)} from {source}, replayed {self.replayed_steps} steps"
        return f"recovered in {self.lost_s:.1f} s: {self.loss}; {restored}"


def require_repeatable(program: StepProgram) -> None:
    """Raises UnsupportedProgramError where a step would give other results when it runs again."""
    if not program.is_repeatable:
        raise UnsupportedProgramError(
            f"{program.name} draws random numbers from a state that the devices keep (HLO's rng): a snapshot does not "
            "hold it, so that the steps since could not be run again",
            remedy="draw from a key that the step takes and returns (rng-bit-generator), or leave snapshot_every out",
        )


def _remedy_of_loss(error: ShardwrightError, *, has_kept: bool) -> str:
    """What to do after a loss that took all, and what is protected until then."""
    again = "; then call keep again: what the session kept is gone, and nothing is kept until then" if has_kept else ""
    return f"{error.remedy}{again}; the session is not protected now, and is again with the next call that makes arrays"


class LostAgainError(Exception):
    """The executors were lost during a recovery."""


#: (the snapshot to restore, what was sent since, raises where the executors are lost again) → steps sent again.
Relocate = Callable[[Snapshot, Sequence[Entry], Callable[[], None]], int]


class Recovery:
    """Of one session. put: writes arrays to the nodes, again after an outage where the function given allows it.

    relocate: does the same on other nodes than the snapshot is of, or a call since. lose_kept: called where all arrays
    are gone; whether the session kept some of them.
    It is off until `begin`, and from an unsuccessful recovery until `begin_again`. Thread-safe; its lock is the
    stream's.
    """

    def __init__(
        self,
        cluster: ClusterView,
        handles: Handles,
        stream: StepStream,
        put: Callable[[Sequence[Upload], Callable[[], bool]], None],
        *,
        relocate: Relocate,
        lose_kept: Callable[[], bool],
    ) -> None:
        self._cluster = cluster
        self._handles = handles
        self._relocate = relocate
        self._lose_kept = lose_kept
        self._stream = stream
        self._put = put
        self._journal = stream.journal
        self._changed = stream.changed
        self._protection = Protection(stream.journal)
        self._timed_out: set[int] = set()  # id() of results of steps that ran into their limit once
        self._is_recovering = False
        self._is_lost_again = False
        self._uploading = 0
        self.recovered: list[Recovered] = []
        stream.guard = self

    @property
    def is_on(self) -> bool:
        return self._journal.is_on

    @property
    def losses(self) -> int:
        """Number of losses of workers so far, each counted at least once."""
        return self._stream.losses + self._stream.lost_generations

    @property
    def can_restore(self) -> bool:
        """Whether a loss now would cost no array: there is a snapshot, or nothing was there before the journal."""
        return self._protection.message.is_ready

    @property
    def is_due(self) -> bool:
        """Whether it is time for a snapshot."""
        return self._protection.is_due(self._stream.sent_steps)

    @property
    def protection(self) -> master_pb2.Protection:
        """What the servers are told of it."""
        return self._protection.message

    def begin(self, every: int) -> bool:
        """Survive losses from now on, with a snapshot each `every` steps; whether there are arrays of before.

        Those are safe once a first snapshot is complete. The smallest `every` of a session counts.
        """
        self._protection.ask(every)
        return False if self.is_on else self._turn_on()

    def begin_again(self) -> None:
        """Where a loss took all: survive losses again, as was asked for, whatever is made next."""
        if self._protection.is_lost:
            self._protection.is_urgent = self._turn_on()
            _log.warning("the session is protected anew, by a snapshot every %d steps", self._protection.every)

    def _turn_on(self) -> bool:
        generation, nodes = self.await_ready("")
        self._cluster.take_nodes(nodes)
        with self._changed:
            self._stream.generation = generation
            self._stream.steps_aside = self._cluster.info.is_elastic
            if self.is_on:  # by another thread
                return False
            has_arrays = self._protection.turn_on(self._stream.sent_steps)
            self._stream.tell_protection()
        if has_arrays:
            _log.info("arrays of before are protected once a first snapshot is complete")
        return has_arrays

    def adopt(self, layouts: Mapping[int, Layout]) -> None:
        """Arrays that a client before has made: no journal can make them again."""
        with self._changed:
            self._protection.adopt(layouts)
            self._stream.tell_protection()

    # ---- snapshots -------------------------------------------------------------------------

    def take(self, take_released: Callable[[], Sequence[int]]) -> None:
        """Take a snapshot after the last step sent, unless one is under way; the caller holds the session's lock.

        take_released: arrays to free first.
        """
        with self._changed:
            while self._protection.has_to_wait and self._stream.is_usable:
                self._changed.wait()
            if not self._protection.may_begin(self._stream.sent_steps):
                return
            released = take_released()
            self._journal.add_release(released)
            snapshot = self._protection.note_all(self._stream.sent_steps, self._handles.identify_all())
            request = master_pb2.RunStepsRequest(
                snapshot=master_pb2.SnapshotArrays(), arguments=list(snapshot.live), released=released
            )
            try:
                result = self._stream.submit(request, "a snapshot", is_followed=True, is_repeated=False)
            except InterruptedByRecoveryError:
                return  # there is one after the recovery
            self._protection.begin(snapshot, result)

    def end_snapshot(self, end: master_pb2.SnapshotEnd) -> None:
        """The server says that a snapshot is complete, or has failed."""
        with self._changed:
            if end.HasField("error"):
                self._fail_snapshot(end.number, wire.error_from_proto(end.error))
                return
            snapshot = self._protection.complete(end.number)
            if snapshot is None:
                return
            self._stream.tell_protection()
            self._changed.notify_all()
        _log.info(
            "snapshot after step %d: %s, with the daemons after %.2f s",
            snapshot.step, format_bytes(snapshot.size_bytes), end.store_s,
        )  # fmt: skip

    def _fail_snapshot(self, number: int, error: ShardwrightError) -> None:
        """After some failures the session is on its own until one succeeds; the caller holds the lock."""
        snapshot = self._protection.fail(number)
        if snapshot is None:
            return
        self._changed.notify_all()
        _log.warning("no snapshot after step %d: %s", snapshot.step, error)
        if self._protection.has_failed_too_often:
            self._stream.tell_protection()
            _log.warning(
                "%d snapshots failed in a row: until one succeeds, a loss of workers is an error", FAILED_SNAPSHOTS
            )

    # ---- losses ----------------------------------------------------------------------------

    def take_over(self, result: StepResult, error: ShardwrightError) -> bool:
        """Whether the step that failed will be run again; the caller holds the lock."""
        if not self.is_on or not isinstance(error, WorkerLostError | StepTimeoutError):
            self._end_failed_snapshot(result, error)
            return False
        self._end_failed_snapshot(result, error)
        self._start(error)
        if isinstance(error, StepTimeoutError):
            if id(result) in self._timed_out:
                return False
            self._timed_out.add(id(result))
        return result.is_repeated

    def _end_failed_snapshot(self, result: StepResult, error: ShardwrightError) -> None:
        pending = self._protection.pending
        if pending is not None and pending.result is result:
            if isinstance(error, WorkerLostError):
                self._protection.forget(result.number)
                self._changed.notify_all()
            else:
                self._fail_snapshot(result.number, error)

    def note_loss(self, error: ShardwrightError) -> None:
        """The server says that the executors are lost."""
        with self._changed:
            if self.is_on:
                self._start(error)

    def _start(self, error: ShardwrightError) -> None:
        """Begin a recovery, or begin it again; the caller holds the lock."""
        if self._is_recovering:
            self._is_lost_again = True
            self._changed.notify_all()
            return
        self._is_recovering = True
        self._stream.hold()
        threading.Thread(target=self._recover, args=(error,), name="shardwright-recovery", daemon=True).start()

    def _recover(self, loss: ShardwrightError) -> None:
        began_s = time.monotonic()
        _log.warning("%s; the session is restored once the executors run again", loss.message)
        try:
            for _ in range(RECOVERY_ATTEMPTS):
                try:
                    replayed = self._restore_and_replay(loss.message)
                    self._finish(loss, replayed, time.monotonic() - began_s)
                    return
                except LostAgainError:
                    continue
            error: ShardwrightError = WorkerLostError(
                f"{loss.message}; {RECOVERY_ATTEMPTS} attempts to run the steps since the last snapshot again failed "
                "as well",
                remedy="something may end executors each time: the servers' log says more (shardwright logs HOST:PORT)",
            )
        except ShardwrightError as caught:
            error = caught
        except Exception as caught:  # a defect must not leave anybody waiting
            error = wire.to_shardwright_error(caught)
        self._give_up(error)

    def _finish(self, loss: ShardwrightError, replayed: int, lost_s: float) -> None:
        with self._changed:
            if self._is_lost_again:
                raise LostAgainError
            base = self._protection.base
            assert base is not None
            report = Recovered(
                loss=loss.message,
                snapshot_step=base.step,
                restored_bytes=base.size_bytes,
                replayed_steps=replayed,
                lost_s=lost_s,
            )
            self.recovered.append(report)
            self._timed_out.clear()
            self._protection.end_recovery()
            self._is_recovering = False
            self._stream.resume()
        _log.warning("%s", report)

    def _give_up(self, error: ShardwrightError) -> None:
        """All arrays are gone: whoever waits is told."""
        remedy = _remedy_of_loss(error, has_kept=self._lose_kept())
        error = type(error)(error.message, where=error.where, remedy=remedy)
        with self._changed:
            unfinished = self._protection.give_up()
            self._timed_out.clear()
            self._stream.end_recovery(unfinished, error)
            self._stream.tell_protection()
            self._is_recovering = False
            self._stream.resume()
        if self._stream.is_usable:
            _log.error("the session could not be restored: %s", error)

    def _restore_and_replay(self, loss: str) -> int:
        """One attempt; returns the number of steps that were sent again. Raises LostAgainError."""
        self._stream.wait_until_idle()
        with self._changed:
            while self._uploading:
                self._changed.wait()
        generation, nodes = self.await_ready(loss)
        self._cluster.take_nodes(nodes)
        with self._changed:
            base, entries = self._protection.begin_recovery(), self._journal.entries
            self._is_lost_again = False
            self._stream.generation = generation
            self._changed.notify_all()
        if base is None:
            raise WorkerLostError(
                f"{loss}; there is no snapshot to restore", remedy="run init again, or restore a checkpoint"
            )
        if min(base.epoch, self._journal.oldest) != self._cluster.epoch:
            return self._relocate(base, entries, self._check_not_lost)
        self._restore(base)
        replayed, released = 0, list[int]()
        failed: dict[int, ShardwrightError] = {}  # arrays that are never made, of steps that had failed before
        for entry in entries:
            if self._is_lost_again:
                raise LostAgainError
            match entry:
                case SentArrays(uploads):
                    self._upload(uploads, generation)
                case ReleasedArrays(ids):
                    released += ids
                case SentStep(request, result, consumed):
                    error = result.error or next(filter(None, map(failed.get, request.arguments)), None)
                    if error is not None:
                        failed |= dict.fromkeys(filter(None, request.outputs), error)
                        released += consumed
                        if not result.is_done:
                            result.finish(error)
                        continue
                    self._stream.resend(request, result)
                    replayed += bool(request.executable_id)
        self._stream.wait_until_idle()
        if self._is_lost_again:
            raise LostAgainError
        if released:
            self._cluster.master.release(released)
        return replayed

    def _check_not_lost(self) -> None:
        if self._is_lost_again:
            raise LostAgainError

    def _restore(self, base: Snapshot) -> None:
        order = master_pb2.RestoreSnapshot(
            snapshot=base.number, layouts=[wire.layout_to_proto(layout) for layout in base.live.values()]
        )
        request = master_pb2.RunStepsRequest(restore_snapshot=order, outputs=list(base.live))
        result = self._stream.resend(request, StepResult(0, "the restore of a snapshot", is_followed=True))
        result.wait_for_outcome()
        if isinstance(result.error, WorkerLostError):
            raise LostAgainError
        if result.error is not None:
            raise result.error

    def _upload(self, uploads: Sequence[Upload], generation: int) -> None:
        for is_last in (False, True):
            try:
                self._put(uploads, lambda: not self._is_lost_again and self._read_generation() == generation)
                return
            except _BROKEN as error:
                if self._is_lost_again or self._read_generation() != generation:
                    raise LostAgainError from None
                if is_last or not isinstance(error, ServerUnavailableError):
                    raise

    # ---- calls that go straight to nodes -------------------------------------------------------

    def put(self, uploads: Sequence[Upload], *, are_private: bool = False) -> None:
        """Write arrays to the nodes; again, where a loss took them away meanwhile.

        are_private: nobody will change their contents.
        """
        if not uploads:
            return
        if self._stream.replayer == threading.get_ident():
            self._upload(uploads, self._stream.generation)
            with self._changed:
                self._journal.note((upload.array_id, upload.layout) for upload in uploads)
            return
        self.begin_again()
        copies = uploads
        if self.is_on and not are_private:
            copies = [replace(upload, value=np.array(upload.value)) for upload in uploads]
        for attempt in itertools.count():
            try:
                self._step_aside()
                with self._uploads() as generation:
                    self._put(uploads, partial(self._is_running, generation))
                    with self._changed:
                        self._journal.add_arrays(copies)
                return
            except _BROKEN as error:
                if not self._was_lost(generation) and not self._may_come_back(error, attempt):
                    raise

    def retry(self, call: Callable[[], T]) -> T:
        """The result of a call that reads arrays; again, where a loss took them away meanwhile."""
        if self._stream.replayer == threading.get_ident():
            return call()
        for attempt in itertools.count():
            with self._changed:
                self._await_end()
                generation = self._stream.generation
            try:
                result = call()
            except ShardwrightError as error:
                is_broken = isinstance(error, _BROKEN)
                if self._is_superseded(generation):
                    continue  # it met arrays in other layouts
                if not is_broken or not (self._was_lost(generation) or self._may_come_back(error, attempt)):
                    raise
            else:
                if not self._is_superseded(generation):
                    return result
        raise AssertionError("never reached")

    def _is_superseded(self, generation: int) -> bool:
        """Whether arrays may lie elsewhere by now, on a cluster whose nodes come and go."""
        with self._changed:
            is_other = self._is_recovering or self._stream.generation != generation
            return self.is_on and self._stream.steps_aside and is_other

    def _step_aside(self) -> None:
        """Raises InterruptedByRecoveryError rather than wait for a recovery that may plan anew."""
        with self._changed:
            if self._is_recovering and self._stream.steps_aside:
                raise InterruptedByRecoveryError

    def wait_until_over(self) -> None:
        """Returns when no recovery is under way."""
        with self._changed:
            self._await_end()

    def _may_come_back(self, error: ShardwrightError, attempt: int) -> bool:
        """Whether it is a connection to a node that was started again, and gRPC has not dialled anew yet."""
        return self.is_on and attempt == 0 and isinstance(error, ServerUnavailableError)

    @contextmanager
    def _uploads(self) -> Iterator[int]:
        """While arrays are written no recovery goes on; yields the generation."""
        with self._changed:
            self._await_end()
            self._uploading += 1
            generation = self._stream.generation
        try:
            yield generation
        finally:
            with self._changed:
                self._uploading -= 1
                self._changed.notify_all()

    def _await_end(self) -> None:
        while self._is_recovering:
            self._changed.wait()

    def _is_running(self, generation: int) -> bool:
        return not self._was_lost(generation)

    def _was_lost(self, generation: int) -> bool:
        """Whether the executors of a generation are lost, as far as the master knows; then a recovery has begun."""
        if not self.is_on:
            return False
        with self._changed:
            if self._is_recovering or self._stream.generation != generation:
                return True
        if self._read_generation() == generation:
            return False
        self.note_loss(WorkerLostError("the executors were lost"))
        return True

    # ---- the cluster -----------------------------------------------------------------------

    def _read_generation(self) -> int:
        """Of the executors that run; 0: not all do, or the master does not answer."""
        try:
            nodes = team_of(self._cluster.master.status())
        except ServerUnavailableError:
            return 0
        return nodes[0].generation if all(node.state == "ready" for node in nodes) else 0

    def await_ready(self, loss: str) -> tuple[int, tuple[NodeInfo, ...]]:
        """The generation that runs, and its nodes, once ready. Raises WorkerLostError after `RECOVERY_PATIENCE_S`."""
        began_s = said_s = time.monotonic()
        while True:
            self._stream.check_open()
            waiting = "the master"
            try:
                status = self._cluster.master.status()
            except ServerUnavailableError:
                pass  # it may come back as long as it keeps the session: then the stream gives up
            else:
                self._cluster.master.require_session(status)
                team = team_of(status)
                absent = [node for node in team if node.state != "ready"]
                if not absent:
                    return int(team[0].generation), nodes_of(node.node for node in team)
                waiting = "; ".join(
                    f"node {node.node.index}, {node.state}" + (f" ({node.detail})" if node.detail else "")
                    for node in absent
                )
            now_s = time.monotonic()
            if now_s - began_s > RECOVERY_PATIENCE_S:
                raise WorkerLostError(
                    f"{loss}; not back within {RECOVERY_PATIENCE_S:g} s: {waiting}".removeprefix("; "),
                    remedy="start the missing nodes (launch_worker.sh); then run init again, or restore a checkpoint",
                )
            if now_s - said_s > RECOVERY_REPORT_S:
                said_s = now_s
                _log.warning("waiting for %s", waiting)
            time.sleep(RECOVERY_POLL_S)
