"""Carries out the master's commands on this process' devices, in order.

The thread that reads commands also dispatches steps: XLA runs them asynchronously: the next step is dispatched while
this one computes. A second thread waits for results, in the order of dispatch, and reports them. A third loads
programs, in order, while steps of others run.
"""

from __future__ import annotations

import itertools
import logging
import math
import queue
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax

from shardwright.errors import (
    ArrayError,
    CompilationError,
    ExecutionError,
    ProtocolError,
    SessionError,
    ShardwrightError,
    add_place,
)
from shardwright.log_lines import fields
from shardwright.proto.v1 import master_pb2, worker_pb2
from shardwright.protocol import wire
from shardwright.server.black_box import BlackBox
from shardwright.server.runtime.activity import Activity, devices_computing
from shardwright.server.runtime.arrays import (
    ArrayStore,
    StoredArray,
    array_arrived,
    from_host,
    is_here,
    local_positions,
    position_of,
    wait_until_computed,
    whole_to_host,
)
from shardwright.server.runtime.command_log import CommandLog
from shardwright.server.runtime.cross_mesh_reshard import CrossMeshReshard
from shardwright.server.runtime.datasets.worker import DatasetReaders
from shardwright.server.runtime.executables import Executable, SpmdExecutable
from shardwright.server.runtime.finite_check import FiniteCheck, dispatch_checks
from shardwright.server.runtime.pipeline import TransportTo, boundary_of, load_pipeline, locate_devices
from shardwright.server.runtime.resharding import RowSection
from shardwright.server.runtime.snapshots import SnapshotWorker
from shardwright.server.runtime.tasks import StageRecord, execution_error
from shardwright.server.runtime.transport import StopSignals, first_number
from shardwright.server.runtime.uploads import Uploads
from shardwright.server.security import Protection
from shardwright.server.tuning import SAME_CAUSE_S, SUSPICION_S
from shardwright.xla.jax_shardings import mesh_devices
from shardwright.xla.runtime import load_program

if TYPE_CHECKING:
    from shardwright.server.runtime.checkpoints.worker import CheckpointWorker

#: Fields of a step that is carried out on the host, without a program.
_HOST_STEPS = ("save", "restore", "snapshot", "restore_snapshot", "read_batch")

_log = logging.getLogger("shardwright.server")

EventSink = Callable[[worker_pb2.ExecutorEvent], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _DispatchedStep:
    """A step on its way. markers: results to wait for. read_back, checks: contents of the reply."""

    sequence: int
    number: int
    session_id: str
    started_s: float
    outputs: tuple[int, ...] = ()
    markers: tuple[StoredArray, ...] = ()
    read_back: tuple[tuple[int, StoredArray], ...] = ()
    records: tuple[StageRecord, ...] = ()
    checks: tuple[FiniteCheck, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    """A program to load or to unload. payloads: its parts, by name; is_intact: whether they are as they were sent."""

    command: worker_pb2.ExecutorCommand
    payloads: Mapping[str, bytes]
    is_intact: bool = True


class Executor:
    """One per executor process. `handle` is called by one thread; `abort`, `heartbeat` and `report` by any.

    transport_to: see `load_pipeline`. transfer_wait_s: the longest wait on another stage's transfer. datasets: what
    sessions read here. box: where it writes down what it is busy with. uploads: what sessions upload.
    """

    def __init__(
        self,
        store: ArrayStore,
        report: EventSink,
        *,
        read_back_bytes: int,
        transport_to: TransportTo,
        transfer_wait_s: float,
        protection: Protection | None = None,
        log: CommandLog | None = None,
        datasets: DatasetReaders | None = None,
        box: BlackBox | None = None,
        uploads: Uploads | None = None,
    ) -> None:
        self._log = log or CommandLog()
        self._store = store
        self._datasets = datasets or DatasetReaders(store, ())
        self._uploads = uploads
        self._report = report
        self._read_back_bytes = read_back_bytes
        self._transport_to = transport_to
        self._stops = StopSignals(transfer_wait_s)
        self._handovers: dict[tuple[tuple[RowSection, ...], RowSection], CrossMeshReshard] = {}  # of moves
        self._executables: dict[tuple[str, str], Executable | None] = {}  # None: other nodes run it
        self._executables_lock = threading.Lock()
        self._chunks: dict[str, list[worker_pb2.ProgramChunk]] = {}
        self._activity = Activity(box)
        self._running: Executable | None = None  # the one being dispatched
        self._failed_s = -math.inf  # the last failure of a step, by the monotonic clock
        self._checkpoints: CheckpointWorker | None = None
        self._snapshots = SnapshotWorker(store, self._report_written, protection or Protection())
        self._loads: queue.SimpleQueue[_Load] = queue.SimpleQueue()
        threading.Thread(target=self._load_programs, name="loads", daemon=True).start()
        self._dispatched: queue.SimpleQueue[_DispatchedStep | int] = queue.SimpleQueue()
        threading.Thread(target=self._report_results, name="results", daemon=True).start()

    def handle(self, command: worker_pb2.ExecutorCommand) -> None:
        """Carry out one command and report how it went; never raises."""
        with self._activity.at("commands", command.sequence, self._place_in_dispatch):
            self._carry_out(command)

    def heartbeat(self) -> worker_pb2.ExecutorHeartbeat:
        """A sign of life: the command that has been carried out for seconds, and where in it."""
        sequence, doing = self._activity.busy_with()
        return worker_pb2.ExecutorHeartbeat(sequence=sequence, doing=doing)

    def _place_in_dispatch(self) -> str:
        executable = self._running
        return executable.place() if executable is not None else self._datasets.place

    def _carry_out(self, command: worker_pb2.ExecutorCommand) -> None:
        kind = command.WhichOneof("kind")
        if kind == "run":
            self._run(command.sequence, command.run)
        elif kind in ("write_checkpoint", "finish_checkpoint"):
            self._checkpoint_worker().carry_out(command)
        elif kind == "store_snapshot":
            self._snapshots.carry_out(command)
        elif kind == "chunk":  # part of a load, which is what gets answered
            self._chunks.setdefault(command.chunk.executable_id, []).append(command.chunk)
        elif kind == "report":  # when all threads have done what came before it
            self._chunks.clear()  # of a load that its master did not send to the end
            self._loads.put(_Load(command=command, payloads={}))
        elif kind in ("load", "load_pipeline", "unload"):
            self._loads.put(self._take_load(command))
        else:
            error = None
            try:
                self._handle_simple(kind, command)
            except Exception as caught:
                error = wire.to_shardwright_error(caught)
            self._report_done(command.sequence, error)

    def _handle_simple(self, kind: str, command: worker_pb2.ExecutorCommand) -> None:
        if kind == "open":
            refused = {each.key: wire.error_from_proto(each.error) for each in command.open.refused_datasets}
            self._datasets.refuse(command.open.session_id, refused)
            self._store.open(command.open.session_id)
        elif kind == "close":
            self._close(command.close.session_id)
        elif kind == "release":
            release = command.release
            why = wire.error_from_proto(release.error) if release.HasField("error") else None
            self._store.withdraw(release.session_id, release.array_ids, why)

    def _close(self, session_id: str) -> None:
        with self._executables_lock:
            keys = [key for key in self._executables if key[0] == session_id]
            self._store.close(session_id)
        if self._uploads is not None:
            self._uploads.end_session(session_id)
        for key in keys:
            self._drop(key)
        if self._checkpoints is not None:
            self._checkpoints.forget(session_id)
        self._snapshots.forget(session_id)
        self._datasets.forget(session_id)

    def _drop(self, key: tuple[str, str]) -> None:
        with self._executables_lock:
            executable = self._executables.pop(key, None)
        if executable is not None:
            executable.close()

    # ---- programs ----------------------------------------------------------
    def _take_load(self, command: worker_pb2.ExecutorCommand) -> _Load:
        """A load, with the chunks that came before it; or the opposite, which takes its turn among them."""
        own = str(getattr(command, str(command.WhichOneof("kind"))).executable_id)
        names = [name for name in self._chunks if name == own or name.startswith(f"{own}/")]
        chunks = {name: self._chunks.pop(name) for name in names}
        return _Load(
            command=command,
            payloads={name: b"".join(chunk.chunk for chunk in parts) for name, parts in chunks.items()},
            is_intact=all(_is_intact(chunk) for parts in chunks.values() for chunk in parts),
        )

    def _load_programs(self) -> None:
        while True:
            load = self._loads.get()
            if load.command.HasField("report"):
                self._dispatched.put(load.command.sequence)
                continue
            with self._activity.at("loads", load.command.sequence, lambda: "loading a program"):
                error = None
                try:
                    self._load(load)
                except Exception as caught:
                    error = wire.to_shardwright_error(caught)
            self._report_done(load.command.sequence, error)

    def _load(self, load: _Load) -> None:
        """Load a program; it is dropped where its session was closed meanwhile."""
        command = load.command
        if command.HasField("unload"):
            self._drop((command.unload.session_id, command.unload.executable_id))
            return
        if not load.is_intact:
            raise ProtocolError(
                "the program was changed on its way from the master to this node: its checksum differs",
                remedy="look at the network and the memory of both nodes, and load it again",
            )
        if command.HasField("load"):
            order = command.load
            key, executable = (order.session_id, order.executable_id), self._make_executable(order, load)
        else:
            pipeline = command.load_pipeline
            key = pipeline.session_id, pipeline.executable_id
            executable = self._make_pipeline(pipeline, load)
        with self._executables_lock:
            if self._store.is_open(key[0]):
                self._executables[key] = executable
                return
        if executable is not None:
            executable.close()

    def _make_executable(self, order: worker_pb2.LoadProgram, load: _Load) -> Executable | None:
        """None: its devices are other nodes'."""
        mesh = wire.mesh_from_proto(order.mesh)
        devices = range(order.first_device, order.first_device + mesh.device_count)
        if not any(position in devices for position in local_positions()):
            return None
        arguments = [boundary_of(wire.layout_from_proto(layout)) for layout in order.arguments]
        outputs = tuple(wire.layout_from_proto(layout) for layout in order.outputs)
        try:
            loaded = load_program(
                load.payloads.get(order.executable_id, b""),
                is_serialized=order.is_serialized,
                mesh=mesh,
                devices=mesh_devices()[order.first_device :],
                arguments=arguments,
                outputs=[boundary_of(layout) for layout in outputs],
                donated=tuple(order.donated),
                compile_options=wire.compile_options_from_proto(order.compile_options),
            )
        except CompilationError as error:
            raise add_place(error, f"worker {jax.process_index()}") from error
        return SpmdExecutable(
            loaded=loaded,
            outputs=outputs,
            donated=frozenset(order.donated),
            arguments_here=(True,) * len(arguments),
        )

    def _make_pipeline(self, order: worker_pb2.LoadPipeline, load: _Load) -> Executable | None:
        """None: its stages are other nodes'."""
        executable = load_pipeline(
            order, lambda program: load.payloads.get(f"{order.executable_id}/{program}", b""), self._transport_to
        )
        return executable if executable.runner.stages else None

    def abort(self, sequence: int, error: ShardwrightError) -> None:
        """A step failed elsewhere: stop waiting for its transfers. Unlike a command, this takes no turn."""
        self._stops.abort(sequence, error)

    # ---- steps -------------------------------------------------------------
    def _run(self, sequence: int, order: worker_pb2.RunStep) -> None:
        step = order.step
        try:
            self._store.expect(step.session_id, (*step.arguments, *step.outputs))
            self._dispatched.put(self._dispatch(sequence, order))
        except Exception as caught:
            error = self._explain(caught, step.session_id, step.number)
            self._store.drop(step.session_id, [array_id for array_id in step.outputs if array_id], error)
            self._report_done(sequence, error)
        finally:
            self._stops.end_step(sequence)

    def _dispatch(self, sequence: int, order: worker_pb2.RunStep) -> _DispatchedStep:
        started_s = time.perf_counter()
        step = order.step
        session_id, store = step.session_id, self._store
        if step.HasField("move"):
            return self._move_step(sequence, order)
        if any(step.HasField(field) for field in _HOST_STEPS):
            return self._run_host_step(sequence, order)
        if (session_id, step.executable_id) not in self._executables:
            raise SessionError(f"no executable {step.executable_id[:12]} on this worker", remedy="load the plan again")
        executable = self._executables[session_id, step.executable_id]
        if step.released:
            store.drop(session_id, step.released)
        if executable is None:
            return _DispatchedStep(sequence=sequence, number=step.number, session_id=session_id, started_s=started_s)
        inline = _inline_arrays(step)
        if inline:
            store.add(session_id, inline)
        results, records = self._run_executable(sequence, step, executable)
        outputs = zip(step.outputs, results, strict=True)
        made_arrays = [(array_id, stored) for array_id, stored in outputs if stored and array_id]
        store.add(session_id, made_arrays)
        wanted = set(step.read_back)
        return _DispatchedStep(
            sequence=sequence,
            number=step.number,
            session_id=session_id,
            outputs=tuple(array_id for array_id, _ in made_arrays),
            markers=executable.markers([stored for stored in results if stored]),
            read_back=tuple(item for item in made_arrays if item[0] in wanted),
            records=tuple(records),
            checks=dispatch_checks(made_arrays, step),
            started_s=started_s,
        )

    def _run_executable(
        self, sequence: int, step: master_pb2.RunStepsRequest, executable: Executable
    ) -> tuple[list[StoredArray | None], list[StageRecord]]:
        """Dispatch it on the step's arguments; afterwards those that it donates are gone, whether it ran or not."""
        session_id, ids = step.session_id, tuple(step.arguments)
        here = executable.arguments_here
        argument_arrays = iter(self._store.get_all(session_id, itertools.compress(ids, here)))
        arrays = [next(argument_arrays) if is_here else None for is_here in here]
        records = executable.new_records() if step.trace else []
        for number in executable.donated:
            donated = arrays[number]
            if donated is not None:
                donated.is_donated = True
        self._running = executable
        try:
            return executable.run(sequence, self._stops.of(sequence), arrays, records), records
        finally:
            self._running = None
            if executable.donated:
                why = ArrayError(f"an array was donated to step {step.number}", remedy="use the step's results instead")
                self._store.drop(session_id, [ids[number] for number in executable.donated], why)

    def _move_step(self, sequence: int, order: worker_pb2.RunStep) -> _DispatchedStep:
        """Reshard arrays: send the pieces present here, receive those of the targets here."""
        started_s = time.perf_counter()
        step, stop = order.step, self._stops.of(sequence)
        self._store.drop(step.session_id, step.released)
        ids, outputs, arriving = iter(step.arguments), iter(enumerate(step.outputs)), []
        for array in step.move.arrays:
            sources = tuple(_section(part) for part in array.sources)
            used_ids = [next(ids) for _ in sources]
            here = {number: used_ids[number] for number, source in enumerate(sources) if is_here(source.layout)}
            stored = self._store.get_all(step.session_id, here.values())
            for target in map(_section, array.targets):
                output, made_id = next(outputs)
                move, first = self._cross_mesh_reshard(sources, target, order.peers), first_number(sequence, output)
                for number, section in zip(here, stored, strict=True):
                    move.send(first, section.value, number)
                if is_here(target.layout):
                    arriving.append((made_id, move.receive(first), target.layout))
        received = [(i, StoredArray(value=incoming.wait(stop), layout=target)) for i, incoming, target in arriving]
        self._store.add(step.session_id, received)
        return _DispatchedStep(
            sequence=sequence,
            number=step.number,
            session_id=step.session_id,
            outputs=tuple(array_id for array_id, _ in received),
            markers=tuple(stored for _, stored in received),
            started_s=started_s,
        )

    def _cross_mesh_reshard(
        self, sources: tuple[RowSection, ...], target: RowSection, peers: Iterable[worker_pb2.Peer]
    ) -> CrossMeshReshard:
        """One per kind of reshard: its peers are those of the generation."""
        if (sources, target) not in self._handovers:
            nodes, addresses = locate_devices(peers)
            self._handovers[sources, target] = CrossMeshReshard(
                sources,
                target,
                node_of=nodes.__getitem__,
                devices=local_positions(),
                transport=self._transport_to(addresses),
                is_rare=True,
                is_kept=True,
            )
        return self._handovers[sources, target]

    def _run_host_step(self, sequence: int, order: worker_pb2.RunStep) -> _DispatchedStep:
        """A save, a snapshot, a restore or a batch: done when it returns."""
        started_s, step = time.perf_counter(), order.step
        if step.released:
            self._store.drop(step.session_id, step.released)
        if step.HasField("save"):
            self._checkpoint_worker().snapshot(step)
        elif step.HasField("snapshot"):
            self._snapshots.copy(step)
        elif step.HasField("restore_snapshot"):
            self._snapshots.restore(step, order.peers)
        elif step.HasField("read_batch"):
            self._datasets.read(step, self._stops.of(sequence))
        else:
            self._checkpoint_worker().restore(step)
        return _DispatchedStep(sequence=sequence, number=step.number, session_id=step.session_id, started_s=started_s)

    def _checkpoint_worker(self) -> CheckpointWorker:
        """Made when it is first needed: many a session has no use for Orbax."""
        from shardwright.server.runtime.checkpoints.worker import CheckpointWorker

        if self._checkpoints is None:
            self._checkpoints = CheckpointWorker(self._store, self._report_written)
        return self._checkpoints

    def _report_written(self, sequence: int, error: ShardwrightError | None, written_bytes: int) -> None:
        done = worker_pb2.CommandDone(sequence=sequence, written_bytes=written_bytes)
        if error is not None:
            done.error.CopyFrom(wire.error_to_proto(error))
        self._report(worker_pb2.ExecutorEvent(done=done))

    def _report_results(self) -> None:
        while True:
            step = self._dispatched.get()
            if isinstance(step, int):
                self._report(worker_pb2.ExecutorEvent(report=self._describe(step)))
            else:
                self._finish(step)

    def _describe(self, sequence: int) -> worker_pb2.ExecutorReport:
        """What there is, for a master that was started again."""
        with self._executables_lock:
            loaded = list(self._executables)
        sessions = [
            worker_pb2.SessionReport(
                session_id=session_id,
                arrays=[array_arrived(array_id, stored.layout) for array_id, stored in arrays],
                executables=[executable_id for owner, executable_id in loaded if owner == session_id],
            )
            for session_id, arrays in self._store.contents().items()
        ]
        report = worker_pb2.ExecutorReport(sequence=sequence, sessions=sessions)
        self._log.complete(report)
        return report

    def _finish(self, step: _DispatchedStep) -> None:
        """Wait until a step has run and report it."""
        values = [marker.value for marker in step.markers]
        with self._activity.at("results", step.sequence, lambda: devices_computing(values, position_of)):
            self._wait_and_report(step)

    def _wait_and_report(self, step: _DispatchedStep) -> None:
        not_finite: list[master_pb2.NotFinite] = []
        try:
            not_finite += [finding for check in step.checks if (finding := check.finding()) is not None]
            contents = [self._read(array_id, stored) for array_id, stored in step.read_back]
            for marker in step.markers:
                wait_until_computed(marker)
        except Exception as caught:
            error = self._explain(caught, step.session_id, step.number)
            self._store.drop(step.session_id, step.outputs, error)
            self._report_done(step.sequence, error)
            return
        values = [value for value in contents if value is not None]
        self._report_done(step.sequence, None, values, time.perf_counter() - step.started_s, step.records, not_finite)

    def _explain(self, caught: Exception, session_id: str, number: int) -> ShardwrightError:
        """As the client gets it, in one line; the whole message goes to the server's log."""
        error = caught if isinstance(caught, ShardwrightError) else None
        if isinstance(error, ExecutionError) and not error.where:
            error = type(error)(error.message, where=f"step {number}", remedy=error.remedy)
        if error is None:
            _log.warning(
                "step %d: %s", number, str(caught) or repr(caught), extra=fields(session=session_id, step=number)
            )
            error = execution_error(
                caught, f"step {number}, on the devices", "the server's log holds the whole message"
            )
        if isinstance(error, ExecutionError) and jax.process_count() > 1:
            if time.monotonic() - self._failed_s > SAME_CAUSE_S:
                time.sleep(SUSPICION_S)
            self._failed_s = time.monotonic()
        return error

    def _read(self, array_id: int, stored: StoredArray) -> master_pb2.ReadBack | None:
        """A small output of the reply, or None if it is large, elsewhere, or donated meanwhile."""
        layout = stored.layout
        if layout.size_bytes > self._read_back_bytes or stored.is_donated:
            return None
        try:
            host = whole_to_host(stored)
        except Exception as caught:
            if stored.explains(caught):
                return None
            raise
        if host is None:
            return None
        kind = wire.array_type_to_proto(layout.element_type, layout.user_shape)
        return master_pb2.ReadBack(array_id=array_id, type=kind, data=host.tobytes())

    def _report_done(
        self,
        sequence: int,
        error: ShardwrightError | None,
        values: Iterable[master_pb2.ReadBack] = (),
        run_s: float = 0.0,
        records: Iterable[StageRecord] = (),
        not_finite: Iterable[master_pb2.NotFinite] = (),
    ) -> None:
        traces = [_trace(record) for record in records]
        done = worker_pb2.CommandDone(
            sequence=sequence, values=values, run_s=run_s, traces=traces, not_finite=not_finite
        )
        if error is not None:
            done.error.CopyFrom(wire.error_to_proto(error))
        self._report(worker_pb2.ExecutorEvent(done=done))


def _section(part: master_pb2.MovedPart) -> RowSection:
    return RowSection(wire.layout_from_proto(part.layout), part.first_row)


def _trace(record: StageRecord) -> master_pb2.StageTrace:
    return master_pb2.StageTrace(
        stage=record.stage,
        spans=[master_pb2.TaskSpan(task=span.task, start_s=span.start_s, end_s=span.end_s) for span in record.spans],
        peak_buffers=record.peak_buffers,
        peak_micro_batches=record.peak_micro_batches,
        peak_bytes=record.peak_bytes,
    )


def _inline_arrays(step: master_pb2.RunStepsRequest) -> list[tuple[int, StoredArray]]:
    """(id, array) of the arguments that rode along and lie on this node."""
    layouts = [(array, wire.layout_from_proto(array.layout)) for array in step.inline_arguments]
    return [(array.array_id, from_host(array.data, layout)) for array, layout in layouts if is_here(layout)]


def _is_intact(chunk: worker_pb2.ProgramChunk) -> bool:
    return not chunk.HasField("crc32") or chunk.crc32 == zlib.crc32(chunk.chunk)
