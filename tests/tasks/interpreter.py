"""Runs a task graph for real: a thread per stage, bounded channels, and numbers instead of arrays.

Every program is a mixing function of its inputs; what it adds to (an accumulator) grows by a term. So a buffer that is
missing, stale, of another micro-batch or of another stage changes the results.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from zlib import crc32

from shardwright.tasks import MICRO_BATCH, Buffer, StepSpec, Task, TaskGraph

DEADLINE_S = 30.0

Table = dict[Buffer, int]


def mixed(program: str, output: int, inputs: Sequence[int]) -> int:
    return crc32(repr((program, output, inputs)).encode())


def outputs_of(program: str, reads: Sequence[str], writes: Sequence[str], inputs: Sequence[int]) -> list[int]:
    """One number per write; one that is also read grows by a number mixed from the other inputs."""
    old = dict(zip(reads, inputs, strict=True))
    others = [value for name, value in zip(reads, inputs, strict=True) if name not in writes]
    return [old.get(name, 0) + mixed(program, place, others) for place, name in enumerate(writes)]


def whole_step(pieces: StepSpec, arguments: Mapping[str, int]) -> dict[str, int]:
    """The outputs of the step, piece by piece with no regard to stages: micro-batch after micro-batch."""
    step = dict(arguments)
    scopes = {value.name: value.scope for value in pieces.values}

    def run(kinds: tuple[str, ...], tables: Sequence[dict[str, int]], index: int) -> None:
        waiting = [piece for piece in pieces.programs if piece.kind in kinds]
        while waiting:
            table = {**step, **tables[index], MICRO_BATCH: index} if tables else step
            values = {name for piece in waiting for name in piece.writes if name not in piece.reads}
            piece = next(p for p in waiting if not values.intersection(p.reads))
            waiting.remove(piece)
            inputs = [table[name] for name in piece.reads]
            for name, value in zip(
                piece.writes, outputs_of(piece.program, piece.reads, piece.writes, inputs), strict=True
            ):
                (step if not tables or scopes[name] == "step" else tables[index])[name] = value

    run(("start",), (), 0)
    micro: list[dict[str, int]] = [{} for _ in range(pieces.micro_batches)]
    for index in range(pieces.micro_batches):
        run(("split", "forward", "backward", "weight", "accumulate"), micro, index)
    run(("apply",), (), 0)
    return {name: step[name] for name, _ in pieces.outputs}


class Channel:
    """One direction between two stages: first in, first out; a send waits while `capacity` are sent and not posted."""

    def __init__(self, capacity: int) -> None:
        self._credit = threading.Semaphore(capacity)
        self._sent: queue.Queue[tuple[int | None, int]] = queue.Queue()
        self._posted: list[int | None] = []

    def send(self, number: int | None, value: int) -> None:
        assert self._credit.acquire(timeout=DEADLINE_S), "nobody receives"
        self._sent.put((number, value))

    def post(self, number: int | None) -> None:
        self._posted.append(number)
        self._credit.release()

    def arrivals(self, number: int | None) -> Iterator[tuple[int | None, int]]:
        """What was posted, in order, up to transfer `number`."""
        while number in self._posted:
            sent, value = self._sent.get(timeout=DEADLINE_S)
            assert sent == self._posted.pop(0), "the ends name their transfers in different orders"
            yield sent, value


class Interpreter:
    """A thread per stage, a bounded channel per direction between two of them."""

    def __init__(self, graph: TaskGraph, arguments: Mapping[str, int], *, capacity: int = 1) -> None:
        self._graph = graph
        self._arguments = arguments
        stages = range(len(graph.stages))
        self._channels = {(a, b): Channel(capacity) for a in stages for b in stages}
        self._errors: list[BaseException] = []
        self.results: dict[str, int] = {}
        self.left: list[Table] = [{} for _ in stages]

    def run(self) -> dict[str, int]:
        stages = range(len(self._graph.stages))
        threads = [threading.Thread(target=self._guarded, args=(stage,), daemon=True) for stage in stages]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive() or self._errors, "the stages wait for each other"
        if self._errors:
            raise self._errors[0]
        return self.results

    def _guarded(self, stage: int) -> None:
        try:
            self._stage(self._graph.stages[stage], self.left[stage])
        except BaseException as error:
            self._errors.append(error)

    def _stage(self, tasks: Sequence[Task], table: Table) -> None:
        on_the_way: dict[Buffer, Task] = {}
        posted: dict[int | None, Buffer] = {}
        for task in tasks:
            if task.kind == "receive":
                self._channels[task.peer or 0, task.stage].post(task.transfer)
                on_the_way[task.writes[0]] = task
                posted[task.transfer] = task.writes[0]
                continue
            for buffer in task.reads:
                if buffer in on_the_way:
                    receive = on_the_way[buffer]
                    for number, value in self._channels[receive.peer or 0, task.stage].arrivals(receive.transfer):
                        table[posted[number]] = value
                        del on_the_way[posted.pop(number)]
            self._do(task, table)
            for buffer in task.frees:
                del table[buffer]

    def _do(self, task: Task, table: Table) -> None:
        match task.kind:
            case "input":
                table.update({buffer: self._arguments[buffer.value] for buffer in task.writes})
            case "send":
                self._channels[task.stage, task.peer or 0].send(task.transfer, table[task.reads[0]])
            case "fetch":
                self.results.update({buffer.value: table[buffer] for buffer in task.reads})
            case _:
                _compute(task, table)


def _compute(task: Task, table: Table) -> None:
    index = task.micro_batch if task.micro_batch is not None else -1
    inputs = [index if b.value == MICRO_BATCH else table[b] for b in task.reads]
    results = outputs_of(task.program, [b.value for b in task.reads], [b.value for b in task.writes], inputs)
    for buffer in task.donates:
        table[buffer] = -1  # taken over: a later read would be seen
    table.update(zip(task.writes, results, strict=True))
