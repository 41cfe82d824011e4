"""The task graph of a step: tasks of every stage, their order and their buffers.

A stage (the devices of one mesh) does its tasks in the order of its list. `send` and `receive` only start a transfer
and block nothing; a task waits for its operands still in transfer. Transfers thus run beside computing, and a stage
needs one thread only. The transfers of one direction between two stages stand in the same order in both lists: a
first-in, first-out channel is enough.

A buffer is named by its value and, when every micro-batch has its own, by the micro-batch. After a task the buffers in
its `frees` are dropped: every buffer is, once; a step leaves nothing behind.

Bytes are those of one device; seconds are predictions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardwright.clusters.links import Link

#: Everything a task can be.
#: input takes the arguments of the step, fetch hands its results over; start makes what the micro-batches add to, split
#: takes one micro-batch of the batch; forward, backward and weight (gradients of variables, where backward leaves them
#: out) compute one chunk of the model, accumulate adds what they made; apply is what runs once after all of them.
TASK_KINDS = (
    "input", "start", "split", "forward", "backward", "weight", "accumulate", "send", "receive", "apply", "fetch",
)  # fmt: skip

#: Kinds that run a program on the devices of the stage.
COMPUTE_KINDS = ("start", "split", "forward", "backward", "weight", "accumulate", "apply")

#: The value that who runs the tasks provides: the number of the micro-batch, an s32 scalar.
MICRO_BATCH = "micro_batch"


class Buffer(NamedTuple):
    """A stage's buffer of a value: of one micro-batch, or (None) one for the step."""

    value: str
    micro_batch: int | None = None

    def __str__(self) -> str:
        return self.value if self.micro_batch is None else f"{self.value}@{self.micro_batch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One entry of a stage's list.

    chunk: part of the model computed; None outside any chunk.
    program: the program of a computing task; "" for the others.
    reads, writes: parameters and outputs of the program in order. `input` writes the arguments of the stage, `fetch`
        reads the results; `send` reads one buffer, `receive` writes it under the same name.
    donates: reads whose memory the program takes over. One that is also written is updated in place.
    frees: buffers dropped after the task, including donated ones it does not write.
    peer, transfer: of sends and receives: the other stage, and a number unique to both ends of the transfer.
    time_s: predicted seconds of the program.
    workspace_bytes: memory of the program beside its reads and writes.
    """

    kind: str
    stage: int
    chunk: int | None = None
    micro_batch: int | None = None
    program: str = ""
    reads: tuple[Buffer, ...] = ()
    writes: tuple[Buffer, ...] = ()
    donates: tuple[Buffer, ...] = ()
    frees: tuple[Buffer, ...] = ()
    peer: int | None = None
    transfer: int | None = None
    time_s: float = 0.0
    workspace_bytes: int = 0

    @property
    def is_compute(self) -> bool:
        return self.kind in COMPUTE_KINDS

    def __str__(self) -> str:
        """In messages: `forward.2 of micro-batch 3`, `send x@3 to stage 1`."""
        if self.kind == "send":
            return f"send {self.reads[0]} to stage {self.peer}"
        if self.kind == "receive":
            return f"receive {self.writes[0]} from stage {self.peer}"
        name = self.program or self.kind
        return name if self.micro_batch is None else f"{name} of micro-batch {self.micro_batch}"


class TaskId(NamedTuple):
    """Position of a task: its stage, and its place in that stage's list."""

    stage: int
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskGraph:
    """The ordered tasks of every stage.

    sizes: per stage, bytes of each value on one device.
    sent_bytes: per value, one device's bytes on a link when the value goes to another stage.
    links: per (source, target) pair with transfers, the link of one device of `source`; empty: transfers cost nothing.
    """

    schedule: str
    micro_batches: int
    stages: tuple[tuple[Task, ...], ...]
    sizes: tuple[Mapping[str, int], ...]
    sent_bytes: Mapping[str, int]
    links: Mapping[tuple[int, int], Link]

    def tasks(self) -> Iterator[tuple[TaskId, Task]]:
        """All tasks, stage by stage in order."""
        for stage, tasks in enumerate(self.stages):
            for index, task in enumerate(tasks):
                yield TaskId(stage, index), task

    def check(self) -> None:
        """Raises PlanCheckError naming stage and task if running the lists could go wrong (`tasks.check`)."""
        from shardwright.tasks.check import check

        check(self)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON; tasks that differ only in their micro-batch share the rest."""
        from shardwright.tasks.task_json import encode

        return encode(self)

    @classmethod
    def from_dict(cls, data: Any, path: str = "tasks") -> TaskGraph:
        """Read `as_dict`'s data; raises PlanError naming the wrong field, under `path`."""
        from shardwright.tasks.task_json import decode

        return decode(data, path)

    def to_json(self, *, indent: int | None = None) -> str:
        return json.dumps(self.as_dict(), indent=indent)

    def to_dot(self) -> str:
        """The graph in the DOT language: a box per stage with its tasks in order, an edge per transfer."""
        from shardwright.tasks.graphviz import to_dot

        return to_dot(self)
