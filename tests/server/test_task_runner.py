"""The task runner on eight devices of this process: numbers, memory, errors, overlap."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np
import pytest

from shardwright.errors import DeadlineError, ExecutionError, ShardwrightError, WorkerLostError
from shardwright.server.runtime.arrays import StoredArray, from_host, local_positions, sharding_of, whole_to_host
from shardwright.server.runtime.cross_mesh_reshard import CrossMeshReshard
from shardwright.server.runtime.resharding import RowSection
from shardwright.server.runtime.tasks import Buffers, StageRecord, StageRunner, TaskProgram, TaskRunner
from shardwright.server.runtime.transport import Endpoint, StopSignal
from shardwright.tasks import MICRO_BATCH, Buffer, Task
from tests.server import two_stages as step

WAIT_S = 30.0


class Jitted:
    """A piece as a program of its stage's devices."""

    def __init__(self, hand_piece: step.HandPiece, micro_batches: int) -> None:
        lying = step.layouts(micro_batches)
        piece = hand_piece.piece
        self._run = jax.jit(
            hand_piece.function,
            donate_argnums=tuple(piece.reads.index(name) for name in piece.donates),
            out_shardings=tuple(sharding_of(lying[name, piece.stage]) for name in piece.writes),
        )

    def run(self, arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
        return self._run(*arrays)


def jitted(micro_batches: int) -> dict[str, TaskProgram]:
    return {each.piece.program: Jitted(each, micro_batches) for each in step.PIECES}


def runner_of(micro_batches: int, schedule: str, programs: dict[str, TaskProgram]) -> TaskRunner:
    graph, lying = step.graph(micro_batches, schedule), step.layouts(micro_batches)
    transport = Endpoint(local_positions(), None).transport_to({})

    def handover(task: Task) -> CrossMeshReshard:
        is_send = task.kind == "send"
        value = (task.reads if is_send else task.writes)[0].value
        source, target = (task.stage, task.peer) if is_send else (task.peer, task.stage)
        return CrossMeshReshard(
            (RowSection(lying[value, source]),), RowSection(lying[value, target]), node_of=lambda position: 0,
            devices=local_positions(), transport=transport,
        )  # fmt: skip

    return TaskRunner(
        [
            StageRunner(
                stage, tasks, programs, {task.transfer: handover(task) for task in tasks if task.transfer is not None},
                {
                    Buffer(MICRO_BATCH, i): from_host(np.int32(i).tobytes(), lying[MICRO_BATCH, stage]).value
                    for i in range(micro_batches)
                },
            )
            for stage, tasks in enumerate(graph.stages)
        ]
    )  # fmt: skip


def arguments(arrays: step.Arrays, micro_batches: int) -> dict[int, Buffers]:
    lying, stored = step.layouts(micro_batches), step.stored_inputs(arrays, micro_batches)
    entries: dict[int, Buffers] = {0: {}, 1: {}}
    for name, stage in step.ARGUMENTS:
        entries[stage][Buffer(name)] = from_host(stored[name].tobytes(), lying[name, stage]).value
    return entries


def results(done: dict[int, Buffers], micro_batches: int) -> step.Arrays:
    lying = step.layouts(micro_batches)
    entries = {}
    for name, stage in step.OUTPUTS:
        stored = StoredArray(value=done[stage][Buffer(name)], layout=lying[name, stage])
        entries[name.removesuffix("_new")] = whole_to_host(stored)
    return entries


@pytest.mark.parametrize(("schedule", "micro_batches"), [("gpipe", 4), ("1f1b", 4), ("1f1b", 1), ("2f2b", 8)])
def test_steps_agree_with_one_device(schedule: str, micro_batches: int) -> None:
    runner = runner_of(micro_batches, schedule, jitted(micro_batches))
    arrays, expected = step.inputs(), step.inputs()
    for number in range(1, 4):
        done = results(runner.run(number, StopSignal(WAIT_S), arguments(arrays, micro_batches)), micro_batches)
        after = step.reference(expected)
        for name, value in after.items():
            np.testing.assert_allclose(done[name], value, rtol=1e-5, atol=1e-6)
        arrays |= {name: done[name] for name in ("w0", "w1")}
        expected |= {name: np.asarray(after[name]) for name in ("w0", "w1")}


@pytest.mark.parametrize(("schedule", "most"), [("1f1b", 2), ("gpipe", 8)])
def test_the_first_stage_holds_as_many_micro_batches_as_the_schedule_says(schedule: str, most: int) -> None:
    runner = runner_of(8, schedule, jitted(8))
    records = {stage: StageRecord(stage=stage) for stage in (0, 1)}
    runner.run(1, StopSignal(WAIT_S), arguments(step.inputs(), 8), records)
    assert records[0].peak_micro_batches == most
    assert len(records[0].spans) == len(runner.stages[0].tasks)
    for record in records.values():
        assert all(span.start_s <= span.end_s for span in record.spans)
        assert record.peak_buffers > 0
        assert record.peak_bytes > 0


class Failing:
    """Raises at its third run."""

    def __init__(self, program: TaskProgram) -> None:
        self._program = program
        self._left = 2

    def run(self, arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
        if self._left == 0:
            raise RuntimeError("no memory left\nand a long story")
        self._left -= 1
        return self._program.run(arrays)


def test_a_failing_task_ends_the_step_for_all_stages_and_is_named() -> None:
    programs = jitted(4)
    working = runner_of(4, "1f1b", dict(programs))
    failing = runner_of(4, "1f1b", programs | {"backward.1": Failing(programs["backward.1"])})
    stop = StopSignal(WAIT_S)
    started_s = time.monotonic()
    with pytest.raises(ExecutionError, match=r"no memory left$") as caught:
        failing.run(1, stop, arguments(step.inputs(), 4))
    assert time.monotonic() - started_s < WAIT_S / 2, "the other stage waited to its deadline"
    assert caught.value.where.startswith("stage 1, task ")
    assert "backward.1 of micro-batch 2" in caught.value.where
    done = results(working.run(2, StopSignal(WAIT_S), arguments(step.inputs(), 4)), 4)
    np.testing.assert_allclose(done["loss"], step.reference(step.inputs())["loss"], rtol=1e-5)


class Stuck:
    def __init__(self, program: TaskProgram, until: threading.Event) -> None:
        self._program = program
        self._until = until

    def run(self, arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
        self._until.wait(WAIT_S)
        return self._program.run(arrays)


def _ended_by(act: Callable[[StopSignal], None], stop: StopSignal) -> ShardwrightError:
    """The error of a step whose first stage hangs until `act` was done."""
    until = threading.Event()
    programs = jitted(2)
    runner = runner_of(2, "gpipe", programs | {"forward.0": Stuck(programs["forward.0"], until)})
    threading.Timer(0.3, lambda: (act(stop), until.set())).start()
    with pytest.raises(ShardwrightError) as caught:
        runner.run(1, stop, arguments(step.inputs(), 2))
    return caught.value


def test_an_order_to_stop_ends_the_waits() -> None:
    lost = WorkerLostError("node 7 is gone")
    assert _ended_by(lambda stop: stop.set(lost), StopSignal(WAIT_S)) is lost


def test_no_wait_is_without_end() -> None:
    error = _ended_by(lambda stop: time.sleep(0.5), StopSignal(0.2))
    assert isinstance(error, DeadlineError)
    assert "stage 1" in error.where
    assert "backward.1 of micro-batch 0" in error.where


class Sleeping:
    """Takes its time on the stage's thread, as a device would, and notes which thread and when."""

    def __init__(self, program: TaskProgram, time_s: float, intervals: list[tuple[int, float, float]]) -> None:
        self._program = program
        self._time_s = time_s
        self._intervals = intervals

    def run(self, arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
        started_s = time.monotonic()
        time.sleep(self._time_s)
        self._intervals.append((threading.get_ident(), started_s, time.monotonic()))
        return self._program.run(arrays)


def test_stages_work_at_the_same_time() -> None:
    micro_batches = 8
    programs = jitted(micro_batches)
    intervals: list[tuple[int, float, float]] = []
    slow = {
        name: Sleeping(program, 0.02, intervals)
        for name, program in programs.items()
        if name[:8] in ("forward.", "backward")
    }
    runner = runner_of(micro_batches, "1f1b", programs | slow)
    runner.run(1, StopSignal(WAIT_S), arguments(step.inputs(), micro_batches))
    at_the_same_time = [
        (a, b) for a, b in itertools.combinations(intervals, 2) if a[0] != b[0] and max(a[1], b[1]) < min(a[2], b[2])
    ]
    assert len(at_the_same_time) >= micro_batches / 2, f"{len(at_the_same_time)} of {len(intervals)} tasks overlap"
