"""Pipelines with stages on several processes, like a cluster's: transfers go through sockets."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import jax

from benchmarks.runtime.pipelines import DEVICES, WAIT_S, Case, Pipeline, SleepingProgram, build_graph
from shardwright.server.runtime.arrays import local_positions
from shardwright.server.runtime.transport import Endpoint
from shardwright.tasks import TaskGraph

_HOST = "127.0.0.1"


class Workers:
    """Processes of one job of JAX; stage s of S is on process s · count // S."""

    def __init__(self, count: int) -> None:
        with socket.socket() as free:
            free.bind((_HOST, 0))
            coordinator = f"{_HOST}:{free.getsockname()[1]}"
        context = multiprocessing.get_context("spawn")
        self._ends: list[Connection] = []
        self._processes: list[BaseProcess] = []
        for number in range(count):
            end, other = context.Pipe()
            process = context.Process(target=_run_worker, args=(other, coordinator, count, number), daemon=True)
            process.start()
            self._ends.append(end)
            self._processes.append(process)
        addresses = self._receive()
        self._send([addresses] * count)

    def open(self, case: Case, forward_s: float) -> TaskGraph:
        """Build the case with sleeping programs on all processes."""
        self._send([(case, forward_s)] * len(self._ends))
        self._receive()
        return build_graph(case, forward_s)

    def step_s(self) -> float:
        """Seconds of one step, from the first process's begin to the last one's end, by one clock."""
        self._send(["step"] * len(self._ends))
        spans = self._receive()
        return max(end for _, end in spans) - min(begin for begin, _ in spans)

    def close(self) -> None:
        self._send([None] * len(self._ends))
        for process in self._processes:
            process.join(WAIT_S)

    def _send(self, messages: Sequence[object]) -> None:
        for end, message in zip(self._ends, messages, strict=True):
            end.send(message)

    def _receive(self) -> list:
        for end in self._ends:
            if not end.poll(WAIT_S):
                raise TimeoutError(f"a process of the job did not answer within {WAIT_S:g} s")
        return [end.recv() for end in self._ends]


def _run_worker(end: Connection, coordinator: str, count: int, number: int) -> None:
    """A process of the job: builds the requested cases, and runs its stages' part of a step."""
    jax.distributed.initialize(coordinator, count, number)
    endpoint = Endpoint(local_positions(), _HOST)
    end.send(endpoint.address)
    addresses = end.recv()
    at = {DEVICES * process + device: addresses[process] for process in range(count) for device in range(DEVICES)}
    pipeline: Pipeline | None = None
    while (message := end.recv()) is not None:
        if message == "step":
            assert pipeline is not None
            end.send(pipeline.step())
            continue
        case, forward_s = message
        if pipeline is not None:
            pipeline.close()
        pipeline = Pipeline(
            build_graph(case, forward_s),
            lambda task, array: SleepingProgram(task.time_s, [array] * len(task.writes)),
            processes=count,
            transport=endpoint.transport_to(at),
        )
        end.send("made")
    jax.distributed.shutdown()
