"""A session's state on the servers (arrays, programs, steps), for the modules behind the user interface."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from shardwright.builders.choices import PlanChoice
from shardwright.client.array_reader import ArrayReader
from shardwright.client.arrays import RemoteArray
from shardwright.client.checks import NO_CHECKS, Checks
from shardwright.client.connection import Dialer, MasterConnection, NodeInfo, SessionInfo, team_of
from shardwright.client.last_save import LastSave
from shardwright.client.node_failures import explain_node_failure
from shardwright.client.placement import Placement, RowParts, parts_of
from shardwright.client.recovery import Recovery, require_repeatable
from shardwright.client.releases import Releases
from shardwright.client.relocation import Call, CopyCall, KnownArray, Name, ProgramCall
from shardwright.client.step_requests import HoistedConstants, build_move, build_request, list_arrays
from shardwright.client.stream import InterruptedByRecoveryError, StepResult, StepStream
from shardwright.client.transfer import ArrayTransfer, Upload
from shardwright.errors import (
    ClusterChangedError,
    ServerUnavailableError,
    SessionError,
    ShardwrightError,
)
from shardwright.options.plan_options import PlanOptions
from shardwright.package import VERSION
from shardwright.plans.layouts import Layout
from shardwright.progress import PlanProgress
from shardwright.proto.v1 import master_pb2

if TYPE_CHECKING:
    from shardwright.client.automatic_saves import AutomaticSaves, CheckpointPolicy
    from shardwright.client.checkpoints import Save
    from shardwright.client.embedded import EmbeddedServer
    from shardwright.client.frontends.program import Program
    from shardwright.client.kept import KeptState
    from shardwright.client.program_cache import ProgramCache
    from shardwright.client.programs import StepProgram
    from shardwright.client.step import Step

T = TypeVar("T")

_log = logging.getLogger("shardwright")

#: Seconds until a call that met other nodes begins again.
CHANGE_PAUSE_S = 0.2

#: Seconds that workers have to come back after one was lost, where a call cannot do without them.
WORKER_RESTART_TIMEOUT_S = 120.0


class SessionState:
    """Arrays, steps and saves of one session; `Session`, its steps and its handles hold it.

    It is closed with the last of them, by `close`, or at this program's end. `lock` is held while a step is numbered
    and sent. server: the embedded server that ends with it, if any.
    """

    def __init__(self, address: str, dialer: Dialer, server: EmbeddedServer | None, name: str = "") -> None:
        self.server = server
        self._pid = os.getpid()
        is_gone: Callable[[], bool] = (lambda: False) if server is None else server.has_ended
        self.master = MasterConnection(address, dialer, is_gone)
        self.info: SessionInfo = self.master.open(VERSION, name)
        self.name = name
        self.kept: KeptState | None = None
        self.kept_updates = 0  # of what was resumed
        self.automatic_saves: AutomaticSaves | None = None
        taken_up = self.master.taken_up
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
            first_number=taken_up.last_step + 1 if taken_up is not None else 1,
            is_gone=is_gone,
        )
        self._stream.drain_heard = partial(_meet_drain, weakref.ref(self))
        self._stream.write_again = partial(_write_again, self._transfer)
        self.recovery = Recovery(self.master, self._stream, self._transfer.put, weakref.ref(self))
        self.last_save = LastSave(self.recovery)
        self.epoch = 0  # number of clusters, of other nodes, that the session has had before
        self._followed_losses, self._is_outdated = 0, False
        self._handles: weakref.WeakValueDictionary[int, RemoteArray] = weakref.WeakValueDictionary()
        self._steps: weakref.WeakSet[Step] = weakref.WeakSet()
        self._array_ids = itertools.count(taken_up.next_array_id if taken_up is not None else 1)
        self.is_closed = False
        self._loader: ProgramCache | None = None
        self.layout_changes = 0  # of steps that moved the state which they update
        self.constants = HoistedConstants()
        self.releases = Releases(self.lock, self._stream, self.master)
        _open_states.add(self)

    # ---- closing ----------------------------------------------------------------------

    def close(self) -> None:
        """See `Session.close`."""
        error = self._close()
        if error is not None:
            raise error

    def leave(self) -> None:
        """See `Session.leave`."""
        error = self._close(leaves=True)
        if error is not None:
            raise error

    def close_quietly(self) -> None:
        """Closes without raising, when no caller is left; a session with a name waits for the next program."""
        error = self._close(leaves=bool(self.name))
        if error is not None:
            _log.error("the last save failed: %s", error)

    def _close(self, *, leaves: bool = False) -> ShardwrightError | None:
        """The error of a save, not raised before. leaves: the session stays on the servers."""
        if self.is_closed or os.getpid() != self._pid:  # a forked child leaves its parent's session alone
            return None
        if self.automatic_saves is not None:
            self.automatic_saves.settle()
        error = self.last_save.take_error()
        leaves = leaves or (bool(self.name) and self._stream.has_lost_session)  # a successor's is not ours to close
        self.is_closed = True
        self.releases.close()
        self._stream.close()
        self._transfer.close()
        self.master.close(leaves=leaves)
        if self.server is not None:
            self.server.close()
        return error

    def __del__(self) -> None:
        if hasattr(self, "releases"):  # else it was never opened
            self.close_quietly()

    @property
    def draining(self) -> str:
        """See `Session.draining`."""
        return self._stream.draining

    @property
    def losses(self) -> int:
        """Number of losses of workers so far, each counted at least once."""
        return self._stream.losses + self._stream.lost_generations

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
        plan_again: Callable[[Sequence[Any]], StepProgram] | None = None,
    ) -> list[RemoteArray | None]:
        """Runs one step; returns handles at once, None at unwanted outputs.

        Handles in `leaves` must have the layouts of `program.leaf_places`. timeout_s: the step's time limit, 0: the
        server's. plan_again: makes a program for such leaves on other nodes; default: one that is planned freely.
        Raises an earlier step's error not raised before. Raises ArrayError on a deleted handle, and
        InterruptedByRecoveryError where the program is for nodes that are gone.
        """
        with self.lock:
            self._raise_unreported()
            self._stream.check_draining()
            self.recovery.begin_again()
            if self.recovery.is_on:
                require_repeatable(program)
            if program.epoch != self.epoch:
                raise InterruptedByRecoveryError
            is_recorded = self.info.is_elastic and self.recovery.is_on
            if is_recorded:
                leaves = [np.array(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]
            built = build_request(self, program, leaves, wanted, is_traced=is_traced, checks=checks)
            request = built.request
            request.timeout_s = timeout_s
            call = None
            if is_recorded:
                call = ProgramCall(
                    program=program,
                    leaves=tuple(self.know(leaf) if isinstance(leaf, RemoteArray) else leaf for leaf in leaves),
                    outputs=tuple(built.outputs),
                    is_traced=is_traced,
                    checks=checks,
                    timeout_s=timeout_s,
                    plan_again=plan_again or partial(self._plan_freely, program.lowered),
                )
            request.released.extend(self.releases.take())
            try:
                if self.kept is not None and self.name:
                    self.kept.put_into(request, program, leaves, built.outputs)
                result = self._stream.submit(
                    request,
                    program.name,
                    made=list_arrays(program, request),
                    consumed=built.list_consumed(program),
                    call=call,
                    uploads=built.uploads,
                )
            except InterruptedByRecoveryError:
                self.releases.add(*request.released)
                if self.kept is not None:
                    self.kept.forget_sent()
                raise
            finally:
                self.releases.add(*built.temporary)
            results = [
                RemoteArray(self, spec, ids=ids, place=place, result=result) if ids else None
                for spec, ids, place in zip(program.lowered.results, built.outputs, program.outputs, strict=True)
            ]
            if self.kept is not None:
                self.kept.follow(program, leaves, results)
            if self.recovery.is_due:
                self.recovery.take(self.releases.take)
        if self.automatic_saves is not None:
            self.automatic_saves.save_if_due()
        return results

    def submit(
        self,
        request: master_pb2.RunStepsRequest,
        name: str,
        *,
        is_followed: bool = False,
        made: Sequence[tuple[int, Layout]] = (),
        call: Call | None = None,
    ) -> StepResult:
        """Sends a step without a program: a save, followed by the caller, or one that makes arrays. Raises like `run`.

        made: those arrays. call: how they are made on other nodes.
        """
        with self.lock:
            if self._stream.replayer == threading.get_ident():
                return self._stream.submit(request, name, made=made)
            self._raise_unreported()
            self.recovery.begin_again()
            request.released.extend(self.releases.take())
            try:
                return self._stream.submit(
                    request, name, is_followed=is_followed, is_repeated=not is_followed, made=made, call=call
                )
            except InterruptedByRecoveryError:
                self.releases.add(*request.released)
                raise

    def protect(self, snapshot_every: int) -> None:
        """From now on the session survives losses of workers; a snapshot each so many steps."""
        with self.lock:
            if self.recovery.begin(snapshot_every):
                self.recovery.take(self.releases.take)

    def adopt_arrays(self, layouts: Mapping[int, Layout]) -> None:
        """Arrays that another client of the session made are this one's; a snapshot has them from the next one on."""
        with self.lock:
            self.recovery.adopt(layouts)
            if self.recovery.is_on:
                self.recovery.take(self.releases.take)

    def move(self, handles: Sequence[RemoteArray], places: Sequence[Placement]) -> list[RemoteArray]:
        """Copies in the layouts of `places`; workers hand the pieces to each other. See `can_be_moved`."""
        copy_ids, result = self.submit_move(handles, places)
        return [
            RemoteArray(self, handle.spec, ids=ids, place=place, result=result)
            for handle, place, ids in zip(handles, places, copy_ids, strict=True)
        ]

    def submit_move(
        self, handles: Sequence[RemoteArray], places: Sequence[Placement], *, is_kept: bool = True
    ) -> tuple[list[tuple[int, ...]], StepResult | None]:
        """Ids of the copies' parts, and the step making them; none without a handle.

        is_kept: for longer than a step.
        """
        if not handles:
            return [], None
        request, new_ids = build_move(self, handles, places)
        layouts = [layout for place in places for layout, _ in parts_of(place)]
        arrays = list(zip(request.outputs, layouts, strict=True))
        call = CopyCall(arrays=tuple(map(self.know, handles)), copies=tuple(new_ids)) if is_kept else None
        return new_ids, self.submit(request, f"a move of {len(handles)} arrays", made=arrays, call=call)

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

    # ---- other nodes ------------------------------------------------------------------

    def steadily(self, act: Callable[[], T]) -> T:
        """The result of `act`, which begins again where the nodes change meanwhile; then it must have sent nothing."""
        if not self.info.is_elastic or self._stream.replayer == threading.get_ident():
            return act()
        while True:
            self.recovery.wait_until_over()
            self._follow_nodes()
            try:
                return act()
            except InterruptedByRecoveryError:
                continue
            except ClusterChangedError:
                self._is_outdated = True
                time.sleep(CHANGE_PAUSE_S)

    def _follow_nodes(self) -> None:
        """After a loss that the session does not survive: find out which nodes there are now."""
        lost = self._stream.lost_generations
        if self.recovery.is_on or (lost == self._followed_losses and not self._is_outdated):
            return
        self.raise_earlier_error()
        self.take_nodes(self.recovery.await_ready("")[1])
        self._followed_losses, self._is_outdated = lost, False

    def take_nodes(self, nodes: tuple[NodeInfo, ...]) -> None:
        """The nodes of the cluster as it runs now; where they are others, what was planned for those before is void."""
        if nodes == self.info.nodes:
            return
        with self._stream.changed:
            is_other = [(n.index, n.devices) for n in nodes] != [(n.index, n.devices) for n in self.info.nodes]
            self.info = self.master.info = replace(self.info, nodes=nodes)
            self._transfer.change_nodes(self.info)
            if is_other:
                self.epoch += 1
                self._stream.journal.epoch = self.epoch
                self.constants.forget()
                _log.warning(
                    "the cluster has %d devices now, of node %s",
                    self.info.device_count, ", ".join(str(node.index) for node in nodes),
                )  # fmt: skip

    def _plan_freely(self, lowered: Program, leaves: Sequence[Any]) -> StepProgram:
        del leaves
        names = PlanOptions(argument_names=lowered.argument_names, output_names=lowered.output_names)
        return self.prepare(lowered, names)

    def know(self, handle: RemoteArray) -> KnownArray:
        """A handle's array, for a recovery on other nodes."""
        assert handle._place is not None
        return KnownArray(name=self.name_of(handle._ids), spec=handle.spec, ids=handle._ids, place=handle._place)

    def know_all(self) -> dict[int, KnownArray]:
        """All arrays that have handles, by the first ids of their names."""
        if not self.info.is_elastic:
            return {}
        known = [self.know(handle) for handle in self.list_handles()]
        return {array.name[0]: array for array in known}

    def name_of(self, ids: tuple[int, ...]) -> Name:
        return self._stream.journal.names.get(ids[0], ids) if ids else ()

    def note_handle(self, handle: RemoteArray) -> None:
        """A handle has got these ids."""
        if self.info.is_elastic:
            self._handles[handle._ids[0]] = handle

    def list_handles(self) -> list[RemoteArray]:
        """The user's handles of arrays on the servers."""
        handles = [reference() for reference in self._handles.valuerefs()]
        return [
            handle
            for handle in handles
            if handle is not None and handle._ids and not handle._deleted and handle._place is not None
        ]

    def note_step(self, step: Step) -> None:
        self._steps.add(step)

    def list_steps(self) -> list[Step]:
        return list(self._steps)

    def begin_relocation(self) -> None:
        """All arrays are gone, and will be made again under other ids."""
        with self._stream.changed:
            self._stream.journal.live.clear()
        self.constants.forget()

    def rename(self, names: dict[int, Name]) -> None:
        """The names of all arrays that are known by another one than their ids."""
        with self._stream.changed:
            self._stream.journal.names = names

    def resend(
        self,
        request: master_pb2.RunStepsRequest,
        result: StepResult,
        made: Sequence[tuple[int, Layout]],
        consumed: Sequence[int],
    ) -> None:
        """Sends a step again, on other nodes."""
        self._stream.resend(request, result)
        with self._stream.changed:
            self._stream.journal.note(made, consumed)

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
            self.releases.add(*(upload.array_id for upload in uploads))
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
        first = self.info.nodes[0].index
        return self.ask_nodes("Checkpoints", method, {first: request})[first]

    def ask_nodes(self, service: str, method: str, requests: Mapping[int, Any]) -> dict[int, Any]:
        """The replies to calls of a service at data ports, by node; waits for workers that are restarting."""
        self.require_open()
        deadline_s = time.monotonic() + WORKER_RESTART_TIMEOUT_S
        while True:
            try:
                return self._transfer.ask_nodes(service, method, requests)
            except (ServerUnavailableError, SessionError):
                self.master.require_session(self.master.status())  # raises where the master is gone as well
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.5)

    def await_workers(self) -> None:
        """Waits for restarting workers."""
        deadline_s = time.monotonic() + WORKER_RESTART_TIMEOUT_S
        while time.monotonic() < deadline_s:
            if all(node.state == "ready" for node in team_of(self.master.status())):
                return
            time.sleep(0.2)

    # ---- checkpoints ------------------------------------------------------------------

    def save(self, tree: Any, directory: str | os.PathLike[str], *, step: int | None, max_to_keep: int | None) -> Save:
        """See `Session.save`."""
        from shardwright.client import checkpoints

        def save() -> Save:
            return checkpoints.save(self, tree, directory, step=step, max_to_keep=max_to_keep)

        self.require_open()
        return self.steadily(lambda: self.last_save.begin(save))

    def save_kept(self, kept: KeptState, policy: CheckpointPolicy, before: int, *, waits: bool) -> Save | None:
        """Saves the state that is kept, under the number of its updates and `before`.

        waits: for a save under way; else None is returned where there is one.
        """
        from shardwright.client import checkpoints

        def save() -> Save:
            with self.lock:
                return checkpoints.save_leaves(
                    self, kept.tree, kept.leaves, policy.directory,
                    step=kept.updates + before, max_to_keep=policy.max_to_keep,
                )  # fmt: skip

        self.require_open()
        begin = self.last_save.begin if waits else self.last_save.begin_if_done
        return self.steadily(lambda: begin(save))

    def restore(self, directory: str | os.PathLike[str], *, step: int | None, like: Any) -> Any:
        """See `Session.restore`."""
        from shardwright.client import checkpoints

        self.require_open()
        self.last_save.settle()
        return checkpoints.restore(self, directory, step=step, like=like)

    def list_checkpoints(self, directory: str | os.PathLike[str]) -> tuple[int, ...]:
        """See `Session.checkpoints`."""
        from shardwright.client import checkpoints

        self.require_open()
        self.last_save.settle()
        return checkpoints.checkpoints(self, directory)

    def require_open(self) -> None:
        if self.is_closed:
            raise SessionError("the session is closed", remedy="open a new one with connect()")


def _parts_at(value: np.ndarray, place: Placement) -> list[np.ndarray]:
    return [value[start:stop] for start, stop in place.bounds] if isinstance(place, RowParts) else [value]


def _write_again(transfer: ArrayTransfer, uploads: Sequence[Upload]) -> None:
    """Arguments of steps that run again by themselves, to executors that have started; not in the stream's thread."""

    def write() -> None:
        try:
            transfer.put(list({upload.array_id: upload for upload in uploads}.values()))
        except (ShardwrightError, RuntimeError) as error:  # lost again, or closed: then the steps fail
            _log.warning("arguments of steps that wait could not be written again: %s", error)

    threading.Thread(target=write, name="shardwright-uploads", daemon=True).start()


def _meet_drain(state_ref: weakref.ref[SessionState], is_over: bool) -> None:
    """The servers, or a node of them, are about to end, or not any more."""
    state = state_ref()
    if state is None or state.automatic_saves is None:
        return
    if is_over:
        state.automatic_saves.forget_last_save()
    else:
        state.automatic_saves.begin_last_save()


_open_states: weakref.WeakSet[SessionState] = weakref.WeakSet()


@atexit.register
def _close_states() -> None:
    for state in list(_open_states):
        state.close_quietly()
