"""The stream of numbered steps: sent ahead, answered in order, executed once.

A request stays in `_unanswered` until its reply came. Where the connection
breaks, a new stream is opened and all of them are sent again, in order; the
server knows by their numbers which it has run already.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

import grpc
import numpy as np

from shardwright.client.journal import Journal
from shardwright.client.limits import RETRY_PAUSE_S, STEPS_AHEAD, STREAM_END_S
from shardwright.client.retries import describe_outage
from shardwright.client.step_result import StepResult
from shardwright.dtypes import to_dtype
from shardwright.errors import (
    ServerDrainingError,
    ServerUnavailableError,
    SessionError,
    ShardwrightError,
    StepCancelledError,
    StepTimeoutError,
    WorkerLostError,
)
from shardwright.proto.v1 import master_pb2
from shardwright.protocol import wire

if TYPE_CHECKING:
    from shardwright.client.calls import Call
    from shardwright.client.transfer import Upload
    from shardwright.plans.layouts import Layout

#: Errors of steps after which arrays on the servers may be gone.
_LOSSES = (WorkerLostError, StepTimeoutError, StepCancelledError)

_log = logging.getLogger("shardwright")

_TRANSIENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN)


class InterruptedByRecoveryError(Exception):
    """Nothing was sent: the session is being restored, maybe on other nodes. The caller begins again afterwards."""


class Guard(Protocol):
    """Looks after a session that survives the loss of workers; see `Recovery`."""

    def take_over(self, result: StepResult, error: ShardwrightError) -> bool:
        """Whether a step that failed will be sent again: then it has no outcome yet."""

    def note_loss(self, error: ShardwrightError) -> None:
        """The executors are lost."""

    def end_snapshot(self, end: master_pb2.SnapshotEnd) -> None:
        """A snapshot is complete, or has failed."""

    @property
    def can_restore(self) -> bool:
        """Whether all arrays of the session would be made again after a loss now."""

    @property
    def protection(self) -> master_pb2.Protection:
        """What it would do after a loss."""


class StepStream:
    """Sends steps over one bidirectional stream; thread-safe.

    call: opens the stream, given the iterator of requests. cancel: asks the server to end steps, by their numbers.
    reconnect_s: how long a lost connection is tried again: as long as the server keeps the session. retry_pause_s:
    seconds between two attempts. first_number: of the first step. is_gone: whether the server is known to have ended
    for good.
    losses: number of steps that failed together with arrays of before. journal: what was sent, and the arrays that
    there are. generation: of the executors that steps are for, 0: any. sent_steps: programs run so far. guard: told of
    losses. changed: the lock of all this, notified of changes.
    """

    def __init__(
        self,
        call: Callable[[Iterator[master_pb2.RunStepsRequest]], Any],
        session_id: str,
        cancel: Callable[[Sequence[int]], object] = lambda numbers: None,
        *,
        reconnect_s: float,
        retry_pause_s: float = RETRY_PAUSE_S,
        first_number: int = 1,
        is_gone: Callable[[], bool] = lambda: False,
    ) -> None:
        self._call = call
        self._cancel = cancel
        self._is_gone = is_gone
        self._session_id = session_id
        self._reconnect_s = reconnect_s
        self._retry_pause_s = retry_pause_s
        self._next_number = first_number
        self._unanswered: deque[tuple[master_pb2.RunStepsRequest, StepResult]] = deque()
        self.changed = self._changed = threading.Condition()
        self.journal = Journal()
        self.guard: Guard | None = None
        self.generation = 0
        self.sent_steps = 0
        self.lost_generations = 0  # that the server has told of
        self._recovery_error: ShardwrightError | None = None  # of the last recovery that gave up
        self._is_recovery_error_told = True  # to a caller, or by a step that failed with it
        self.steps_aside = False  # whether `submit` raises InterruptedByRecoveryError rather than wait for a recovery
        self.replayer = 0  # the thread that sends while others are held
        self._is_held = False
        self._outbox: SimpleQueue[master_pb2.RunStepsRequest | None] = SimpleQueue()
        self._failed: list[StepResult] = []
        self._met: dict[str, int] = {}  # by errors that were raised, the last step that had been sent by then
        self._failure: ShardwrightError | None = None
        self.losses = 0
        self._is_closed = False
        self._drain: tuple[str, float] | None = None  # what ends, and when
        self.write_again: Callable[[Sequence[Upload]], None] = lambda uploads: None  # what was lost and is waited for
        self.drain_heard: Callable[[bool], None] = lambda is_over: None  # called when it is told, and when it is over
        self._broken_since: float | None = None  # since when the server has not been reached
        self._heard_s = time.monotonic()  # when it was last heard
        self._open()
        self._thread = threading.Thread(target=self._receive, name="shardwright-steps", daemon=True)
        self._thread.start()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._unanswered and not self._is_held

    @property
    def is_usable(self) -> bool:
        return self._failure is None and not self._is_closed

    def submit(
        self,
        request: master_pb2.RunStepsRequest,
        name: str,
        *,
        is_followed: bool = False,
        is_repeated: bool = True,
        new_arrays: Sequence[tuple[int, Layout]] = (),
        consumed: Sequence[int] = (),
        call: Call | None = None,
        uploads: Sequence[Upload] = (),
    ) -> StepResult:
        """Numbers and sends `request`; waits only while `STEPS_AHEAD` steps are unfinished, or steps are held.

        new_arrays: those that come with it, and its outputs. consumed: arguments that it takes over. is_repeated:
        whether it is to run again after a loss; call: how, on other nodes. uploads: arguments that can be sent again.

        Raises the error of an ended stream, and, where nothing was sent, ServerDrainingError,
        InterruptedByRecoveryError, and the error of a recovery that gave up meanwhile.
        """
        if threading.get_ident() == self.replayer:
            result = self.resend(request, StepResult(0, name, is_followed=True))
            with self._changed:
                self.journal.note(new_arrays, consumed)
            return result
        is_save = request.HasField("save")
        with self._changed:
            before = self._recovery_error
            try:
                while (
                    self.is_usable
                    and (self._is_held or len(self._unanswered) >= STEPS_AHEAD)
                    and (is_save or self._drain is None)
                ):
                    if self._is_held and self.steps_aside:
                        raise InterruptedByRecoveryError
                    self._changed.wait()
            except KeyboardInterrupt:
                self.cancel_all()
                raise
            self.check_open()
            if self._recovery_error is not None and self._recovery_error is not before:
                self._is_recovery_error_told = True
                raise self._recovery_error
            if not is_save:
                self.check_draining()
            outputs = tuple(array_id for array_id in request.outputs if array_id)
            result = StepResult(
                0,
                name,
                is_followed=is_followed,
                is_repeated=is_repeated,
                output_ids=outputs,
                interrupted=self.cancel_all,
            )
            result.uploads = uploads
            self._send(request, result)
            self.sent_steps += bool(request.executable_id)
            if is_repeated:
                self.journal.add_step(request, result, new_arrays, consumed, call)
            else:
                self.journal.add_release(request.released)
        return result

    def _send(self, request: master_pb2.RunStepsRequest, result: StepResult) -> None:
        request.session_id = self._session_id
        request.number = result.number = self._next_number
        request.generation = self.generation
        request.name = result.name
        request.restores = self.guard is not None and self.guard.can_restore
        self._next_number += 1
        self._unanswered.append((request, result))
        self._outbox.put(request)

    # ---- after a loss ----------------------------------------------------------------

    def hold(self) -> None:
        """Let `submit` wait; the caller holds the lock."""
        self._is_held = True

    def resume(self) -> None:
        """The opposite of `hold`."""
        self._is_held = False
        self._changed.notify_all()

    def resend(self, request: master_pb2.RunStepsRequest, result: StepResult) -> StepResult:
        """Sends a copy of a step under a new number, though others are held."""
        copy = master_pb2.RunStepsRequest()
        copy.CopyFrom(request)
        with self._changed:
            while self.is_usable and len(self._unanswered) >= STEPS_AHEAD:
                self._changed.wait()
            self.check_open()
            self._send(copy, result)
        return result

    def tell_protection(self) -> None:
        """Have the servers know what the guard would do after a loss; the caller holds the lock."""
        if self.guard is not None and not self._is_closed:
            protection = self.guard.protection
            self._outbox.put(master_pb2.RunStepsRequest(session_id=self._session_id, protection=protection))

    def wait_until_idle(self) -> None:
        """Returns when all steps that were sent are answered; raises the error of an ended stream."""
        with self._changed:
            while self.is_usable and self._unanswered:
                self._changed.wait()
            self.check_open()

    def end_recovery(self, unfinished: Sequence[StepResult], error: ShardwrightError) -> None:
        """A recovery gave up: all arrays are gone, and some caller is to be told; the caller holds the lock."""
        self.generation, self._recovery_error = 0, error
        self._is_recovery_error_told = any(not result.is_followed for result in unfinished)
        self.fail(unfinished, error)

    def fail(self, results: Iterable[StepResult], error: ShardwrightError) -> None:
        """Steps without an outcome, whose arrays are gone; the caller holds the lock."""
        self.losses += 1
        for result in results:
            if not result.is_followed:
                self._failed.append(result)
            result.finish(error)

    # ---- a server that ends ------------------------------------------------------------

    @property
    def draining(self) -> str:
        """What of the servers ends soon, and why; "" where nothing does."""
        drain = self._drain
        return "" if drain is None else drain[0]

    def check_draining(self) -> None:
        """Raises ServerDrainingError where the server begins no steps any more."""
        drain = self._drain
        if drain is not None:
            reason, until_s = drain
            raise ServerDrainingError(
                f"{reason}: no new step begins",
                remedy=f"saves and reads of arrays still work, for {max(until_s - time.monotonic(), 0):.0f} s at most: "
                "save now, and connect again or restore once it is back",
            )

    def cancel_all(self) -> None:
        """Asks the server to end all unfinished steps; raises nothing."""
        numbers = [result.number for _, result in list(self._unanswered)]
        try:
            if numbers:
                self._cancel(numbers)
        except ShardwrightError as error:
            _log.warning("could not cancel the steps under way: %s", error.message)

    def take_error(self) -> ShardwrightError | None:
        """The error of the first failed step since the last call, unless already raised.

        Steps failed by the same error, and sent before it was raised, are not mentioned again: neither dependents of
        the failed step, nor that step itself after a later handle raised its error.
        """
        failed, self._failed = self._failed, []
        for step in failed:
            if step.is_seen:
                self._met[str(step.error)] = self._next_number - 1
        first = next((step for step in failed if step.number > self._met.get(str(step.error), 0)), None)
        if first is None:
            return self._tell_recovery_error()
        first.is_seen = True
        self._met[str(first.error)] = self._next_number - 1
        return first.error

    def _tell_recovery_error(self) -> ShardwrightError | None:
        if self._is_recovery_error_told:
            return None
        self._is_recovery_error_told = True
        return self._recovery_error

    @property
    def has_lost_session(self) -> bool:
        """Whether the server has said that the session is over, or another client's."""
        return isinstance(self._failure, SessionError)

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._fail_all(SessionError("the session was closed", remedy="open a new one with connect()"))
            self._changed.notify_all()
            replies = self._replies
        self._outbox.put(None)
        replies.cancel()
        if threading.current_thread() is not self._thread:  # the garbage collector may close it from there
            self._thread.join(timeout=STREAM_END_S)

    # ---- the receiving thread -----------------------------------------------------

    def _open(self) -> None:
        """Opens a stream and sends the unanswered requests; the first message only names the session."""
        outbox: SimpleQueue[master_pb2.RunStepsRequest | None] = SimpleQueue()
        self._outbox.put(None)  # ends the request iterator of the stream before
        self._outbox = outbox
        protection = None if self.guard is None else self.guard.protection
        outbox.put(
            master_pb2.RunStepsRequest(
                session_id=self._session_id, live_arrays=self._list_computed(), protection=protection
            )
        )
        for request, _ in self._unanswered:
            outbox.put(request)
        self._opened_at_s = time.monotonic()
        self._drain = None  # a server that drains says so again
        self._replies = self._call(iter(outbox.get, None))

    def _list_computed(self) -> list[int]:
        """Arrays that are on the servers; not those that unanswered steps make."""
        unanswered = {array_id for _, result in self._unanswered for array_id in result.output_ids}
        return [array_id for array_id in self.journal.live if array_id not in unanswered]

    def _receive(self) -> None:
        while self._reopen(self._receive_until_broken()):
            pass

    def _receive_until_broken(self) -> grpc.RpcError | None:
        try:
            if any(item in wire.STREAM_IS_OPEN for item in self._replies.initial_metadata() or ()):
                with self._changed:
                    self._broken_since = None
                    self._heard_s = time.monotonic()
            for reply in self._replies:
                self._answer(reply)
        except grpc.RpcError as error:
            return error
        return None

    def _answer(self, reply: master_pb2.RunStepsReply) -> None:
        self._heard_s = time.monotonic()
        if reply.HasField("drain"):
            self._take_drain_notice(reply.drain)
            return
        if not reply.number:
            self._note(reply)
            return
        with self._changed:
            if not self._unanswered or self._unanswered[0][1].number != reply.number:
                return  # an answer to a step that was answered before the connection broke
            _, result = self._unanswered.popleft()
            self._broken_since = None
            error = wire.error_from_proto(reply.error) if reply.HasField("error") else None
            is_taken_over = error is not None and self._meet_failure(result, error)
            self._changed.notify_all()
        if is_taken_over:
            return
        for value in reply.values:
            data = np.frombuffer(value.data, np.uint8).view(to_dtype(value.type.element_type))
            result.values[value.array_id] = data.reshape(tuple(value.type.dimensions))
        result.run_s = reply.run_s
        result.traces = tuple(reply.traces)
        result.not_finite = tuple(reply.not_finite)
        self.losses += isinstance(error, _LOSSES)
        if error is not None and not result.is_followed:
            self._failed.append(result)
        result.finish(error)

    def _take_drain_notice(self, notice: master_pb2.DrainNotice) -> None:
        with self._changed:
            self._drain = None if notice.is_over else (notice.reason, time.monotonic() + notice.left_s)
            self._changed.notify_all()
        if notice.is_over:
            _log.warning("the node is gone; steps are taken again, and run once it is back")
        else:
            _log.warning("%s: save within %.0f s; no new step begins", notice.reason, notice.left_s)
        self.drain_heard(notice.is_over)

    def _meet_failure(self, result: StepResult, error: ShardwrightError) -> bool:
        """Whether the step will be sent again; else its outputs will not exist."""
        if self.guard is not None and self.guard.take_over(result, error):
            return True
        for array_id in result.output_ids:
            self.journal.live.pop(array_id, None)
        return False

    def _note(self, reply: master_pb2.RunStepsReply) -> None:
        """What the server says besides the outcomes of steps."""
        if reply.waiting_for:
            _log.warning("%s", reply.waiting_for)
        if reply.resend:
            missing_ids = set(reply.resend)
            with self._changed:
                uploads = [each for _, result in self._unanswered for each in result.uploads]
            self.write_again([each for each in uploads if each.array_id in missing_ids])
        self.lost_generations += reply.HasField("lost")
        if self.guard is not None and reply.HasField("lost"):
            self.guard.note_loss(wire.error_from_proto(reply.lost))
        if self.guard is not None and reply.HasField("snapshot"):
            self.guard.end_snapshot(reply.snapshot)

    def _reopen(self, error: grpc.RpcError | None) -> bool:
        """Opens a new stream; False after the session's end or a permanent error."""
        lived_s = time.monotonic() - self._opened_at_s
        if lived_s > self._reconnect_s:
            self._broken_since = None  # it had recovered
        if not self._is_closed:
            time.sleep(self._retry_pause_s)
        with self._changed:
            if self._is_closed:
                return False
            is_transient = error is None or error.code() in _TRANSIENT
            if is_transient and not self._has_been_broken_too_long():
                self._open()
                return True
            self._failure = self._final_error(error)
            self._fail_all(self._failure)
            self._changed.notify_all()
        return False

    def _has_been_broken_too_long(self) -> bool:
        now = time.monotonic()
        self._broken_since = self._broken_since or now
        return self._is_gone() or now - self._broken_since > self._reconnect_s

    def _final_error(self, error: grpc.RpcError | None) -> ShardwrightError:
        if error is None:
            return SessionError("the server ended it", remedy="connect again: shardwright.connect(…)")
        failure = wire.error_from_rpc(error)
        if not isinstance(failure, ServerUnavailableError):
            return failure
        now_s = time.monotonic()
        # A connection that carries nothing more is noticed after a while: it was lost at most so long before.
        unnoticed_s = (self._broken_since or now_s) - wire.KEEPALIVE_S
        return describe_outage(now_s - max(self._heard_s, unnoticed_s), self._reconnect_s, failure)

    def _fail_all(self, error: ShardwrightError) -> None:
        while self._unanswered:
            self._unanswered.popleft()[1].finish(error)

    def check_open(self) -> None:
        """Raises the error of an ended stream."""
        if self._is_closed:
            raise SessionError("the session is closed", remedy="open a new one with connect()")
        if self._failure is not None:
            raise self._failure
