"""Carries out the master's commands on this process' devices, in order.

The thread that reads commands also dispatches steps: XLA runs them
asynchronously, so the next step is dispatched while this one computes. A
second thread waits for results, in the order of dispatch, and reports them.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import jax

from shardwright import wire
from shardwright.errors import ArrayError, ExecutionError, SessionError, ShardwrightError
from shardwright.layouts import Layout
from shardwright.proto.v1 import master_pb2, worker_pb2
from shardwright.server.runtime.arrays import (
    ArrayStore,
    StoredArray,
    from_host,
    is_here,
    local_positions,
    whole_to_host,
)
from shardwright.xla.layouts import mesh_devices
from shardwright.xla.runtime import BoundaryArray, LoadedProgram, load_program

EventSink = Callable[[worker_pb2.ExecutorEvent], None]


#: How jax and XLA say that a later step took an array over between two looks at it.
_DONATED_PHRASES = ("Array has been deleted", "deleted or donated buffer")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Program:
    loaded: LoadedProgram
    outputs: tuple[Layout, ...]
    donated: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dispatched:
    """A step on its way: `marker` is the result to wait for, `read_back` what the reply carries."""

    sequence: int
    number: int
    session_id: str
    started_s: float
    outputs: tuple[int, ...] = ()
    marker: jax.Array | None = None
    read_back: tuple[tuple[int, StoredArray], ...] = ()


class Executor:
    """One per executor process. `handle` is called by one thread; `report` may be called by any."""

    def __init__(self, store: ArrayStore, report: EventSink, *, read_back_bytes: int) -> None:
        self._store = store
        self._report = report
        self._read_back_bytes = read_back_bytes
        self._programs: dict[tuple[str, str], _Program | None] = {}  # None: other nodes run it
        self._chunks: dict[str, list[bytes]] = {}
        self._dispatched: queue.SimpleQueue[_Dispatched] = queue.SimpleQueue()
        threading.Thread(target=self._report_results, name="results", daemon=True).start()

    def handle(self, command: worker_pb2.ExecutorCommand) -> None:
        """Carry out one command and report how it went; never raises."""
        kind = command.WhichOneof("kind")
        if kind == "run":
            self._run(command.sequence, command.run.step)
        elif kind == "chunk":  # part of a load, which is what gets answered
            self._chunks.setdefault(command.chunk.executable_id, []).append(command.chunk.chunk)
        else:
            error = None
            try:
                self._handle_simple(kind, command)
            except Exception as caught:
                error = wire.as_our_error(caught)
            self._done(command.sequence, error)

    def _handle_simple(self, kind: str, command: worker_pb2.ExecutorCommand) -> None:
        if kind == "open":
            self._store.open(command.open.session_id)
        elif kind == "close":
            self._close(command.close.session_id)
        elif kind == "load":
            self._load(command.load)
        elif kind == "unload":
            self._programs.pop((command.unload.session_id, command.unload.executable_id), None)
        elif kind == "release":
            release = command.release
            why = wire.error_from_proto(release.error) if release.HasField("error") else None
            self._store.drop(release.session_id, release.array_ids, why)

    def _close(self, session_id: str) -> None:
        for key in [key for key in self._programs if key[0] == session_id]:
            del self._programs[key]
        self._store.close(session_id)

    def _load(self, load: worker_pb2.LoadProgram) -> None:
        payload = b"".join(self._chunks.pop(load.executable_id, []))
        mesh = wire.mesh_from_proto(load.mesh)
        devices = range(load.first_device, load.first_device + mesh.device_count)
        if not any(position in devices for position in local_positions()):
            self._programs[load.session_id, load.executable_id] = None
            return
        arguments = [_boundary(wire.layout_from_proto(layout)) for layout in load.arguments]
        outputs = tuple(wire.layout_from_proto(layout) for layout in load.outputs)
        loaded = load_program(
            payload,
            is_serialized=load.is_serialized,
            mesh=mesh,
            devices=mesh_devices()[load.first_device :],
            arguments=arguments,
            outputs=[_boundary(layout) for layout in outputs],
            donated=tuple(load.donated),
        )
        self._programs[load.session_id, load.executable_id] = _Program(
            loaded=loaded, outputs=outputs, donated=frozenset(load.donated)
        )

    # ---- steps -------------------------------------------------------------
    def _run(self, sequence: int, step: master_pb2.RunStepsRequest) -> None:
        try:
            self._dispatched.put(self._dispatch(sequence, step))
        except Exception as caught:
            error = _execution_error(caught, step.number)
            self._store.drop(step.session_id, [array_id for array_id in step.outputs if array_id], error)
            self._done(sequence, error)

    def _dispatch(self, sequence: int, step: master_pb2.RunStepsRequest) -> _Dispatched:
        started_s = time.perf_counter()
        session_id, store = step.session_id, self._store
        if (session_id, step.executable_id) not in self._programs:
            raise SessionError(f"no executable {step.executable_id[:12]} on this worker", remedy="load the plan again")
        program = self._programs[session_id, step.executable_id]
        if step.released:
            store.drop(session_id, step.released)
        if program is None:
            return _Dispatched(sequence=sequence, number=step.number, session_id=session_id, started_s=started_s)
        inline = _inline_arrays(step)
        if inline:
            store.add(session_id, inline)
        arguments = tuple(step.arguments)
        results = program.loaded.run([stored.value for stored in store.get_all(session_id, arguments)])
        if program.donated:
            taken = [arguments[number] for number in program.donated]
            why = ArrayError(f"an array was donated to step {step.number}", remedy="use the step's results instead")
            store.drop(session_id, taken, why)
        made = [
            (array_id, StoredArray(value=value, layout=layout))
            for array_id, value, layout in zip(step.outputs, results, program.outputs, strict=True)
            if array_id
        ]
        store.add(session_id, made)
        wanted = set(step.read_back)
        return _Dispatched(
            sequence=sequence,
            number=step.number,
            session_id=session_id,
            outputs=tuple(array_id for array_id, _ in made),
            marker=min(results, key=lambda value: value.size, default=None),
            read_back=tuple(item for item in made if item[0] in wanted),
            started_s=started_s,
        )

    def _report_results(self) -> None:
        while True:
            self._finish(self._dispatched.get())

    def _finish(self, step: _Dispatched) -> None:
        """Wait until a step has run and report it; all results of one execution are ready together."""
        try:
            read = [self._read(array_id, stored) for array_id, stored in step.read_back]
            if step.marker is not None and not step.marker.is_deleted():
                step.marker.block_until_ready()
        except Exception as caught:
            if any(phrase in str(caught) for phrase in _DONATED_PHRASES):
                self._done(step.sequence, None)  # a later step took it over: then it has run
                return
            error = _execution_error(caught, step.number)
            self._store.drop(step.session_id, step.outputs, error)
            self._done(step.sequence, error)
            return
        values = [value for value in read if value is not None]
        self._done(step.sequence, None, values, time.perf_counter() - step.started_s)

    def _read(self, array_id: int, stored: StoredArray) -> master_pb2.ReadBack | None:
        """A small output for the reply, or None where it is large, elsewhere, or donated meanwhile."""
        layout = stored.layout
        if layout.size_bytes > self._read_back_bytes or stored.value.is_deleted():
            return None
        host = whole_to_host(stored)
        if host is None:
            return None
        kind = wire.array_type_to_proto(layout.element_type, layout.user_shape)
        return master_pb2.ReadBack(array_id=array_id, type=kind, data=host.tobytes())

    def _done(
        self,
        sequence: int,
        error: ShardwrightError | None,
        values: Iterable[master_pb2.ReadBack] = (),
        run_s: float = 0.0,
    ) -> None:
        done = worker_pb2.CommandDone(sequence=sequence, values=values, run_s=run_s)
        if error is not None:
            done.error.CopyFrom(wire.error_to_proto(error))
        self._report(worker_pb2.ExecutorEvent(done=done))


def _inline_arrays(step: master_pb2.RunStepsRequest) -> list[tuple[int, StoredArray]]:
    """(id, array) of the arguments that rode along and lie on this node."""
    layouts = [(array, wire.layout_from_proto(array.layout)) for array in step.inline_arguments]
    return [(array.array_id, from_host(array.data, layout)) for array, layout in layouts if is_here(layout)]


def _boundary(layout: Layout) -> BoundaryArray:
    return BoundaryArray(
        element_type=layout.element_type,
        shape=layout.shape,
        stored_shape=layout.stored_shape,
        sharding=layout.sharding,
    )


def _execution_error(caught: Exception, number: int) -> ShardwrightError:
    if isinstance(caught, ShardwrightError):
        return caught
    text = str(caught).strip().splitlines()
    return ExecutionError(
        f"step {number} failed on the devices: {text[0] if text else type(caught).__name__}",
        remedy="the server's log holds the whole message",
    )
