"""A session's steps: programs run, arrays moved and made, in the order in which they are sent.

A step that failed is told of by the next call, unless somebody waits for it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from shardwright.client.array_store import ArrayStore
from shardwright.client.arrays import RemoteArray
from shardwright.client.calls import Call, CopyCall, ProgramCall
from shardwright.client.checks import NO_CHECKS, Checks
from shardwright.client.debug_lines import DebugLines
from shardwright.client.kept_state import KeptState
from shardwright.client.placement import Placement, parts_of
from shardwright.client.program_cache import ProgramCache
from shardwright.client.programs import StepProgram
from shardwright.client.recovery import Recovery, require_repeatable
from shardwright.client.steady_calls import SteadyCalls
from shardwright.client.step_requests import (
    BuiltRequest,
    HoistedConstants,
    build_move,
    build_request,
    list_arrays,
    list_moves,
)
from shardwright.client.step_result import StepResult
from shardwright.client.stream import InterruptedByRecoveryError, StepStream
from shardwright.plans.layouts import Layout
from shardwright.proto.v1 import master_pb2

T = TypeVar("T")


class Replannable(Protocol):
    """A step, as a recovery on other nodes sees it; see `Step`."""

    def current_state(self) -> Mapping[int, RemoteArray]:
        """The state after the last call, by flat argument number."""

    def plan_again_for_state(self) -> Sequence[Placement | None]:
        """Plans the step for other nodes; where its arguments lie then, by flat number."""


class StepQueue:
    """Of one session, which it keeps open.

    arrays, programs: what steps take, and what they run. lock: is held while a step is numbered and sent. recovery:
    looks after the session. kept, kept_updates: the state that it keeps, and the updates of what was resumed.
    debug_lines: says what steps say by `jax.debug`. step_sent: called after a program was sent, without the lock.
    layout_changes: of steps that moved the state which they update.
    """

    def __init__(
        self,
        arrays: ArrayStore,
        programs: ProgramCache,
        stream: StepStream,
        recovery: Recovery,
        calls: SteadyCalls,
        lock: threading.RLock,
    ) -> None:
        self.arrays = arrays
        self.programs = programs
        self.cluster = arrays.cluster
        self.recovery = recovery
        self.lock = lock
        self.kept: KeptState | None = None
        self.kept_updates = 0
        self.debug_lines = DebugLines()
        self.step_sent: Callable[[], None] = lambda: None
        self.layout_changes = 0
        self._stream = stream
        self._calls = calls
        self._constants = HoistedConstants()
        self._users: weakref.WeakSet[Any] = weakref.WeakSet()

    # ---- running ----------------------------------------------------------------------

    def run(
        self,
        program: StepProgram,
        leaves: Sequence[Any],
        output_mask: Sequence[bool] | None = None,
        *,
        is_traced: bool = False,
        checks: Checks = NO_CHECKS,
        timeout_s: float = 0.0,
        plan_again: Callable[[Sequence[Any]], StepProgram] | None = None,
    ) -> list[RemoteArray | None]:
        """Runs one step; returns handles at once, None at unwanted outputs; none of what `jax.debug` reads.

        Handles in `leaves` must have the layouts of `program.leaf_places`. timeout_s: the step's time limit, 0: the
        server's. plan_again: makes a program for such leaves on other nodes; default: one that is planned freely.
        Raises an earlier step's error not raised before. Raises ArrayError on a deleted handle, and
        InterruptedByRecoveryError where the program is for nodes that are gone.
        """
        with self.lock:
            self.raise_earlier_error()
            self._stream.check_draining()
            self.recovery.begin_again()
            if self.recovery.is_on:
                require_repeatable(program)
            if program.epoch != self.cluster.epoch:
                raise InterruptedByRecoveryError
            is_recorded = self.cluster.info.is_elastic and self.recovery.is_on
            if is_recorded:
                leaves = [np.array(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]
            built = self.build(program, leaves, output_mask, is_traced=is_traced, checks=checks)
            built.request.timeout_s = timeout_s
            call = None
            if is_recorded:
                identify = self.arrays.handles.identify
                call = ProgramCall(
                    program=program,
                    leaves=tuple(identify(leaf) if isinstance(leaf, RemoteArray) else leaf for leaf in leaves),
                    outputs=tuple(built.outputs),
                    is_traced=is_traced,
                    checks=checks,
                    timeout_s=timeout_s,
                    plan_again=plan_again,
                )
            result = self._send(program, leaves, built, call)
            results: list[RemoteArray | None] = [
                RemoteArray(self.arrays, spec, ids=ids, place=place, result=result) if ids else None
                for spec, ids, place in zip(program.lowered.results, built.outputs, program.outputs, strict=True)
            ]
            results = self._hear(program, result, results)
            if self.kept is not None:
                self.kept.follow(program, leaves, results)
            if self.recovery.is_due:
                self.recovery.take(self.arrays.releases.take)
        self.step_sent()
        return results

    def _hear(
        self, program: StepProgram, result: StepResult, results: list[RemoteArray | None]
    ) -> list[RemoteArray | None]:
        """The results that a caller sees; `debug_lines` says what the others are for."""
        lowered = program.lowered
        if lowered.debug.entries:
            arrays = [array for array in results[lowered.result_count :] if array is not None]
            self.debug_lines.add(result, lowered.debug, arrays)
        result.lines_said = self.debug_lines.latest()
        return results[: lowered.result_count]

    def build(
        self,
        program: StepProgram,
        leaves: Sequence[Any],
        output_mask: Sequence[bool] | None,
        *,
        is_traced: bool,
        checks: Checks,
    ) -> BuiltRequest:
        """The request of a program's step; what its arguments need is sent."""
        handles, places = list_moves(self.arrays, program, leaves)
        copies, _ = self._submit_move(handles, list(places.values()), is_kept=False)
        return build_request(
            self.arrays, program, leaves, output_mask,
            constants=self._constants, copies={number: ids[0] for number, ids in zip(places, copies, strict=True)},
            is_traced=is_traced, checks=checks,
        )  # fmt: skip

    def _send(
        self, program: StepProgram, leaves: Sequence[Any], built: BuiltRequest, call: ProgramCall | None
    ) -> StepResult:
        request, releases = built.request, self.arrays.releases
        request.released.extend(releases.take())
        try:
            if self.kept is not None and self.cluster.name:
                self.kept.put_into(request, program, leaves, built.outputs)
            return self._stream.submit(
                request,
                program.name,
                new_arrays=list_arrays(program, request),
                consumed=built.list_consumed(program),
                call=call,
                uploads=built.uploads,
            )
        except InterruptedByRecoveryError:
            releases.add(*request.released)
            if self.kept is not None:
                self.kept.forget_sent()
            raise
        finally:
            releases.add(*built.temporary)

    def submit(
        self,
        request: master_pb2.RunStepsRequest,
        name: str,
        *,
        is_followed: bool = False,
        new_arrays: Sequence[tuple[int, Layout]] = (),
        call: Call | None = None,
    ) -> StepResult:
        """Sends a step without a program: a save, followed by the caller, or one that makes arrays. Raises like `run`.

        new_arrays: those arrays. call: how they are made on other nodes.
        """
        with self.lock:
            if self._stream.replayer == threading.get_ident():
                return self._stream.submit(request, name, new_arrays=new_arrays)
            self.raise_earlier_error()
            self.recovery.begin_again()
            request.released.extend(self.arrays.releases.take())
            try:
                return self._stream.submit(
                    request,
                    name,
                    is_followed=is_followed,
                    is_repeated=not is_followed,
                    new_arrays=new_arrays,
                    call=call,
                )
            except InterruptedByRecoveryError:
                self.arrays.releases.add(*request.released)
                raise

    def move(self, handles: Sequence[RemoteArray], places: Sequence[Placement]) -> list[RemoteArray]:
        """Copies in the layouts of `places`; workers hand the pieces to each other. See `can_be_moved`."""
        copies, result = self._submit_move(handles, places, is_kept=True)
        return [
            RemoteArray(self.arrays, handle.spec, ids=ids, place=place, result=result)
            for handle, place, ids in zip(handles, places, copies, strict=True)
        ]

    def _submit_move(
        self, handles: Sequence[RemoteArray], places: Sequence[Placement], *, is_kept: bool
    ) -> tuple[list[tuple[int, ...]], StepResult | None]:
        """Ids of the copies' parts, and the step making them; none without a handle.

        is_kept: for longer than a step.
        """
        if not handles:
            return [], None
        request, new_ids = build_move(self.arrays, handles, places)
        layouts = [layout for place in places for layout, _ in parts_of(place)]
        arrays = list(zip(request.outputs, layouts, strict=True))
        call = None
        if is_kept:
            call = CopyCall(arrays=tuple(map(self.arrays.handles.identify, handles)), copies=tuple(new_ids))
        return new_ids, self.submit(request, f"a move of {len(handles)} arrays", new_arrays=arrays, call=call)

    def steadily(self, act: Callable[[], T]) -> T:
        """See `SteadyCalls.run`."""
        return self._calls.run(act)

    def raise_earlier_error(self) -> None:
        """Raises an earlier step's error that was not raised before."""
        self._calls.raise_earlier_error()

    # ---- losses -----------------------------------------------------------------------

    def protect(self, snapshot_every: int) -> None:
        """From now on the session survives losses of workers; a snapshot each so many steps."""
        with self.lock:
            if self.recovery.begin(snapshot_every):
                self.recovery.take(self.arrays.releases.take)

    def adopt_arrays(self, layouts: Mapping[int, Layout]) -> None:
        """Arrays that another client of the session made are this one's; a snapshot has them from the next one on."""
        with self.lock:
            self.recovery.adopt(layouts)
            if self.recovery.is_on:
                self.recovery.take(self.arrays.releases.take)

    def add_user(self, step: Replannable) -> None:
        """A step whose state is laid out anew after a recovery on other nodes."""
        self._users.add(step)

    def list_users(self) -> list[Replannable]:
        return list(self._users)

    def begin_replay(self) -> None:
        """All arrays are gone, and will be made again under other ids, by this thread, until `end_replay`."""
        self._stream.replayer = threading.get_ident()
        with self._stream.changed:
            self._stream.journal.live.clear()
        self._constants.forget()

    def wait_until_idle(self) -> None:
        """Returns when all steps that were sent are answered; raises the error of an ended stream."""
        self._stream.wait_until_idle()

    def end_replay(self) -> None:
        self._stream.replayer = 0

    def resend(
        self,
        request: master_pb2.RunStepsRequest,
        result: StepResult,
        new_arrays: Sequence[tuple[int, Layout]],
        consumed: Sequence[int],
    ) -> None:
        """Sends a step again, on other nodes."""
        self._stream.resend(request, result)
        with self._stream.changed:
            self._stream.journal.note(new_arrays, consumed)
