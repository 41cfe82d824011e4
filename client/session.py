"""`shardwright.connect`: a session with a server, and what it runs there."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwright import __version__, wire
from shardwright.client.arrays import RemoteArray
from shardwright.client.connection import Dialer, MasterConnection, SessionInfo
from shardwright.client.embedded import EmbeddedServer
from shardwright.client.places import Place, Rows, can_be_moved, parts_of, place_of
from shardwright.client.stream import StepResult, StepStream
from shardwright.client.transfer import ArrayTransfer, as_bytes
from shardwright.cluster import join_address
from shardwright.config import PlanOptions
from shardwright.errors import ArrayError, OptionError, ServerUnavailableError, SessionError, ShardwrightError
from shardwright.layouts import Layout
from shardwright.options import Force, MemoryBudget, Mesh, plan_options
from shardwright.progress import PlanProgress
from shardwright.proto.v1 import master_pb2

if TYPE_CHECKING:
    from shardwright.client.checkpoints import Save
    from shardwright.client.frontends.jax import LoweredProgram
    from shardwright.client.places import Entry
    from shardwright.client.programs import LoadedPlan, Program, Source
    from shardwright.client.step import Step

_log = logging.getLogger("shardwright")

#: An argument of at most so many bytes rides along with its step, …
INLINE_BYTES = 64 << 10
#: … as long as all of a step stay below this.
INLINE_TOTAL_BYTES = 1 << 20
#: Seconds that a dropped array waits for a step to carry its release.
RELEASE_DELAY_S = 0.1
#: Seconds that workers have to come back after one was lost, where a call cannot do without them.
WORKERS_BACK_S = 120.0


def connect(address: str | None = None, *, devices: int = 8, token: str | None = None) -> Session:
    """Opens a session.

    Args:
      address: "host:port" of a server. Without it `$SERVER_IP` and `$SERVER_PORT` name
        one; without those a server is started as a child process, which ends with
        the session.
      devices: CPU devices of the child, where one is started.
      token: what the server asks for; default `$SHARDWRIGHT_TOKEN`. For a server with
        TLS, `$SHARDWRIGHT_CA` names the file of the certificate to trust.

    Raises ServerUnavailableError where nothing answers, AuthenticationError for a wrong token.
    """
    server = None
    address = address or _address_from_environment()
    if address is None:
        server = EmbeddedServer(devices)
        address, token = server.address, server.token
        ca_file = None
    else:
        token = token or os.environ.get("SHARDWRIGHT_TOKEN")
        ca_file = os.environ.get("SHARDWRIGHT_CA")
    try:
        return Session(address, Dialer(token, ca_file), server)
    except BaseException:
        if server is not None:
            server.close()
        raise


def _address_from_environment() -> str | None:
    host, port = os.environ.get("SERVER_IP"), os.environ.get("SERVER_PORT")
    if not host and not port:
        return None
    if not host or not port:
        missing = "SERVER_PORT" if host else "SERVER_IP"
        raise OptionError("half an address in the environment", where=missing, remedy=f"set {missing} as well")
    return join_address(host, port)


class Session:
    """A name space of programs and arrays on a server; a context manager.

    Made by `connect`. Closing it frees everything it holds there.
    """

    def __init__(self, address: str, dialer: Dialer, server: EmbeddedServer | None) -> None:
        self._server = server
        self._pid = os.getpid()
        self.master = MasterConnection(address, dialer)
        self.info: SessionInfo = self.master.open(__version__)
        self._transfer = ArrayTransfer(self.info, dialer)
        self._stream = StepStream(self.master.run_steps, self.info.session_id)
        self._array_ids = itertools.count(1)
        self._lock = threading.RLock()
        self._loaded: dict[tuple[str, str], LoadedPlan] = {}
        self._layouts: dict[Layout, Layout] = {}
        self._rows: dict[Rows, Rows] = {}
        self._dropped: SimpleQueue[int | None] = SimpleQueue()  # its put() may be called by the garbage collector
        self._is_closed = False
        self._save: Save | None = None
        self._saving = threading.Lock()
        threading.Thread(target=_release_when_idle, args=(weakref.ref(self), self._dropped), daemon=True).start()
        _open_sessions.add(self)

    # ---- what a user calls ----------------------------------------------------------

    def parallelize(
        self,
        fn: Callable[..., Any],
        *,
        donate_argnums: int | Sequence[int] = (),
        static_argnums: int | Sequence[int] = (),
        mesh: Mesh = None,
        force: Force = None,
        memory_budget: MemoryBudget = None,
        deadline: float | None = None,
        effort: str | None = None,
        rewrites: str | None = None,
        remat: str | None = None,
        mode: str | None = None,
        stages: int | None = None,
        micro_batches: int | None = None,
        micro_batch_inexact: bool = False,
        schedule: str | None = None,
        imbalance: float | None = None,
        progress: Callable[[PlanProgress], None] | None = None,
    ) -> Step:
        """`fn` as a step that runs on the servers; call it as you would `jax.jit(fn, ...)`.

        Args:
          donate_argnums: arguments whose arrays are updated in place; their handles are gone afterwards.
          static_argnums: arguments that are part of the program, by value.
          mesh: "2x4", (2, 4) or {"data": 2, "model": 4}, up to three axes; default: the planner chooses.
          force: "data", "tensor", "mixed", "megatron", "expert", "zero1", "fsdp" or "replicated", or
            argument name pattern → {dimension: axis, True ("split somewhere") or None ("not split")}.
          memory_budget: what the plan may take of one device: bytes, "40GB", "36GiB", or a part of
            its memory (0.5, "50%"); default: all of it.
          deadline: seconds after which the best plan found so far is taken.
          effort: "fast", "default" or "best": how hard the planner searches where no deadline says it.
          rewrites: "auto" (default) or "none": plan the program as it stands.
          remat: what the backward pass finds computed again instead of kept: "auto" (default) as much as the memory
            makes necessary, "none", or "full".
          mode: "search" (default), or "propagate": follow the annotations and search nothing.
          micro_batches: parts of the batch that are computed one after the other, their gradients added up: less
            memory for the same result. Default: as the planner sees fit; 1: the batch at once.
          micro_batch_inexact: let what needs the whole batch (batch norm's statistics) be that of each micro-batch.
          stages: pipeline stages, each on devices of its own; 1 for none. Default: the planner chooses.
          schedule: "gpipe", "1f1b", "interleaved", … (`shardwright.tasks.SCHEDULE_NAMES`).
          imbalance: how much longer than the average stage the slowest one may take, as a part of that; default: as
            little as can be.
          progress: called in this thread with a `PlanProgress` as planning goes on.

        Raises OptionError for a wrong option. Nothing is traced before the first call.
        """
        from shardwright.client.frontends.jax import JaxFunction
        from shardwright.client.step import Step

        options = plan_options(
            mesh=mesh, force=force, memory_budget=memory_budget, deadline=deadline, effort=effort, rewrites=rewrites,
            remat=remat, mode=mode, stages=stages, micro_batches=micro_batches, schedule=schedule,
            micro_batch_inexact=micro_batch_inexact, imbalance=imbalance,
        )  # fmt: skip
        function = JaxFunction(fn, donate_argnums=donate_argnums, static_argnums=static_argnums)
        return Step(self, function, options, progress)

    def save(
        self, state: Any, directory: str | os.PathLike[str], *, step: int | None = None, max_to_keep: int | None = None
    ) -> Save:
        """Writes `state` as it is after the last step sent, as checkpoint number `step` of `directory`.

        Returns at once; later steps may change or donate the arrays. The next save and `close` wait
        until it is complete, and raise what went wrong, unless `Save.wait` has. An interrupted save
        leaves the checkpoints that are complete as they are.

        Args:
          state: a pytree of handles; arrays and numbers in it are sent to the servers first.
          directory: as every worker sees it: on a file system that they share, or what else Orbax takes
            ("gs://…"). One session at a time saves in it. Orbax reads it, with or without Shardwright.
          step: default: one more than the latest in the directory.
          max_to_keep: remove older checkpoints beyond so many, once this one is complete.

        Raises CheckpointError for a state that cannot be written, OptionError for a wrong number.
        """
        from shardwright.client import checkpoints

        self.require_open()
        with self._saving:
            if self._save is not None and (error := self._save.unseen_error()) is not None:
                raise error
            self._save = checkpoints.save(self, state, directory, step=step, max_to_keep=max_to_keep)
            return self._save

    def restore(self, directory: str | os.PathLike[str], *, step: int | None = None, like: Any = None) -> Any:
        """The state of a checkpoint, as handles; arrays are read when a step is first called with them.

        Then each worker reads its own part, as the step's plan lays it out, whatever the plan or
        the number of workers was when it was saved. Waits for a save of this session that is under way.

        Args:
          step: number of the checkpoint; default: the latest.
          like: a pytree of the structure and the types to restore, e.g. what `step.init` returns (which
            then does not run), or `jax.eval_shape` does. It may be a part of what was saved. Needed
            for states with nodes other than dicts, lists, tuples and named tuples.

        Raises CheckpointError where there is no such checkpoint, or it does not hold what `like` asks for.
        """
        from shardwright.client import checkpoints

        self.require_open()
        if self._save is not None:
            self._save.settle()
        return checkpoints.restore(self, directory, step=step, like=like)

    def checkpoints(self, directory: str | os.PathLike[str]) -> tuple[int, ...]:
        """Numbers of the complete checkpoints in a directory of the workers, ascending; waits for a save under way."""
        from shardwright.client import checkpoints

        self.require_open()
        if self._save is not None:
            self._save.settle()
        return checkpoints.checkpoints(self, directory)

    def status(self) -> master_pb2.StatusReply:
        """State of the cluster and of its sessions."""
        self.require_open()
        return self.master.status()

    def close(self) -> None:
        """Waits for a save under way, frees what the session holds on the server, stops an embedded server.

        May be called twice. Raises the error of a save that nobody has met yet.
        """
        error = self._close()
        if error is not None:
            raise error

    def _close(self) -> ShardwrightError | None:
        """The error of a save that nobody has met yet."""
        if self._is_closed or os.getpid() != self._pid:  # a forked child leaves its parent's session alone
            return None
        error = self._save.unseen_error() if self._save is not None else None
        self._is_closed = True
        self._dropped.put(None)
        self._stream.close()
        self._transfer.close()
        self.master.close()
        if self._server is not None:
            self._server.close()
        return error

    def close_quietly(self) -> None:
        """Where nobody is left to raise an error to."""
        error = self._close()
        if error is not None:
            _log.error("the last save failed: %s", error)

    def __del__(self) -> None:
        if hasattr(self, "_dropped"):  # else it was never opened
            self.close_quietly()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.close_quietly()

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"{self.info.device_count} {self.info.platform} devices"
        return f"Session({self.master.address}, {state})"

    # ---- programs --------------------------------------------------------------------

    def prepare(
        self,
        lowered: LoweredProgram,
        options: PlanOptions,
        progress: Callable[[PlanProgress], None] | None = None,
        devices: range | None = None,
    ) -> Program:
        """A program ready to run; one that computes the same by the same plan is planned and loaded once.

        progress: called as planning goes on, if it is planned now. devices: those of the cluster that it is to
        run on, default all.
        """
        from shardwright.client.places import argument_entries, output_entries, places_of
        from shardwright.client.programs import Program, leaf_numbers, options_key, outputs_to_read_back

        self.require_open()
        first_device = 0 if devices is None else devices.start
        with self._lock:
            key = (lowered.identity, f"{options_key(options)} on {devices}")
            if key not in self._loaded:
                self._loaded[key] = self._plan_and_load(lowered, options, progress, devices)
            loaded = self._loaded[key]
            taken = self._known(argument_entries(loaded.plan, first_device))
            left = self._known(output_entries(loaded.plan, first_device))
            arguments = [self._intern(place) for place in places_of(taken, len(lowered.arguments))]
            outputs = [self._intern(place) for place in places_of(left, len(lowered.outputs))]
            sources = self._sources(lowered, taken)
        numbers = leaf_numbers(lowered)
        return Program(
            lowered=lowered,
            plan=loaded.plan,
            executable_id=loaded.load.executable_id,
            load=loaded.load,
            arguments=tuple(arguments),
            outputs=tuple(place for place in outputs if place is not None),
            leaf_numbers=numbers,
            leaf_places=tuple(arguments[number] for number in numbers),
            sources=sources,
            results=left,
            read_back=outputs_to_read_back(lowered),
        )

    def _sources(self, lowered: LoweredProgram, entries: Sequence[Entry]) -> tuple[Source, ...]:
        """Where the arguments of an executable come from; hoisted constants are put on the servers."""
        from shardwright.client.places import part_of
        from shardwright.client.programs import Source, leaf_numbers

        leaves = {number: leaf for leaf, number in enumerate(leaf_numbers(lowered))}
        sources = []
        for entry in entries:
            constant_id = 0
            if entry.number not in leaves:
                constant = lowered.constants[entry.number - lowered.constants_at]
                constant_id = self.upload(part_of(constant, entry), entry.layout)
            sources.append(
                Source(
                    entry=entry,
                    leaf=leaves.get(entry.number, -1),
                    constant_id=constant_id,
                    proto=wire.layout_to_proto(entry.layout),
                )
            )
        return tuple(sources)

    def _plan_and_load(
        self,
        lowered: LoweredProgram,
        options: PlanOptions,
        progress: Callable[[PlanProgress], None] | None,
        devices: range | None,
    ) -> LoadedPlan:
        from shardwright.client.programs import LoadedPlan

        def planning(step: PlanProgress) -> None:
            _log.info("%s: %s", lowered.name, step)
            if progress is not None:
                progress(step)

        def loading(phase: str, elapsed_s: float) -> None:
            _log.info("%s: %s (%.1f s)", lowered.name, phase, elapsed_s)

        started = time.monotonic()
        program_id = self.master.upload_program(lowered.hlo_text)
        plan_id, plan = self.master.plan(program_id, lowered.hlo_text, options, planning, devices)
        load = self.master.load(plan_id, loading)
        _log.info("%s: ready after %.1f s", lowered.name, time.monotonic() - started)
        return LoadedPlan(plan=plan, load=load)

    def _known(self, entries: Sequence[Entry]) -> tuple[Entry, ...]:
        """The entries, with layouts that can be told by identity."""
        from shardwright.client.places import Entry

        return tuple(
            Entry(entry.number, self._layouts.setdefault(entry.layout, entry.layout), entry.rows) for entry in entries
        )

    def _intern(self, place: Place | None) -> Place | None:
        return self._rows.setdefault(place, place) if isinstance(place, Rows) else place

    # ---- running ----------------------------------------------------------------------

    def run(
        self, program: Program, leaves: Sequence[Any], wanted: Sequence[bool] | None = None, *, is_traced: bool = False
    ) -> list[RemoteArray | None]:
        """Runs one step; returns handles at once, None for outputs that are not wanted.

        Handles among `leaves` must lie as `program.leaf_places` says. Raises the error of
        an earlier step that nobody has seen yet, or ArrayError for a handle that is gone.
        """
        with self._lock:
            self._raise_unseen()
            request = master_pb2.RunStepsRequest(executable_id=program.executable_id, trace=is_traced)
            next_id = self._array_ids.__next__
            made = [next_id() if wanted is None or wanted[entry.number] else 0 for entry in program.results]
            outputs: list[tuple[int, ...]] = [()] * len(program.outputs)
            for array_id, entry in zip(made, program.results, strict=True):
                if array_id:
                    outputs[entry.number] += (array_id,)
            temporary: list[int] = []
            try:
                request.arguments.extend(self._send_arguments(program, leaves, request, temporary))
                request.outputs.extend(made)
                request.read_back.extend(outputs[number][0] for number in program.read_back if outputs[number])
                request.released.extend(self._take_dropped())
                result = self._stream.submit(request, program.name)
            finally:
                for array_id in temporary:
                    self._dropped.put(array_id)
        results = program.lowered.results
        return [
            RemoteArray(self, spec, ids=ids, place=place, result=result) if ids else None
            for spec, ids, place in zip(results, outputs, program.outputs, strict=True)
        ]

    def _send_arguments(
        self,
        program: Program,
        leaves: Sequence[Any],
        request: master_pb2.RunStepsRequest,
        temporary: list[int],
    ) -> list[int]:
        """Ids of all arguments of the executable; those that live for this step only are added to `temporary`."""
        from shardwright.client.frontends.jax import host_value
        from shardwright.client.places import part_of

        ids: list[int] = []
        inline_bytes = 0
        specs = program.lowered.signature.specs
        copies = self._copies(program, leaves)
        for number, source in enumerate(program.sources):
            if source.leaf < 0:
                ids.append(source.constant_id)
                continue
            leaf = leaves[source.leaf]
            if type(leaf) is RemoteArray:
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
                self._transfer.put(array_id, value, source.entry.layout)
        return ids

    def _copies(self, program: Program, leaves: Sequence[Any]) -> dict[int, int]:
        """Arrays, by source, of handles that another stage reads than keeps them; workers hand them over."""
        handles: list[RemoteArray] = []
        places: dict[int, Place] = {}
        for number, source in enumerate(program.sources):
            leaf = leaves[source.leaf] if source.leaf >= 0 else None
            if type(leaf) is RemoteArray and self._id_for(leaf, source.entry) is None and leaf._place is not None:
                wanted = place_of(source.entry)
                if can_be_moved(leaf._place, wanted):
                    handles.append(leaf)
                    places[number] = wanted
        made, _ = self._submit_move(handles, list(places.values()))
        return {number: ids[0] for number, ids in zip(places, made, strict=True)}

    def _id_for(self, handle: RemoteArray, entry: Entry) -> int | None:
        """The array of a handle that is the entry's, or None where the handle lies elsewhere."""
        ids, place = self.usable_ids(handle), handle._place
        if isinstance(place, Rows):
            return ids[place.bounds.index(entry.rows)] if entry.rows in place.bounds else None
        return ids[0] if place is entry.layout else None

    def submit(self, request: master_pb2.RunStepsRequest, name: str, *, is_followed: bool = False) -> StepResult:
        """Sends a step that has no program: a save, which the caller follows, or a restore. Raises as `run` does."""
        with self._lock:
            self._raise_unseen()
            request.released.extend(self._take_dropped())
            return self._stream.submit(request, name, is_followed=is_followed)

    def move(self, handles: Sequence[RemoteArray], places: Sequence[Place]) -> list[RemoteArray]:
        """Copies that lie as `places` say; workers hand the pieces to each other. See `can_be_moved`."""
        made, result = self._submit_move(handles, places)
        return [
            RemoteArray(self, handle.spec, ids=ids, place=place, result=result)
            for handle, place, ids in zip(handles, places, made, strict=True)
        ]

    def _submit_move(
        self, handles: Sequence[RemoteArray], places: Sequence[Place]
    ) -> tuple[list[tuple[int, ...]], StepResult | None]:
        """Ids of the copies' parts, and the step that makes them; none without a handle."""
        if not handles:
            return [], None
        request = master_pb2.RunStepsRequest()
        made = [tuple(self.new_id() for _ in parts_of(place)) for place in places]
        for handle, place, ids in zip(handles, places, made, strict=True):
            assert handle._place is not None
            request.move.arrays.add(sources=_moved_parts(handle._place), targets=_moved_parts(place))
            request.arguments.extend(self.usable_ids(handle))
            request.outputs.extend(ids)
        return made, self.submit(request, f"a move of {len(handles)} arrays")

    def new_id(self) -> int:
        """An id for an array that a step makes."""
        return next(self._array_ids)

    def usable_ids(self, handle: RemoteArray) -> tuple[int, ...]:
        """Ids of a handle that a step may read, one for each part. Raises the error that made it unusable."""
        if handle._session is not self:
            raise SessionError("an array of another session was passed to a step", remedy="pass np.asarray(handle)")
        if handle._deleted or (handle._result is not None and handle._result.error is not None):
            handle._ready()
        return handle._ids

    def _raise_unseen(self) -> None:
        self.require_open()
        error = self._stream.take_error()
        if error is not None:
            raise error

    # ---- arrays -----------------------------------------------------------------------

    def part_of_cluster(self, layout: Layout) -> range | None:
        """The devices of a layout, or None where they are the whole cluster."""
        return None if len(layout.devices) == self.info.device_count else layout.devices

    def upload_to(self, value: np.ndarray, place: Place) -> tuple[int, ...]:
        """Ids of new arrays with these contents, one for each part of the place."""
        if isinstance(place, Rows):
            parts = zip(place.layouts, place.bounds, strict=True)
            return tuple(self.upload(value[start:stop], layout) for layout, (start, stop) in parts)
        return (self.upload(value, place),)

    def upload(self, value: np.ndarray, layout: Layout) -> int:
        """Id of a new array with these contents."""
        array_id = next(self._array_ids)
        self._transfer.put(array_id, value, layout)
        return array_id

    def fetch(self, handle: RemoteArray) -> np.ndarray:
        """Contents of a computed array."""
        self.require_open()
        place = handle._place
        if place is None:
            raise ArrayError("this array has not been placed yet")
        if not isinstance(place, Rows):
            return self._transfer.fetch(handle._ids[0], place)
        parts = [self._transfer.fetch(*part) for part in zip(handle._ids, place.layouts, strict=True)]
        return np.concatenate(parts)

    def ask_first_node(self, method: str, request: Any) -> Any:
        """The reply to a call of the Checkpoints service; waits where the workers are being started anew."""
        self.require_open()
        deadline_s = time.monotonic() + WORKERS_BACK_S
        while True:
            try:
                return self._transfer.ask_first_node(method, request)
            except (ServerUnavailableError, SessionError):
                state = self.master.status()  # raises where the master is gone as well
                is_mine = any(each.session_id == self.info.session_id for each in state.sessions)
                if not is_mine or time.monotonic() > deadline_s:
                    raise
                time.sleep(0.5)

    def release_later(self, *array_ids: int) -> None:
        """Frees arrays with the next step, or soon if there is none. Safe in destructors."""
        for array_id in array_ids:
            self._dropped.put(array_id)

    def _take_dropped(self) -> list[int]:
        """Ids to free now; the caller holds the lock."""
        taken: list[int] = []
        try:
            while (array_id := self._dropped.get_nowait()) is not None:
                taken.append(array_id)
        except Empty:
            return taken
        self._dropped.put(None)  # the session is being closed: that is for the releasing thread
        return taken

    def release_dropped(self, first: int) -> None:
        """Frees dropped arrays by a call of its own, unless steps are under way that may still read them."""
        with self._lock:
            if self._is_closed:
                return
            if not self._stream.is_idle:
                self._dropped.put(first)  # looked at again in a moment
                return
            ids = [first, *self._take_dropped()]
            try:
                self.master.release(ids)
            except ShardwrightError:
                _log.warning("could not release %d arrays", len(ids))

    def require_open(self) -> None:
        if self._is_closed:
            raise SessionError("the session is closed", remedy="open a new one with connect()")


def _moved_parts(place: Place) -> list[master_pb2.MovedPart]:
    return [master_pb2.MovedPart(layout=wire.layout_to_proto(layout), first_row=row) for layout, row in parts_of(place)]


def _release_when_idle(session_ref: weakref.ref[Session], dropped: SimpleQueue[int | None]) -> None:
    while True:
        array_id = dropped.get()
        if array_id is None:
            return
        time.sleep(RELEASE_DELAY_S)
        session = session_ref()
        if session is None:
            return
        session.release_dropped(array_id)
        del session


_open_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


@atexit.register
def _close_sessions() -> None:
    for session in list(_open_sessions):
        session.close_quietly()
