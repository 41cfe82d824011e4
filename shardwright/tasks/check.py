"""Invariants of any task graph, independent of its builder: the lists can run to their end, and leave nothing
behind.
"""

from __future__ import annotations

from collections import defaultdict

from shardwright.errors import PlanCheckError
from shardwright.tasks.engine import Compute, Operation, Receive, Send, Transfer, run_operations
from shardwright.tasks.graph import COMPUTE_KINDS, MICRO_BATCH, TASK_KINDS, Buffer, Task, TaskGraph, TaskId


def check(graph: TaskGraph) -> None:
    """Raises PlanCheckError naming stage and task.

    Errors found: a buffer read before it is written or after it is dropped, kept after its last use, or written over; a
    transfer with one end, or in another order at its ends; tasks in a deadlock.
    """
    if len(graph.sizes) != len(graph.stages):
        raise PlanCheckError(f"sizes are given for {len(graph.sizes)} stages, tasks for {len(graph.stages)}")
    _check_ends(graph)
    for stage in range(len(graph.stages)):
        _check_buffers(graph, stage)
    _check_transfers(graph)
    _check_end(graph)


def _fail(id_: TaskId, task: Task, message: str) -> PlanCheckError:
    return PlanCheckError(message, where=f"stage {id_.stage}, task {id_.position} ({task})")


def _check_ends(graph: TaskGraph) -> None:
    """Each send and receive has one buffer, another end, and a number below the count of tasks."""
    count = sum(map(len, graph.stages))
    for here, task in graph.tasks():
        if task.kind not in ("send", "receive"):
            if task.transfer is not None:
                raise _fail(here, task, f"a {task.kind} has no transfer, and here it has number {task.transfer}")
            continue
        if (len(task.reads), len(task.writes)) != ((1, 0) if task.kind == "send" else (0, 1)):
            raise PlanCheckError(
                f"a {task.kind} moves {len(task.reads)} buffers out and {len(task.writes)} in, not one",
                where=f"stage {here.stage}, task {here.position}",
            )
        if task.transfer is None or task.peer is None or task.peer >= len(graph.stages):
            raise _fail(here, task, "the transfer has no number, or no other end")
        if task.transfer >= count:
            raise _fail(here, task, f"transfer {task.transfer} is numbered beyond the {count} tasks")


def _check_buffers(graph: TaskGraph, stage: int) -> None:
    live: set[Buffer] = set()
    for index, task in enumerate(graph.stages[stage]):
        here = TaskId(stage, index)
        if task.stage != stage or task.kind not in TASK_KINDS:
            raise _fail(here, task, f"a {task.kind} task of stage {task.stage} stands here")
        for buffer in task.reads:
            if buffer not in live and buffer.value != MICRO_BATCH:
                raise _fail(here, task, f"{buffer} is read, but not there")
        if not set(task.donates) <= set(task.reads):
            raise _fail(here, task, "it donates what it does not read")
        live.difference_update(task.donates)
        for buffer in task.writes:
            if buffer in live:
                raise _fail(here, task, f"{buffer} is written over")
            if buffer.value not in graph.sizes[stage]:
                raise _fail(here, task, f"{buffer} has no size")
            live.add(buffer)
        touched = {*task.reads, *task.writes}
        for buffer in task.frees:
            if buffer not in touched:
                raise _fail(here, task, f"{buffer} is dropped later than after its last use")
            if buffer not in live and buffer not in task.donates:
                raise _fail(here, task, f"{buffer} is dropped twice")
            live.discard(buffer)
        for buffer in task.donates:
            if buffer not in live and buffer not in task.frees:
                raise _fail(here, task, f"{buffer} is donated and not dropped")
    _check_last_uses(graph, stage)
    if live:
        raise PlanCheckError(f"{', '.join(sorted(map(str, live)))} stay behind", where=f"stage {stage}")


def _check_last_uses(graph: TaskGraph, stage: int) -> None:
    later: set[Buffer] = set()
    for index in reversed(range(len(graph.stages[stage]))):
        task = graph.stages[stage][index]
        dropped = set(task.frees)
        for buffer in dict.fromkeys((*task.reads, *task.writes)):
            if buffer.value != MICRO_BATCH and buffer not in dropped and buffer not in later:
                raise _fail(TaskId(stage, index), task, f"{buffer} is kept after its last use")
        later.update(task.reads, task.writes)


def _check_transfers(graph: TaskGraph) -> None:
    ends: dict[int, list[tuple[TaskId, Task]]] = defaultdict(list)
    order: dict[tuple[int, int], tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for here, task in graph.tasks():
        if task.kind not in ("send", "receive"):
            continue
        assert task.transfer is not None
        assert task.peer is not None
        ends[task.transfer].append((here, task))
        is_send = task.kind == "send"
        channel = (task.stage, task.peer) if is_send else (task.peer, task.stage)
        order[channel][0 if is_send else 1].append(task.transfer)
    for number, both in ends.items():
        send, receive = next((t for _, t in both if t.kind == "send"), None), both[-1][1]
        receive = next((t for _, t in both if t.kind == "receive"), receive)
        if len(both) != 2 or send is None or receive.kind != "receive":
            raise _fail(*both[0], f"transfer {number} needs one send and one receive")
        if send.peer != receive.stage or receive.peer != send.stage or send.reads != receive.writes:
            raise _fail(*both[0], f"the ends of transfer {number} do not fit: {send}, {receive}")
    for (source, target), (sent, received) in order.items():
        if sent != received:
            raise PlanCheckError(f"transfers from stage {source} to {target} are not received in the order sent")


def _check_end(graph: TaskGraph) -> None:
    stages, transfers = operations(graph)
    blocked = run_operations(stages, transfers).blocked
    stuck = [(stage, index) for stage, index in enumerate(blocked) if index is not None]
    if stuck:
        named = "; ".join(f"stage {s} in task {i} ({graph.stages[s][i]})" for s, i in stuck)
        raise PlanCheckError(f"stages wait for each other without end: {named}")


def channel_capacity(graph: TaskGraph) -> int:
    """Number of transfers one direction between two stages must accept before the receiver has posted them.

    With fewer places, a blocking send would deadlock stages. Needs a checked graph; the waiting buffers are the
    sender's, and are counted there.
    """
    stages, transfers = operations(graph)
    least, most = 0, len(transfers)
    while least < most:
        middle = (least + most) // 2
        if any(index is not None for index in run_operations(stages, transfers, capacity=middle).blocked):
            least = middle + 1
        else:
            most = middle
    return least


def operations(graph: TaskGraph) -> tuple[list[list[Operation]], list[Transfer]]:
    """The lists in the engine's form, with the tasks' own seconds; transfers take no time."""
    count = 1 + max((task.transfer for _, task in graph.tasks() if task.transfer is not None), default=-1)
    transfers = [Transfer(0, 0)] * count
    stages: list[list[Operation]] = []
    for stage, tasks in enumerate(graph.stages):
        arriving: dict[Buffer, int] = {}
        own: list[Operation] = []
        for task in tasks:
            if task.kind == "send" and task.transfer is not None and task.peer is not None:
                transfers[task.transfer] = Transfer(stage, task.peer)
                own.append(Send(task.transfer))
            elif task.kind == "receive" and task.transfer is not None:
                arriving[task.writes[0]] = task.transfer
                own.append(Receive(task.transfer))
            else:
                waits = tuple(arriving.pop(buffer) for buffer in task.reads if buffer in arriving)
                own.append(Compute(task.time_s if task.kind in (*COMPUTE_KINDS, "input") else 0.0, waits))
        stages.append(own)
    return stages, transfers
