"""Synthetic pipelines of one device a stage, run by the workers' own task runner."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import numpy as np

from shardwright.clusters.links import Link
from shardwright.plans.layouts import Layout
from shardwright.plans.shardings import Mesh
from shardwright.server.runtime.arrays import local_positions
from shardwright.server.runtime.cross_mesh_reshard import CrossMeshReshard
from shardwright.server.runtime.resharding import RowSection
from shardwright.server.runtime.resharding import TransferPiece as MovedPiece
from shardwright.server.runtime.tasks import StageRunner, TaskProgram, TaskRunner
from shardwright.server.runtime.transport import Endpoint, PendingPiece, StopSignal, Transport
from shardwright.tasks import ProgramSpec, Schedule, StepSpec, StepValue, Task, TaskGraph, task_graph

#: Elements of every array: one micro-batch's activations.
WIDTH = 96 * 96

#: Devices of a process.
DEVICES = 8

#: Limit in seconds of a step.
WAIT_S = 120.0

_ARRAY_BYTES = 4 * WIDTH


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One pipeline: its shape, its schedule, the imbalance of its chunks, the speed of its links.

    uneven: chunks take between 1 − uneven and 1 + uneven of the mean. link_s: seconds of one micro-batch's activations
    between two stages.
    """

    stages: int
    micro_batches: int
    schedule: str
    chunks: int = 1
    uneven: float = 0.0
    link_s: float = 0.0

    def __str__(self) -> str:
        chunks = f" ×{self.chunks}" if self.chunks > 1 else ""
        return f"{self.stages} stages, {self.micro_batches} micro-batches, {self.schedule}{chunks}"


def build_step_spec(case: Case, forward_s: float) -> StepSpec:
    """A chain of chunks, backward twice as long as forward, and an update behind all stages.

    With a zero-bubble schedule weight gradients are a program of their own, a third of all.
    """
    count = case.stages * case.chunks
    rng = random.Random(0)
    stage_of_chunk = tuple(chunk % case.stages for chunk in range(count))
    is_split = case.schedule == "zero-bubble"
    programs: list[ProgramSpec] = []
    for chunk in range(count):
        time_s = forward_s * (1 + case.uneven * rng.uniform(-1, 1)) / case.chunks
        inputs = (f"y{chunk - 1}",) if chunk else ("x",)
        gradients = (f"g{chunk + 1}",) if chunk + 1 < count else ()
        place = {"stage": stage_of_chunk[chunk], "chunk": chunk}
        programs += [
            ProgramSpec(
                program=f"f{chunk}", kind="forward", reads=inputs, writes=(f"y{chunk}",), time_s=time_s, **place
            ),
            ProgramSpec(
                program=f"b{chunk}", kind="backward", reads=(f"y{chunk}", *gradients), writes=(f"g{chunk}",),
                time_s=time_s if is_split else 2 * time_s, **place,
            ),
        ]  # fmt: skip
        if is_split:
            programs.append(
                ProgramSpec(
                    program=f"w{chunk}",
                    kind="weight",
                    reads=(f"g{chunk}",),
                    writes=(f"d{chunk}",),
                    time_s=time_s,
                    **place,
                )
            )
    last = "d" if is_split else "g"
    for stage in range(case.stages):
        own = tuple(f"{last}{chunk}" for chunk in range(count) if stage_of_chunk[chunk] == stage)
        sums = tuple(f"n{other}" for other in range(case.stages))
        programs += [
            ProgramSpec(
                program=f"norm{stage}",
                kind="apply",
                stage=stage,
                reads=own,
                writes=(f"n{stage}",),
                time_s=forward_s / 4,
            ),
            ProgramSpec(
                program=f"apply{stage}",
                kind="apply",
                stage=stage,
                reads=sums,
                writes=(f"o{stage}",),
                time_s=forward_s / 2,
            ),
        ]
    outputs = tuple((f"o{stage}", stage) for stage in range(case.stages))
    once = {"x", *(name for program in programs if program.kind == "apply" for name in program.writes)}
    names = dict.fromkeys(["x", *(name for program in programs for name in program.writes)])
    pairs = [(a, b) for a in range(case.stages) for b in range(case.stages) if a != b]
    link = Link(bandwidth_bytes_per_s=_ARRAY_BYTES / case.link_s, latency_s=0.0) if case.link_s else None
    return StepSpec(
        micro_batches=case.micro_batches,
        stage_of_chunk=stage_of_chunk,
        values=tuple(
            StepValue(
                name=name,
                scope="step" if name in once else "micro_batch",
                sizes=dict.fromkeys(range(case.stages), _ARRAY_BYTES),
                sent_bytes=_ARRAY_BYTES,
            )
            for name in names
        ),
        programs=tuple(programs),
        arguments=(("x", 0),),
        outputs=outputs,
        links=dict.fromkeys(pairs, link) if link else {},
    )


def build_graph(case: Case, forward_s: float) -> TaskGraph:
    return task_graph(build_step_spec(case, forward_s), Schedule.parse(case.schedule))


# ---- running -------------------------------------------------------------------


class SlowLinks:
    """A transport with simulated links: each direction between two devices is busy for a transfer's bytes / bandwidth.

    Transfers run one after the other, each from when both ends are ready (the receiver pulls).
    """

    def __init__(self, inner: Transport, links: Mapping[tuple[int, int], Link]) -> None:
        self._inner = inner
        self._links = links
        self._posted: dict[int, threading.Event] = defaultdict(threading.Event)
        self._queues: dict[tuple[int, int], queue.Queue[tuple[int, jax.Array]]] = {}
        self._lock = threading.Lock()

    def send(self, number: int, array: jax.Array, target: int) -> None:
        source = next(position for position, device in local_positions().items() if device in array.devices())
        with self._lock:
            channel = (source, target)
            if channel not in self._queues:
                self._queues[channel] = queue.Queue()
                threading.Thread(target=self._carry, args=channel, daemon=True).start()
            self._queues[channel].put((number, array))

    def receive(self, number: int, piece: MovedPiece, dtype: Any) -> PendingPiece:
        with self._lock:
            self._posted[number].set()
        return self._inner.receive(number, piece, dtype)

    def forget(self, sequence: int) -> None:
        self._inner.forget(sequence)

    def _carry(self, source: int, target: int) -> None:
        link = self._links[source, target]
        while True:
            number, array = self._queues[source, target].get()
            with self._lock:
                posted = self._posted[number]
            posted.wait(WAIT_S)
            sleep_at_least(array.nbytes / link.bandwidth_bytes_per_s)
            self._inner.send(number, array, target)
            with self._lock:
                del self._posted[number]


def sleep_at_least(time_s: float) -> None:
    """Sleep, no shorter than asked."""
    until_s = time.perf_counter() + time_s
    while (left_s := until_s - time.perf_counter()) > 0:
        time.sleep(left_s)


class SleepingProgram:
    """A program that sleeps for its seconds and computes nothing."""

    def __init__(self, time_s: float, outputs: Sequence[jax.Array]) -> None:
        self._time_s = time_s
        self._outputs = outputs

    def run(self, arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
        del arrays
        sleep_at_least(self._time_s)
        return self._outputs


class Pipeline:
    """This process's stages of a task graph, ready to run.

    program_of: (task, array on its stage's device) -> program. processes: of the job; stage s of S is on process
    s · processes // S; each has `DEVICES` devices.
    """

    def __init__(
        self,
        graph: TaskGraph,
        program_of: Callable[[Task, jax.Array], TaskProgram],
        *,
        processes: int = 1,
        transport: Transport | None = None,
    ) -> None:
        devices = local_positions()
        count = len(graph.stages)
        positions = [DEVICES * (stage * processes // count) + stage for stage in range(count)]
        layouts = [Layout.replicated("f32", (WIDTH,), Mesh.of({"x": 1}), position) for position in positions]
        carrier = transport or Endpoint(devices, None).transport_to({})
        if graph.links:
            carrier = SlowLinks(carrier, graph.links)

        def handover(task: Task) -> CrossMeshReshard:
            assert task.peer is not None
            ends = (task.stage, task.peer) if task.kind == "send" else (task.peer, task.stage)
            source, target = (RowSection(layouts[end]) for end in ends)
            return CrossMeshReshard(
                (source,), target, node_of=lambda position: position // DEVICES, devices=devices, transport=carrier
            )

        runners = []
        self._arguments = {}
        for stage, tasks in enumerate(graph.stages):
            if positions[stage] not in devices:
                continue
            array = jax.device_put(np.zeros(WIDTH, np.float32), devices[positions[stage]])
            programs: dict[str, TaskProgram] = {}
            for task in tasks:
                if task.is_compute and task.program not in programs:
                    programs[task.program] = program_of(task, array)
            handovers = {task.transfer: handover(task) for task in tasks if task.transfer is not None}
            runners.append(StageRunner(stage, tasks, programs, handovers, {}))
            self._arguments[stage] = {buffer: array for task in tasks if task.kind == "input" for buffer in task.writes}
        self._sequence = 0
        self._runner = TaskRunner(runners)

    def step(self) -> tuple[float, float]:
        """Run one step until its results are computed; returns its begin and end by `time.perf_counter`."""
        self._sequence += 1
        begin_s = time.perf_counter()
        results = self._runner.run(self._sequence, StopSignal(WAIT_S), self._arguments)
        jax.block_until_ready([list(own.values()) for own in results.values()])
        return begin_s, time.perf_counter()

    def step_s(self) -> float:
        """Seconds of one step."""
        begin_s, end_s = self.step()
        return end_s - begin_s

    def close(self) -> None:
        self._runner.close()


def build_sleeping(case: Case, forward_s: float) -> tuple[TaskGraph, Pipeline]:
    """Build the case with sleeping programs of the predicted seconds."""
    graph = build_graph(case, forward_s)
    return graph, Pipeline(graph, lambda task, array: SleepingProgram(task.time_s, [array] * len(task.writes)))


def build_computing(case: Case, rounds: int) -> tuple[TaskGraph, Pipeline]:
    """Build the case with programs of small matrix products, and their measured seconds, one by one.

    rounds: products of a forward program.
    """
    graph = build_graph(case, float(rounds))

    def program_of(task: Task) -> ComputingProgram:
        return build_computing_program(round(task.time_s), len(task.reads), len(task.writes))

    pipeline = Pipeline(graph, lambda task, array: program_of(task))
    stages = tuple(
        tuple(replace(task, time_s=program_of(task).alone_s) if task.is_compute else task for task in tasks)
        for tasks in graph.stages
    )
    return replace(graph, stages=stages), pipeline


class ComputingProgram:
    """`rounds` products of 96 × 96 matrices, each on one core. alone_s: seconds without other load."""

    def __init__(self, rounds: int, reads: int, writes: int) -> None:
        def compute(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            first = sum(arrays[1:], arrays[0]).reshape(96, 96)
            result = jax.lax.fori_loop(0, rounds, lambda _, x: jax.numpy.tanh(x @ x), first)
            return (result.reshape(WIDTH),) * writes

        self._run = jax.jit(compute)
        arguments = [jax.numpy.zeros(WIDTH, np.float32)] * reads
        jax.block_until_ready(self._run(*arguments))
        self.alone_s = min(self._time_run(arguments) for _ in range(10))

    def _time_run(self, arguments: Sequence[jax.Array]) -> float:
        begin_s = time.perf_counter()
        jax.block_until_ready(self._run(*arguments))
        return time.perf_counter() - begin_s

    def run(self, arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
        results: Sequence[jax.Array] = self._run(*arrays)
        return results


@cache
def build_computing_program(rounds: int, reads: int, writes: int) -> ComputingProgram:
    """Build a program; equal ones share one, measured once."""
    return ComputingProgram(rounds, reads, writes)
