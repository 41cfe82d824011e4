"""A session's state on the servers (arrays, programs, steps), for the modules behind the user interface."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwright import __version__
from shardwright.builders.choices import PlanChoice
from shardwright.client.array_reader import ArrayReader
from shardwright.client.arrays import RemoteArray
from shardwright.client.checks import NO_CHECKS, Checks
from shardwright.client.connection import Dialer, MasterConnection, SessionInfo
from shardwright.client.node_failures import explain_node_failure
from shardwright.client.placement import Placement, RowParts, can_be_moved, parts_of, placement_of
from shardwright.client.recovery import Recovery, require_repeatable
from shardwright.client.stream import StepResult, StepStream
from shardwright.client.transfer import ArrayTransfer, Upload, as_bytes
from shardwright.errors import ServerUnavailableError, SessionError, ShardwrightError, WorkerLostError
from shardwright.options.plan_options import PlanOptions
from shardwright.plans.layouts import Layout
from shardwright.progress import PlanProgress
from shardwright.proto.v1 import master_pb2
from shardwright.protocol import wire

if TYPE_CHECKING:
    from shardwright.client.checkpoints import Save
    from shardwright.client.embedded import EmbeddedServer
    from shardwright.client.frontends.program import Program
    from shardwright.client.placement import ExecutableEntry
    from shardwright.client.program_cache import ProgramCache
    from shardwright.client.programs import ArgumentSource, StepProgram

_log = logging.getLogger("shardwright")

#: An argument of at most so many bytes rides along with its step, …
INLINE_BYTES = 64 << 10
#: … as long as all of a step stay below this.
INLINE_TOTAL_BYTES = 1 << 20
#: Seconds that a dropped array waits for a step to carry its release.
RELEASE_DELAY_S = 0.1
#: Seconds that workers have to come back after one was lost, where a call cannot do without them.
WORKER_RESTART_TIMEOUT_S = 120.0


class SessionState:
    """Arrays, steps and saves of one session; `Session`, its steps and its handles hold it.

    It is closed with the last of them, by `close`, or at this program's end. `lock` is held while a step is numbered
    and sent. server: the embedded server that ends with it, if any.
    """

    def __init__(self, address: str, dialer: Dialer, server: EmbeddedServer | None) -> None:
        self.server = server
        self._pid = os.getpid()
        self._save: Save | None = None
        self._saving = threading.Lock()
        is_gone: Callable[[], bool] = (lambda: False) if server is None else server.has_ended
        self.master = MasterConnection(address, dialer, is_gone)
        self.info: SessionInfo = self.master.open(__version__)
        self.lock = threading.RLock()
        self._transfer = ArrayTransfer(
            self.info, dialer, partial(explain_node_failure, self.master), self.master.retries
        )
        self._reader = ArrayReader(self._transfer)
        self._stream = StepStream(
            self.master.run_steps,
            self.info.session_id,
            self.master.cancel_steps,
            reconnect_s=self.info.grace_s,
            is_gone=is_gone,
        )
        self.recovery = Recovery(self.master, self._stream, self._transfer.put)
        self._array_ids = itertools.count(1)
        self._dropped: SimpleQueue[int | None] = SimpleQueue()  # its put() may be called by the garbage collector
        self.is_closed = False
        self._loader: ProgramCache | None = None
        self.layout_changes = 0  # of steps that moved the state which they update
        self._constant_ids: dict[ArgumentSource, tuple[int, int]] = {}  # losses of workers before, id
        threading.Thread(target=_release_when_idle, args=(weakref.ref(self), self._dropped), daemon=True).start()
        _open_states.add(self)

    # ---- closing ----------------------------------------------------------------------

    def close(self) -> None:
        """See `Session.close`."""
        error = self._close()
        if error is not None:
            raise error

    def close_quietly(self) -> None:
        """Closes without raising, when no caller is left."""
        error = self._close()
        if error is not None:
            _log.error("the last save failed: %s", error)

    def _close(self) -> ShardwrightError | None:
        """The error of a save, not raised before."""
        if self.is_closed or os.getpid() != self._pid:  # a forked child leaves its parent's session alone
            return None
        error = self._take_save_error()
        self.is_closed = True
        self._dropped.put(None)
        self._stream.close()
        self._transfer.close()
        self.master.close()
        if self.server is not None:
            self.server.close()
        return error

    def __del__(self) -> None:
        if hasattr(self, "_dropped"):  # else it was never opened
            self.close_quietly()

    @property
    def draining(self) -> str:
        """See `Session.draining`."""
        return self._stream.draining

    # ---- programs ---------------------------------------------------------------------

    def prepare(
        self,
        lowered: Program,
        options: PlanOptions,
        progress: Callable[[PlanProgress], None] | None = None,
        devices: range | None = None,
    ) -> StepProgram:
        """A program ready to run, planned under these options; see `ProgramCache.prepare`."""
        return self.prepare_fastest(lowered, (PlanChoice(options=options),), progress, devices)

    def prepare_fastest(
        self,
        lowered: Program,
        choices: Sequence[PlanChoice],
        progress: Callable[[PlanProgress], None] | None = None,
        devices: range | None = None,
        *,
        takes_first: bool = False,
    ) -> StepProgram:
        """A program ready to run, planned the fastest of some ways; see `ProgramCache.prepare`."""
        return self.program_cache.prepare(lowered, choices, progress, devices, takes_first=takes_first)

    @property
    def program_cache(self) -> ProgramCache:
        """What is ready to run."""
        from shardwright.client.program_cache import ProgramCache  # loads JAX

        with self.lock:
            self._loader = self._loader or ProgramCache(self)
            return self._loader

    # ---- running ----------------------------------------------------------------------

    def run(
        self,
        program: StepProgram,
        leaves: Sequence[Any],
        wanted: Sequence[bool] | None = None,
        *,
        is_traced: bool = False,
        checks: Checks = NO_CHECKS,
        timeout_s: float = 0.0,
    ) -> list[RemoteArray | None]:
        """Runs one step; returns handles at once, None at unwanted outputs.

        Handles in `leaves` must have the layouts of `program.leaf_places`. timeout_s: the step's time limit, 0: the
        server's. Raises an earlier step's error not raised before. Raises ArrayError on a deleted handle.
        """
        with self.lock:
            self._raise_unreported()
            self._stream.check_draining()
            if self.recovery.is_on:
                require_repeatable(program)
            request = master_pb2.RunStepsRequest(
                executable_id=program.executable_id,
                trace=is_traced,
                check_nans=checks.nans,
                check_infs=checks.infs,
                timeout_s=timeout_s,
            )
            next_id = self._array_ids.__next__
            result_ids = [next_id() if wanted is None or wanted[entry.number] else 0 for entry in program.results]
            outputs: list[tuple[int, ...]] = [()] * len(program.outputs)
            for array_id, entry in zip(result_ids, program.results, strict=True):
                if array_id:
                    outputs[entry.number] += (array_id,)
            temporary: list[int] = []
            try:
                request.arguments.extend(self._send_arguments(program, leaves, request, temporary))
                request.outputs.extend(result_ids)
                request.read_back.extend(outputs[number][0] for number in program.read_back if outputs[number])
                request.released.extend(self._take_dropped())
                result = self._stream.submit(
                    request,
                    program.name,
                    made=self._list_arrays(program, request),
                    consumed=[request.arguments[number] for number in program.consumed],
                )
            finally:
                for array_id in temporary:
                    self._dropped.put(array_id)
            if self.recovery.is_due:
                self.recovery.take(self._take_dropped)
        results = program.lowered.results
        return [
            RemoteArray(self, spec, ids=ids, place=place, result=result) if ids else None
            for spec, ids, place in zip(results, outputs, program.outputs, strict=True)
        ]

    @staticmethod
    def _list_arrays(program: StepProgram, request: master_pb2.RunStepsRequest) -> list[tuple[int, Layout]]:
        """List the arrays uploaded with a step, and its outputs."""
        inline = {array.array_id for array in request.inline_arguments}
        arrays = [
            (array_id, source.entry.layout)
            for array_id, source in zip(request.arguments if inline else (), program.sources, strict=False)
            if array_id in inline
        ]
        outputs = zip(request.outputs, program.results, strict=True)
        return arrays + [(array_id, entry.layout) for array_id, entry in outputs if array_id]

    def _send_arguments(
        self,
        program: StepProgram,
        leaves: Sequence[Any],
        request: master_pb2.RunStepsRequest,
        temporary: list[int],
    ) -> list[int]:
        """Ids of all arguments of the executable; ids of this step's own copies are added to `temporary`."""
        from shardwright.client.array_specs import host_value
        from shardwright.client.placement import part_of

        ids: list[int] = []
        uploads: list[Upload] = []
        inline_bytes = 0
        specs = program.lowered.leaf_specs
        copies = self._copies(program, leaves)
        constants = self._constants(program)
        for number, source in enumerate(program.sources):
            if source.constant is not None:
                ids.append(constants[source])
                continue
            leaf = leaves[source.leaf]
            if isinstance(leaf, RemoteArray):
                array_id = copies.get(number) or self._id_for(leaf, source.entry)
                if array_id is not None:
                    ids.append(array_id)
                    if number in copies:
                        temporary.append(array_id)
                    continue
                leaf = np.asarray(leaf)
            value = part_of(host_value(leaf, specs[source.leaf]), source.entry)
            array_id = next(self._array_ids)
            ids.append(array_id)
            temporary.append(array_id)
            if value.nbytes <= INLINE_BYTES and inline_bytes + value.nbytes <= INLINE_TOTAL_BYTES:
                inline_bytes += value.nbytes
                request.inline_arguments.add(array_id=array_id, layout=source.proto, data=bytes(as_bytes(value)))
            else:
                uploads.append(Upload(array_id=array_id, value=value, layout=source.entry.layout))
        self.recovery.put(uploads)
        return ids

    def _constants(self, program: StepProgram) -> dict[ArgumentSource, int]:
        """Ids of hoisted constants, uploaded once, and again after workers were lost."""
        sources = [source for source in program.sources if source.constant is not None]
        losses = self._stream.losses
        missing = [source for source in sources if self._constant_ids.get(source, (-1, 0))[0] != losses]
        lost = [self._constant_ids[source][1] for source in missing if source in self._constant_ids]
        if lost:
            self.release_later(*lost)
            self._await_workers()
        values = [(source.constant, source.entry.layout) for source in missing if source.constant is not None]
        for source, (array_id,) in zip(missing, self.upload(values), strict=True):
            self._constant_ids[source] = (losses, array_id)
        return {source: self._constant_ids[source][1] for source in sources}

    def _copies(self, program: StepProgram, leaves: Sequence[Any]) -> dict[int, int]:
        """Arrays, by source, of handles stored on one stage and read on another; workers hand them over."""
        handles: list[RemoteArray] = []
        places: dict[int, Placement] = {}
        for number, source in enumerate(program.sources):
            leaf = leaves[source.leaf] if source.leaf >= 0 else None
            if isinstance(leaf, RemoteArray) and self._id_for(leaf, source.entry) is None and leaf._place is not None:
                wanted = placement_of(source.entry)
                if can_be_moved(leaf._place, wanted):
                    handles.append(leaf)
                    places[number] = wanted
        copy_ids, _ = self._submit_move(handles, list(places.values()))
        return {number: ids[0] for number, ids in zip(places, copy_ids, strict=True)}

    def _id_for(self, handle: RemoteArray, entry: ExecutableEntry) -> int | None:
        """The handle's array for the entry, or None when its layout differs."""
        ids, place = self.usable_ids(handle), handle._place
        if isinstance(place, RowParts):
            return ids[place.bounds.index(entry.rows)] if entry.rows in place.bounds else None
        return ids[0] if place is entry.layout else None

    def submit(
        self,
        request: master_pb2.RunStepsRequest,
        name: str,
        *,
        is_followed: bool = False,
        made: Sequence[tuple[int, Layout]] = (),
    ) -> StepResult:
        """Sends a step without a program: a save, followed by the caller, or one that makes arrays. Raises like `run`.

        made: those arrays.
        """
        with self.lock:
            self._raise_unreported()
            request.released.extend(self._take_dropped())
            return self._stream.submit(request, name, is_followed=is_followed, is_repeated=not is_followed, made=made)

    def protect(self, snapshot_every: int) -> None:
        """From now on the session survives losses of workers; a snapshot each so many steps."""
        with self.lock:
            if self.recovery.begin(snapshot_every):
                self.recovery.take(self._take_dropped)

    def move(self, handles: Sequence[RemoteArray], places: Sequence[Placement]) -> list[RemoteArray]:
        """Copies in the layouts of `places`; workers hand the pieces to each other. See `can_be_moved`."""
        copy_ids, result = self._submit_move(handles, places)
        return [
            RemoteArray(self, handle.spec, ids=ids, place=place, result=result)
            for handle, place, ids in zip(handles, places, copy_ids, strict=True)
        ]

    def _submit_move(
        self, handles: Sequence[RemoteArray], places: Sequence[Placement]
    ) -> tuple[list[tuple[int, ...]], StepResult | None]:
        """Ids of the copies' parts, and the step making them; none without a handle."""
        if not handles:
            return [], None
        request = master_pb2.RunStepsRequest()
        new_ids = [tuple(self.new_id() for _ in parts_of(place)) for place in places]
        for handle, place, ids in zip(handles, places, new_ids, strict=True):
            assert handle._place is not None
            request.move.arrays.add(sources=_to_moved_parts(handle._place), targets=_to_moved_parts(place))
            request.arguments.extend(self.usable_ids(handle))
            request.outputs.extend(ids)
        layouts = [layout for place in places for layout, _ in parts_of(place)]
        arrays = list(zip(request.outputs, layouts, strict=True))
        return new_ids, self.submit(request, f"a move of {len(handles)} arrays", made=arrays)

    def new_id(self) -> int:
        """A new array id, for a step's result."""
        return next(self._array_ids)

    def usable_ids(self, handle: RemoteArray) -> tuple[int, ...]:
        """Ids of a handle's parts, readable by a step. Raises the error behind an unusable handle."""
        if handle._state is not self:
            raise SessionError("an array of another session was passed to a step", remedy="pass np.asarray(handle)")
        if handle._deleted or (handle._result is not None and handle._result.error is not None):
            handle._require_ready()
        return handle._ids

    def raise_earlier_error(self) -> None:
        """Raises an earlier step's error that was not raised before."""
        with self.lock:
            self._raise_unreported()

    def _raise_unreported(self) -> None:
        self.require_open()
        error = self._stream.take_error()
        if error is not None:
            raise error

    # ---- arrays -----------------------------------------------------------------------

    def part_of_cluster(self, layout: Layout) -> range | None:
        """The devices of a layout, or None: the whole cluster."""
        return None if len(layout.devices) == self.info.device_count else layout.devices

    def upload(self, values: Sequence[tuple[np.ndarray, Placement]]) -> list[tuple[int, ...]]:
        """Ids of new arrays with these contents, one per part of the placement."""
        new_ids, uploads = [], []
        for value, place in values:
            parts = [
                Upload(array_id=self.new_id(), value=part, layout=layout)
                for part, layout in zip(_parts_at(value, place), (layout for layout, _ in parts_of(place)), strict=True)
            ]
            new_ids.append(tuple(part.array_id for part in parts))
            uploads += parts
        try:
            self.recovery.put(uploads)
        except ShardwrightError:
            self.release_later(*(upload.array_id for upload in uploads))
            raise
        return new_ids

    def announce(self, handle: RemoteArray) -> None:
        """It will be read; see `ArrayReader`."""
        self._reader.announce(handle)

    def group_with_announced(self, handle: RemoteArray) -> dict[int, Placement | None]:
        """A pending handle, and the announced pending ones, in the form of `Pending.materialize`."""
        return {
            id(pending): None for pending in (handle, *self._reader.list_announced()) if pending._pending is not None
        }

    def fetch(self, handle: RemoteArray) -> np.ndarray:
        """Contents of a computed array."""
        self.require_open()
        return self.recovery.retry(lambda: self._reader.read(handle))

    def ask_first_node(self, method: str, request: Any) -> Any:
        """The reply to a call of the Checkpoints service; waits for workers that are restarting."""
        self.require_open()
        deadline_s = time.monotonic() + WORKER_RESTART_TIMEOUT_S
        while True:
            try:
                return self._transfer.ask_first_node(method, request)
            except (ServerUnavailableError, SessionError):
                status = self.master.status()  # raises where the master is gone as well
                is_mine = any(self.info.session_id.startswith(other.session_id) for other in status.sessions)
                if not is_mine or time.monotonic() > deadline_s:
                    raise
                time.sleep(0.5)

    def _await_workers(self) -> None:
        """Waits for restarting workers."""
        deadline_s = time.monotonic() + WORKER_RESTART_TIMEOUT_S
        while time.monotonic() < deadline_s:
            if all(node.state == "ready" for node in self.master.status().nodes):
                return
            time.sleep(0.2)

    def release_later(self, *array_ids: int) -> None:
        """Frees arrays with the next step, or soon without one. Safe in destructors."""
        for array_id in array_ids:
            self._dropped.put(array_id)

    def _take_dropped(self) -> list[int]:
        """Ids to free now; the caller holds the lock."""
        dropped_ids: list[int] = []
        try:
            while (array_id := self._dropped.get_nowait()) is not None:
                dropped_ids.append(array_id)
        except Empty:
            return dropped_ids
        self._dropped.put(None)  # the session is being closed: that is for the releasing thread
        return dropped_ids

    def release_dropped(self, first: int) -> None:
        """Frees dropped arrays by a call of its own, unless unfinished steps may still read them."""
        with self.lock:
            if self.is_closed:
                return
            if not self._stream.is_idle:
                self._dropped.put(first)  # looked at again in a moment
                return
            ids = [first, *self._take_dropped()]
            with self._stream.changed:
                self._stream.journal.add_release(ids)
            try:
                self.master.release(ids)
            except ShardwrightError:
                if not self.is_closed:  # else they go with the session
                    _log.warning("could not release %d arrays", len(ids))

    # ---- checkpoints ------------------------------------------------------------------

    def save(self, tree: Any, directory: str | os.PathLike[str], *, step: int | None, max_to_keep: int | None) -> Save:
        """See `Session.save`."""
        from shardwright.client import checkpoints

        self.require_open()
        with self._saving:
            if (error := self._take_save_error()) is not None:
                raise error
            self._save = checkpoints.save(self, tree, directory, step=step, max_to_keep=max_to_keep)
            return self._save

    def _take_save_error(self) -> ShardwrightError | None:
        """Of the last save, unless it was raised before, or was lost with workers whose loss the session survives."""
        error = self._save.take_unreported_error() if self._save is not None else None
        if isinstance(error, WorkerLostError) and self.recovery.is_on:
            _log.warning("a checkpoint was not written: %s", error.message)
            return None
        return error

    def restore(self, directory: str | os.PathLike[str], *, step: int | None, like: Any) -> Any:
        """See `Session.restore`."""
        from shardwright.client import checkpoints

        self._settle_save()
        return checkpoints.restore(self, directory, step=step, like=like)

    def list_checkpoints(self, directory: str | os.PathLike[str]) -> tuple[int, ...]:
        """See `Session.checkpoints`."""
        from shardwright.client import checkpoints

        self._settle_save()
        return checkpoints.checkpoints(self, directory)

    def _settle_save(self) -> None:
        """Waits for an unfinished save."""
        self.require_open()
        if self._save is not None:
            self._save.settle()

    def require_open(self) -> None:
        if self.is_closed:
            raise SessionError("the session is closed", remedy="open a new one with connect()")


def _parts_at(value: np.ndarray, place: Placement) -> list[np.ndarray]:
    return [value[start:stop] for start, stop in place.bounds] if isinstance(place, RowParts) else [value]


def _to_moved_parts(place: Placement) -> list[master_pb2.MovedPart]:
    return [master_pb2.MovedPart(layout=wire.layout_to_proto(layout), first_row=row) for layout, row in parts_of(place)]


def _release_when_idle(state_ref: weakref.ref[SessionState], dropped: SimpleQueue[int | None]) -> None:
    while True:
        array_id = dropped.get()
        if array_id is None:
            return
        time.sleep(RELEASE_DELAY_S)
        state = state_ref()
        if state is None:
            return
        state.release_dropped(array_id)
        del state


_open_states: weakref.WeakSet[SessionState] = weakref.WeakSet()


@atexit.register
def _close_states() -> None:
    for state in list(_open_states):
        state.close_quietly()
