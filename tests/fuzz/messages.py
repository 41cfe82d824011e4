"""Mutated messages to a live server: `python -m tests.fuzz.messages [--count 20000] [--seed 0]`.

Breaks valid calls of an embedded server's master and data port, and makes them. Each is answered as asked or by a typed
error, within seconds, and another session computes right values all the while, on the same executor. Anything else is a
defect: it is printed, and the exit code is 1. Only answered calls count; one that waits, for an array that never comes,
is cancelled.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import random
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message

from shardwright.checkpoints import trees
from shardwright.errors import DeadlineError, InternalError, SessionError, ShardwrightError
from shardwright.plans.layouts import Layout
from shardwright.plans.shardings import Mesh
from shardwright.proto.v1 import common_pb2, master_pb2, operators_pb2
from shardwright.protocol import wire
from tests.datasets.training import BATCH, BATCHES, MODULE
from tests.fuzz.mutants import mutate
from tests.fuzz.witness import Witness
from tests.server.programs import inputs, layouts, training_step
from tests.server.raw_client import RawClient, Server, embedded, inline

DEVICES = 2
#: Of the server. What is slow on a busy machine is no hang to it.
OPTIONS = ("--dataset-modules", MODULE, "--cancel-grace", "60", "--silence", "60")
#: A call has this long to be answered; one that plans or compiles has more.
LIMIT_S, LONG_LIMIT_S = 10.0, 120.0
#: A call that may wait for something is waited for so long.
PATIENCE_S = 0.5
#: No step asks for a shorter limit: a busy machine would not keep it, and its executor would be replaced.
STEP_LIMIT_S = 60.0
#: Calls between two steps of the other session, and to one session.
STEP_EVERY, SESSION_EVERY = 100, 300

#: What is called, and how often.
WEIGHTS = {
    "RunSteps": 100, "OpenSession": 2, "CloseSession": 1, "UploadProgram": 8, "PlanProgram": 2, "LoadPlan": 2,
    "DumpPlan": 2, "CancelSteps": 6, "WaitForSave": 4, "ReleaseArrays": 6, "UnloadPlan": 4, "Status": 4,
    "EndSession": 4, "Drain": 4, "ReadLogs": 2, "PutArray": 16, "PutArrays": 16, "FetchArray": 8, "FetchArrays": 8,
    "ListCheckpoints": 6, "DescribeCheckpoint": 6, "AwaitBatch": 8, "CloseDataset": 6,
}  # fmt: skip
#: These plan, or wait for what is planned.
_LONG = ("PlanProgram", "LoadPlan", "DumpPlan")
#: These may rightly wait: for an array, a save, or a step that was not sent yet.
_WAITING = ("RunSteps", "FetchArray", "FetchArrays", "WaitForSave", "AwaitBatch", "ReleaseArrays")

METHODS = {
    method.name: method
    for module in (master_pb2, operators_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}


# ---- valid calls -------------------------------------------------------------------
class Target:
    """A session of its own, and valid calls in it."""

    def __init__(self, address: str, token: str, folder: Path) -> None:
        self._folder = folder
        self.client = RawClient(address, token)
        self.client.open()
        (node,) = self.client.session.nodes  # type: ignore[union-attr]
        self._data = grpc.insecure_channel(node.data_address, options=wire.CHANNEL_OPTIONS)
        self._program = self.client.upload(training_step())
        self._plan, plan = self.client.plan(self._program)
        self._executable = self.client.load(self._plan).executable_id
        self._layouts, _ = layouts(plan)
        for array_id, (array, layout) in enumerate(zip(inputs(), self._layouts, strict=True), start=1):
            self.client.put(array_id, array, layout)
        self.number = 0  # of the last step
        self._last_id = 10
        if not (folder / "given").exists():
            self._must(self._save("given"))
            self.client.call("WaitForSave", self._name(master_pb2.WaitForSaveRequest(number=self.number)))
        self._must(self._request(arguments=[1, 2, 3], snapshot=master_pb2.SnapshotArrays()))
        self._snapshot = self.number

    def channel(self, method: str) -> grpc.Channel:
        is_master = METHODS[method].containing_service.name in ("Master", "Operators")
        return self.client.channel if is_master else self._data

    def close(self) -> None:
        with contextlib.suppress(ShardwrightError):
            self.client.call("CloseSession", self._name(master_pb2.CloseSessionRequest()))
        self.client.close()
        self._data.close()

    def donors(self) -> list[Message]:
        """A valid message of each kind."""
        steps: list[Message] = [make() for make in self._steps()]
        return [*steps, *(message for name in WEIGHTS if name != "RunSteps" for message in self.messages(name))]

    def messages(self, method: str, rng: random.Random | None = None) -> list[Message]:
        """Of a valid call."""
        if method == "RunSteps":
            return [(rng or random.Random(0)).choice(self._steps())()]
        if method == "UploadProgram":
            return [self._name(each) for each in _upload()]
        if method in ("PutArray", "PutArrays"):
            return self._put() if method == "PutArray" else self._put_many()
        message = self._name(getattr(master_pb2, METHODS[method].input_type.name, operators_pb2.ReadLogsRequest)())
        self._fill(method, message)
        return [message]

    def _fill(self, method: str, message: Any) -> None:
        if method == "PlanProgram":
            message.program_id = self._program
            message.mesh.append(common_pb2.MeshAxis(name="data", size=DEVICES))
        elif method in ("LoadPlan", "DumpPlan"):
            message.plan_id = self._plan
        elif method == "UnloadPlan":
            message.executable_id = self._executable
        elif method == "CancelSteps":
            message.numbers.extend([self.number, self.number + 1])
        elif method == "WaitForSave":
            message.number = self.number
        elif method == "ReleaseArrays":
            message.array_ids.extend([self._last_id, 3])
        elif method == "EndSession":
            message.session = self.client.session_id[:8] + "0"  # nobody's
        elif method == "ReadLogs":
            message.tail = 3
        elif method in ("FetchArray", "FetchArrays"):
            self._fill_fetch(message)
        elif method in ("ListCheckpoints", "DescribeCheckpoint"):
            message.directory = str(self._folder / "given")
            if method == "DescribeCheckpoint":
                message.step = 1
        elif method in ("AwaitBatch", "CloseDataset"):
            self._fill_dataset(method, message)

    def _fill_fetch(self, message: Any) -> None:
        if isinstance(message, master_pb2.FetchArrayRequest):
            message.array_id = 2
            message.devices.extend([0, 1])
        else:
            message.arrays.extend(master_pb2.NodeShards(array_id=number, devices=[0]) for number in (2, 3))

    def _fill_dataset(self, method: str, message: Any) -> None:
        order = self._read_batch()
        if method == "AwaitBatch":
            message.dataset.CopyFrom(order.dataset)
            message.parts.extend(order.parts)
        else:
            message.dataset_id = order.dataset.dataset_id

    def _name(self, message: Any) -> Any:
        if "session_id" in message.DESCRIPTOR.fields_by_name:
            message.session_id = self.client.session_id
        return message

    def _new_id(self) -> int:
        self._last_id += 1
        return self._last_id

    # ---- arrays
    def _put(self) -> list[Message]:
        header = master_pb2.PutArrayHeader(
            session_id=self.client.session_id, array_id=self._new_id(), layout=_replicate((4,)), devices=[0]
        )
        return [
            master_pb2.PutArrayRequest(header=header),
            *(master_pb2.PutArrayRequest(chunk=bytes(8)) for _ in range(2)),
        ]

    def _put_many(self) -> list[Message]:
        first = master_pb2.PutArraysRequest(
            session_id=self.client.session_id,
            layouts=[_replicate((4,)), _split((4,))],
            arrays=[
                master_pb2.NodeShards(array_id=self._new_id(), layout=0, devices=[0]),
                master_pb2.NodeShards(array_id=self._new_id(), layout=1, devices=[0, 1]),
            ],
        )
        return [first, *(master_pb2.PutArraysRequest(chunk=bytes(16)) for _ in range(2))]

    # ---- steps
    def _request(self, **fields: Any) -> master_pb2.RunStepsRequest:
        return master_pb2.RunStepsRequest(session_id=self.client.session_id, number=self.number + 1, **fields)

    def _steps(self) -> list[Callable[[], master_pb2.RunStepsRequest]]:
        """Of each kind; the common ones more than once."""
        return [*[self._run] * 4, self._run_with_inline_arguments, *[self._move] * 2, lambda: self._save("saved"),
                self._restore, self._take_snapshot, self._restore_snapshot, self._read]  # fmt: skip

    def _run(self) -> master_pb2.RunStepsRequest:
        loss = self._new_id()
        w = inline(self._new_id(), inputs()[0], self._layouts[0])
        kept = master_pb2.KeptState(description=b"w", array_ids=[loss - 2], updates=1)
        return self._request(
            executable_id=self._executable, arguments=[w.array_id, 2, 3], outputs=[self._new_id(), loss],
            inline_arguments=[w], released=[loss - 3], read_back=[loss], kept=kept, timeout_s=STEP_LIMIT_S,
        )  # fmt: skip

    def _run_with_inline_arguments(self) -> master_pb2.RunStepsRequest:
        given = [inline(self._new_id(), each, layout) for each, layout in zip(inputs(), self._layouts, strict=True)]
        return self._request(
            executable_id=self._executable, arguments=[each.array_id for each in given],
            outputs=[self._new_id(), self._new_id()], inline_arguments=given, trace=True, check_nans=True,
            check_infs=True, generation=1,
        )  # fmt: skip

    def _move(self) -> master_pb2.RunStepsRequest:
        whole, split = wire.layout_to_proto(self._layouts[1]), _split((16, 8))
        order = master_pb2.MovedArray(
            sources=[master_pb2.MovedPart(layout=whole)], targets=[master_pb2.MovedPart(layout=split)]
        )
        return self._request(
            arguments=[2], outputs=[self._new_id()], move=master_pb2.MoveArrays(arrays=[order]), live_arrays=[2, 3]
        )

    def _save(self, name: str) -> master_pb2.RunStepsRequest:
        tree = trees.Node(kind="dict", children=(("x", trees.Leaf(name="x")),))
        order = master_pb2.SaveArrays(
            directory=str(self._folder / name), step=self.number + 1, tree_json=trees.to_text(tree), max_to_keep=2,
            parts=[master_pb2.SavedPart(name="x", shape=[16, 8], chunk=[16, 8])],
        )  # fmt: skip
        return self._request(arguments=[2], save=order)

    def _restore(self) -> master_pb2.RunStepsRequest:
        part = master_pb2.RestoredPart(name="x", layout=_split((16, 8)))
        order = master_pb2.RestoreArrays(directory=str(self._folder / "given"), step=1, parts=[part])
        return self._request(outputs=[self._new_id()], restore=order)

    def _take_snapshot(self) -> master_pb2.RunStepsRequest:
        return self._request(arguments=[2, 3], snapshot=master_pb2.SnapshotArrays())

    def _restore_snapshot(self) -> master_pb2.RunStepsRequest:
        part = master_pb2.MovedPart(layout=wire.layout_to_proto(self._layouts[1]))
        order = master_pb2.RestoreSnapshot(
            snapshot=self._snapshot, layouts=[_split((16, 8))], stored=[master_pb2.StoredArray(ids=[2], parts=[part])]
        )
        return self._request(outputs=[self._new_id()], restore_snapshot=order)

    def _read(self) -> master_pb2.RunStepsRequest:
        return self._request(outputs=[self._new_id()], read_batch=self._read_batch())

    def _read_batch(self) -> master_pb2.ReadBatch:
        dataset = master_pb2.Dataset(dataset_id="d", function=BATCHES, batch=BATCH, options_json="{}", prefetch=1)
        part = master_pb2.BatchPart(leaf=1, layout=_replicate((16, 16)))
        return master_pb2.ReadBatch(dataset=dataset, position=self.number % 4, parts=[part])

    def _must(self, request: master_pb2.RunStepsRequest) -> None:
        """Run a step that has to succeed."""
        answer = _run_step(self, [request], patience_s=LONG_LIMIT_S)
        if answer.problem or answer.error is not None or answer.is_waiting:
            raise AssertionError(f"a valid step failed: {answer}\n{request}")


def _replicate(shape: tuple[int, ...]) -> common_pb2.ArrayLayout:
    return wire.layout_to_proto(Layout.replicated("f32", shape, Mesh.of({"data": DEVICES})))


def _split(shape: tuple[int, ...]) -> common_pb2.ArrayLayout:
    layout = _replicate(shape)
    layout.dimensions[0].axes.append("data")
    return layout


def _upload() -> list[master_pb2.UploadProgramRequest]:
    return [
        master_pb2.UploadProgramRequest(chunk=chunk) for chunk in wire.chunks(wire.compress_text(training_step()), 500)
    ]


# ---- calls ---------------------------------------------------------------------------
@dataclass(kw_only=True)
class Answer:
    """is_waiting: there is none yet, rightly. problem: what is wrong with it."""

    error: ShardwrightError | None = None
    is_waiting: bool = False
    problem: str = ""


def call(target: Target, method: str, messages: Sequence[Message]) -> Answer:
    """Make a call, and look at its answer."""
    if method == "RunSteps":
        return _run_step(target, messages, patience_s=PATIENCE_S)
    limit_s = PATIENCE_S if method in _WAITING else LONG_LIMIT_S if method in _LONG else LIMIT_S
    try:
        reply = _begin(target, method, iter(messages), messages, limit_s)
        if METHODS[method].server_streaming:
            list(reply)
    except grpc.RpcError as error:
        return _judge(error, may_wait=method in _WAITING)
    return Answer()


def _begin(
    target: Target, method: str, requests: Iterator[Message], messages: Sequence[Message], limit_s: float
) -> Any:
    described = METHODS[method]
    kind = "_".join("stream" if is_stream else "unary" for is_stream in
                    (described.client_streaming, described.server_streaming))  # fmt: skip
    reply_type = getattr(master_pb2, described.output_type.name, operators_pb2.ReadLogsReply)
    make = getattr(target.channel(method), kind)(
        f"/{described.containing_service.full_name}/{method}",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=reply_type.FromString,
    )
    request = requests if described.client_streaming else messages[0]
    return make(request, metadata=target.client.metadata, timeout=limit_s)


def _judge(error: grpc.RpcError, *, may_wait: bool = False) -> Answer:
    ours = wire.error_from_rpc(error)
    is_typed = any(key == wire.ERROR_METADATA_KEY for key, _ in error.trailing_metadata() or ())
    if isinstance(ours, DeadlineError) and may_wait:
        return Answer(is_waiting=True)
    if not is_typed:
        return Answer(error=ours, problem=f"no error of ours: {error.code()}: {error.details()}")
    return _to_answer(ours)


def _to_answer(error: ShardwrightError) -> Answer:
    is_known = not isinstance(error, InternalError) and type(error) is not ShardwrightError
    return Answer(error=error, problem="" if is_known else f"an untyped error: {error!r}")


def _run_step(target: Target, messages: Sequence[Message], *, patience_s: float) -> Answer:
    """In a stream of its own. A step that waits for so long is cancelled, and has to be answered then."""
    (request,) = messages
    number = request.number  # type: ignore[attr-defined]
    requests: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
    requests.put(request)
    if not number:
        requests.put(None)  # it asks for nothing
    stream = _begin(target, "RunSteps", iter(requests.get, None), messages, patience_s + 2 * LIMIT_S)
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    reading = _Reader(stream, number, answers)
    try:
        answer = reading.answer(patience_s)
        if answer is None and number:
            with contextlib.suppress(ShardwrightError):
                target.client.call(
                    "CancelSteps", master_pb2.CancelStepsRequest(session_id=target.client.session_id, numbers=[number])
                )
        is_waiting = answer is None
        answer = answer or reading.answer(LIMIT_S)
        if answer is None:
            return Answer(problem="no answer, and none to its cancellation")
        if answer.error is None or reading.has_reply:
            target.number = max(target.number, number)
        answer.is_waiting = is_waiting
        return answer
    finally:
        requests.put(None)
        stream.cancel()


class _Reader:
    """Reads a stream of steps in a thread, so that it need not be waited for."""

    def __init__(self, stream: Any, number: int, answers: queue.SimpleQueue[Any]) -> None:
        self._answers = answers
        self.has_reply = False
        threading.Thread(target=self._read, args=(stream, number), daemon=True).start()

    def _read(self, stream: Any, number: int) -> None:
        try:
            for reply in stream:
                if reply.number == number:
                    self.has_reply = True
                    has_error = reply.HasField("error")
                    self._answers.put(_to_answer(wire.error_from_proto(reply.error)) if has_error else Answer())
                    return
            self._answers.put(Answer() if not number else Answer(problem="the stream ended without an answer"))
        except grpc.RpcError as error:
            self._answers.put(_judge(error))

    def answer(self, limit_s: float) -> Answer | None:
        try:
            return self._answers.get(timeout=limit_s)
        except queue.Empty:
            return None


# ---- the run ---------------------------------------------------------------------------
@dataclass(kw_only=True)
class Report:
    answered: int = 0
    waiting: int = 0
    by_method: Counter[str] = field(default_factory=Counter)
    by_error: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


def run(
    server: Server, client: RawClient, folder: Path, *, count: int, seed: int, is_over: Callable[[], bool]
) -> Report:
    """Mutated calls until `count` of them are answered, or it is over, or the server is no longer itself."""
    rng, report, witness = random.Random(seed), Report(), Witness(server, client)
    target: Target | None = None
    calls = 0
    while report.answered < count and not is_over():
        if target is None or calls % SESSION_EVERY == 0:
            if target is not None:
                target.close()
            target = Target(client.channel_address, client.token or "", folder)
            donors = target.donors()
        calls += 1
        method = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        messages = _harmless(method, mutate(rng, target.messages(method, rng), donors))
        answer = call(target, method, messages)
        report.by_method[method] += not answer.is_waiting
        report.by_error["waiting" if answer.is_waiting else answer.error.code if answer.error else "done"] += 1
        report.answered += not answer.is_waiting
        report.waiting += answer.is_waiting
        problem = answer.problem or (witness.problem() if calls % STEP_EVERY == 0 else "")
        if problem:
            text = "\n".join(f"  {type(message).__name__}: {str(message)[:1500]}" for message in messages)
            report.problems.append(f"{method}, call {calls}: {problem}\n{text}")
            if server.process.poll() is not None or not answer.problem:
                break
        if isinstance(answer.error, SessionError) or method in ("CloseSession", "EndSession"):
            target.close()
            target = None
    if target is not None:
        target.close()
    if not report.problems and (problem := witness.problem()):
        report.problems.append(problem)
    return report


def _harmless(method: str, messages: list[Any]) -> list[Any]:
    """Without what ends the server, or a healthy step, or goes on for ever, as it should."""
    if method == "Drain":
        return [master_pb2.DrainRequest()]
    for message in messages:
        if method == "ReadLogs":
            message.follow = False
        if method == "RunSteps" and 0 < message.timeout_s < STEP_LIMIT_S:
            message.timeout_s = STEP_LIMIT_S
    return messages


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20_000, help="calls that are answered")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ |= {"JAX_PLATFORMS": "cpu", "SHARDWRIGHT_CACHE": "off"}
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        for server, client in embedded(DEVICES, *OPTIONS):
            report = run(server, client, Path(folder), count=options.count, seed=options.seed, is_over=lambda: False)
    for problem in report.problems:
        print(problem + "\n")
    print(f"messages: {report.answered} mutated calls answered, {report.waiting} waiting, "
          f"{len(report.problems)} neither answered as asked nor refused by type")  # fmt: skip
    print(", ".join(f"{name} {number}" for name, number in (report.by_method + report.by_error).most_common()))
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
