"""Runs the task lists of a pipelined step: one thread a stage, each down its list.

Programs run asynchronously: the thread goes on once one is dispatched, and the next is there when the devices are free.
Only received values are waited for, right before the program that reads them. A dispatched program waits for nothing
but its own stage: stages in one process cannot hold each other up on its devices.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import jax

from shardwright.errors import ExecutionError, ShardwrightError
from shardwright.server.runtime.cross_mesh_reshard import CrossMeshReshard, PendingValue
from shardwright.server.runtime.transport import StopSignal, first_number
from shardwright.tasks import MICRO_BATCH, Buffer, Task
from shardwright.xla.compiled import remedy_of

Buffers = dict[Buffer, jax.Array]


class TaskProgram(Protocol):
    """The program of a computing task: `xla.runtime.LoadedProgram`, or something like it."""

    def run(self, arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Start it on its parameters in order; returns its outputs at once. Donated parameters are consumed."""
        ...


@dataclass(frozen=True, slots=True)
class TaskSpan:
    """When a task ran: seconds since the epoch. task: its place in the list. A receive ends when it was seen whole."""

    task: int
    start_s: float
    end_s: float


@dataclass(slots=True, kw_only=True)
class StageRecord:
    """Measurements of one stage in one step. peak_bytes: of one device."""

    stage: int
    spans: list[TaskSpan] = field(default_factory=list)
    peak_buffers: int = 0
    peak_micro_batches: int = 0
    peak_bytes: int = 0

    def record_live(self, buffers: Buffers) -> None:
        """Take in what is live now."""
        live = {
            buffer: array for buffer, array in buffers.items() if buffer.value != MICRO_BATCH and not array.is_deleted()
        }
        own = {buffer.micro_batch for buffer in live if buffer.micro_batch is not None}
        self.peak_buffers = max(self.peak_buffers, len(live))
        self.peak_micro_batches = max(self.peak_micro_batches, len(own))
        self.peak_bytes = max(self.peak_bytes, sum(_device_bytes(array) for array in live.values()))


class _StageRun:
    """One step on one stage. `arriving`: posted receives not waited for yet. `position`: of the current task."""

    __slots__ = ("arguments", "arriving", "buffers", "position", "results", "sequence", "stop")

    def __init__(self, sequence: int, stop: StopSignal, arguments: Buffers, fixed: Buffers) -> None:
        self.sequence = sequence
        self.stop = stop
        self.arguments = arguments
        self.buffers = dict(fixed)
        self.arriving: dict[Buffer, PendingValue] = {}
        self.results: Buffers = {}
        self.position = 0

    def settle(self, buffers: Sequence[Buffer]) -> None:
        """Wait for the posted receives."""
        for buffer in buffers:
            incoming = self.arriving.pop(buffer, None)
            if incoming is not None:
                self.buffers[buffer] = incoming.wait(self.stop)


#: Starts one task. Whatever it reads is there.
_Start = Callable[[_StageRun], None]


class StageRunner:
    """The list of one stage, ready to run.

    programs: by the tasks' name of them. handovers: by transfer number, of the stage's sends and receives. fixed:
    buffers present in every step, e.g. the numbers of the micro-batches.
    """

    def __init__(
        self,
        stage: int,
        tasks: Sequence[Task],
        programs: Mapping[str, TaskProgram],
        handovers: Mapping[int, CrossMeshReshard],
        fixed: Buffers,
    ) -> None:
        self.stage = stage
        self.tasks = tuple(tasks)
        self._fixed = fixed
        self._current: _StageRun | None = None
        self._posted_at = {task.writes[0]: at for at, task in enumerate(self.tasks) if task.kind == "receive"}
        self._steps = [(task.reads, _start(task, programs, handovers), task.frees) for task in self.tasks]

    def run(self, sequence: int, stop: StopSignal, arguments: Buffers, record: StageRecord | None = None) -> Buffers:
        """Run every task; returns the buffers of `fetch`, possibly still being computed.

        With a record, every task is waited for and measured. Raises the error of `stop` if another stage has failed,
        else an ExecutionError (or an error of our own) that names stage and task; `stop` then passes it to the others.
        """
        run = self._current = _StageRun(sequence, stop, arguments, self._fixed)
        try:
            if record is None:
                for run.position, (reads, start, frees) in enumerate(self._steps):
                    if stop.error is not None:
                        raise stop.error
                    if run.arriving:
                        run.settle(reads)
                    start(run)
                    for buffer in frees:
                        del run.buffers[buffer]
            else:
                for run.position in range(len(self._steps)):
                    self._run_measured(run, record)
        except Exception as caught:
            if caught is not stop.error:
                stop.set(self._error(run, caught))
            assert stop.error is not None
            raise stop.error from caught
        finally:
            self._current = None
        return run.results

    def place(self) -> str:
        """`stage 1, task 7 (…)` of the step that runs; empty without one. May be called by any thread."""
        run = self._current
        return f"stage {self.stage}, task {run.position} ({self.tasks[run.position]})" if run is not None else ""

    def _run_measured(self, run: _StageRun, record: StageRecord) -> None:
        """The task at `run.position`, to its end."""
        position, stop = run.position, run.stop
        reads, start, frees = self._steps[position]
        if stop.error is not None:
            raise stop.error
        for buffer in [buffer for buffer in reads if buffer in run.arriving]:
            run.settle([buffer])
            run.buffers[buffer].block_until_ready()
            posted = record.spans[self._posted_at[buffer]]
            record.spans[posted.task] = TaskSpan(posted.task, posted.start_s, time.time())
        start_s = time.time()
        start(run)
        task = self.tasks[position]
        for buffer in task.writes:
            if buffer in run.buffers:
                run.buffers[buffer].block_until_ready()
        record.spans.append(TaskSpan(position, start_s, time.time()))
        record.record_live(run.buffers)
        for buffer in frees:
            del run.buffers[buffer]

    def _error(self, run: _StageRun, caught: Exception) -> ShardwrightError:
        position, failure = self._find_first_failed(run) or (run.position, caught)
        where = f"stage {self.stage}, task {position} ({self.tasks[position]})"
        if isinstance(failure, ShardwrightError):
            where = f"{where}: {failure.where}" if failure.where else where
            return type(failure)(failure.message, where=where, remedy=failure.remedy)
        return execution_error(failure, where)

    def _find_first_failed(self, run: _StageRun) -> tuple[int, Exception] | None:
        """The task whose program failed after dispatch, noticed only by a later one; and its error."""
        for position, task in enumerate(self.tasks[: run.position]):
            if not task.is_compute:
                continue
            for array in (run.buffers[buffer] for buffer in task.writes if buffer in run.buffers):
                if not array.is_deleted() and array.is_ready():  # type: ignore[attr-defined]
                    try:
                        array.block_until_ready()
                    except Exception as failure:
                        return position, failure
        return None


def execution_error(caught: Exception, where: str, remedy: str = "") -> ExecutionError:
    """An error of XLA or JAX, in one line. remedy: used when the error has none."""
    lines = str(caught).strip().splitlines()
    message = lines[0] if lines else type(caught).__name__
    return ExecutionError(message, where=where, remedy=remedy_of(caught) or remedy)


def _start(task: Task, programs: Mapping[str, TaskProgram], handovers: Mapping[int, CrossMeshReshard]) -> _Start:
    """A task's action, with all step-independent lookups done."""
    reads, writes, transfer = task.reads, task.writes, task.transfer

    def take(run: _StageRun) -> None:
        for buffer in writes:
            run.buffers[buffer] = run.arguments[buffer]

    def fetch(run: _StageRun) -> None:
        for buffer in reads:
            run.results[buffer] = run.buffers[buffer]

    if task.kind == "input":
        return take
    if task.kind == "fetch":
        return fetch
    if task.is_compute:
        program = programs[task.program]

        def compute(run: _StageRun) -> None:
            buffers = run.buffers
            buffers.update(zip(writes, program.run([buffers[buffer] for buffer in reads]), strict=True))

        return compute
    assert transfer is not None
    handover = handovers[transfer]

    def send(run: _StageRun) -> None:
        handover.send(first_number(run.sequence, transfer), run.buffers[reads[0]])

    def receive(run: _StageRun) -> None:
        run.arriving[writes[0]] = handover.receive(first_number(run.sequence, transfer))

    return send if task.kind == "send" else receive


class TaskRunner:
    """The stages of one pipeline that this process has devices of; each has a thread of its own."""

    def __init__(self, stages: Sequence[StageRunner]) -> None:
        self.stages = tuple(stages)
        self._threads = ThreadPoolExecutor(max_workers=max(len(stages), 1), thread_name_prefix="stage")

    def run(
        self,
        sequence: int,
        stop: StopSignal,
        arguments: Mapping[int, Buffers],
        records: Mapping[int, StageRecord] | None = None,
    ) -> dict[int, Buffers]:
        """Run one step; arguments, results and records by stage. Returns once everything was dispatched.

        Raises the error of the stage that failed first, or the one that `stop` was set to.
        """
        done = {
            each.stage: self._threads.submit(
                each.run, sequence, stop, arguments.get(each.stage, {}), records[each.stage] if records else None
            )
            for each in self.stages
        }
        for future in done.values():
            future.exception()  # all of them have ended before anything is raised
        if stop.error is not None:
            raise stop.error
        return {stage: future.result() for stage, future in done.items()}

    def place(self) -> str:
        """Where each stage is that runs; may be called by any thread."""
        return ", ".join(filter(None, (stage.place() for stage in self.stages)))

    def close(self) -> None:
        """End the threads; nothing may run any more."""
        self._threads.shutdown(wait=False)


def _device_bytes(array: jax.Array) -> int:
    return int(array.addressable_data(0).nbytes)
