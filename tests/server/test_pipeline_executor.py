"""A pipeline from plan to results: the master's orders, carried out by an executor in this process."""

from __future__ import annotations

import queue

import numpy as np
import pytest

from shardwright.errors import ArrayError, ExecutionError
from shardwright.plans.layouts import Layout
from shardwright.plans.pipeline_plan import ArgumentEntry, OutputEntry, PipelinePlan
from shardwright.proto.v1 import master_pb2, worker_pb2
from shardwright.protocol import wire
from shardwright.server.limits import Limits
from shardwright.server.master import commands as do
from shardwright.server.master.content_store import PlanRecord
from shardwright.server.master.executables import compile_program, load_messages, load_result
from shardwright.server.master.formation import Formation
from shardwright.server.master.nodes import Identity, Member
from shardwright.server.runtime.arrays import ArrayStore, local_positions
from shardwright.server.runtime.executor import Executor
from shardwright.server.runtime.transport import Endpoint
from shardwright.xla import CompileService
from tests.server import two_stages as step
from tests.server.hand_plans import pipeline_plan
from tests.server.raw_client import inline

SESSION = "session"
MICRO_BATCHES = 4


class OneNode:
    """An executor that owns all eight devices, and the master's side of it."""

    def __init__(self, plan: PipelinePlan) -> None:
        self.plan = plan
        self.events: queue.SimpleQueue[worker_pb2.ExecutorEvent] = queue.SimpleQueue()
        endpoint = Endpoint(local_positions(), None)
        self.executor = Executor(
            ArrayStore(), self.events.put, read_back_bytes=1 << 16, transport_to=endpoint.transport_to,
            transfer_wait_s=30.0,
        )  # fmt: skip
        identity = Identity(cluster_hash="", shardwright_version="", jax_version="")
        member = Member(index=0, address="", device_count=8)
        self.formation = Formation((member,), identity, Limits(), wait_s=1.0, now_s=0.0)
        self.sequence = 0
        self.answer(worker_pb2.ExecutorCommand(open=worker_pb2.OpenWorkerSession(session_id=SESSION)))

    def answer(self, command: worker_pb2.ExecutorCommand) -> worker_pb2.CommandDone:
        self.sequence += 1
        command.sequence = self.sequence
        self.executor.handle(command)
        return self.events.get(timeout=60).done

    def load(self, compiler: CompileService) -> master_pb2.LoadResult:
        record = PlanRecord(plan=self.plan, json_gzip=b"")
        program = compile_program("plan", record, compiler, self.formation.nodes_of)
        assert program.stages == (frozenset({0}),) * 2
        *chunks, load = load_messages(do.LoadOnWorkers(sequence=1, session_id=SESSION, program=program), self.formation)
        for chunk in chunks:
            self.executor.handle(chunk.message)
        done = self.answer(load.message)
        assert not done.HasField("error"), done.error
        return load_result(program)

    def layout(self, entry: ArgumentEntry | OutputEntry) -> Layout:
        stage = self.plan.stages[entry.stage]
        return Layout.of(entry.variable, stage.mesh, stage.first_device)

    def step(self, number: int, arguments: list[int], outputs: list[int], **more: object) -> worker_pb2.CommandDone:
        request = master_pb2.RunStepsRequest(
            session_id=SESSION, number=number, executable_id="plan", arguments=arguments, outputs=outputs,
            read_back=outputs, **more,
        )  # fmt: skip
        return self.answer(worker_pb2.ExecutorCommand(run=worker_pb2.RunStep(step=request)))

    def inline(self, arrays: step.Arrays, ids: dict[str, int]) -> list[master_pb2.InlineArray]:
        stored = step.stored_inputs(arrays, MICRO_BATCHES)
        return [
            inline(ids[entry.value], stored[entry.value], self.layout(entry))
            for entry in self.plan.arguments
            if entry.value in ids
        ]


def values(done: worker_pb2.CommandDone) -> list[np.ndarray]:
    assert not done.HasField("error"), wire.error_from_proto(done.error)
    return [np.frombuffer(value.data, np.float32).reshape(tuple(value.type.dimensions)) for value in done.values]


@pytest.fixture(scope="module")
def node() -> OneNode:
    node = OneNode(pipeline_plan(MICRO_BATCHES, "1f1b"))
    with CompileService(4) as compiler:
        result = node.load(compiler)
    assert [part.name for part in result.parts] == [each.piece.program for each in step.PIECES]
    assert all(part.result.arguments_bytes or part.name.startswith("start") for part in result.parts)
    return node


def test_state_stays_and_a_batch_comes_with_each_step(node: OneNode) -> None:
    arrays = step.inputs()
    state = [1, 2]
    for number in (1, 2, 3):
        new = [10 * number + at for at in range(3)]
        batch = {"x": 100 * number, "y": 100 * number + 1}
        fresh = {"w0": 1, "w1": 2, **batch} if number == 1 else batch
        done = node.step(
            number, [*state, *batch.values()], new, inline_arguments=node.inline(arrays, fresh), trace=number == 2
        )
        after = step.reference(arrays)
        for value, name in zip(values(done), ("w0", "w1", "loss"), strict=True):
            np.testing.assert_allclose(value, after[name], rtol=1e-5, atol=1e-6)
        arrays |= {name: np.asarray(after[name]) for name in ("w0", "w1")}
        assert [trace.stage for trace in done.traces] == ([0, 1] if number == 2 else [])
        gone = node.step(50 + number, [*state, *batch.values()], [0, 0, 0])
        assert isinstance(wire.error_from_proto(gone.error), ArrayError), "the state was donated"
        state = new[:2]


def test_a_step_that_was_ended_elsewhere_ends_here_and_the_next_one_runs(node: OneNode) -> None:
    ids = {"w0": 1001, "w1": 1002, "x": 1003, "y": 1004}
    node.executor.abort(node.sequence + 1, ExecutionError("out of memory", where="stage 7"))
    done = node.step(1001, list(ids.values()), [1011, 1012, 1013], inline_arguments=node.inline(step.inputs(), ids))
    assert done.error.where == "stage 7"
    assert done.error.message == "out of memory"
    ids = {name: array_id + 100 for name, array_id in ids.items()}
    done = node.step(1002, list(ids.values()), [1111, 1112, 1113], inline_arguments=node.inline(step.inputs(), ids))
    np.testing.assert_allclose(values(done)[2], step.reference(step.inputs())["loss"], rtol=1e-5)
