"""Execution order of a program's kernels.

- `breadth-first`: XLA:CPU's default (BFScheduler in xla/hlo/transforms/simplifiers/hlo_memory_scheduler.cc, chosen by
  xla_cpu_enable_concurrency_optimized_scheduler). An instruction is queued after its last operand, views after kernels:
  XLA makes its bitcasts of reshapes after the kernels, and they are the last of a value's readers. The other readers
  are queued in the order of their creation by XLA's partitioner, post-order, unless a later pass recreated them.
- `breadth-first, as written`: those readers in text order. The order of two readers may decide a peak.
- `program`: the order of the text.
- `post-order, reductions early`: close to XLA:GPU's. Each node directly before its first reader, except reductions:
  they belong to a kernel that reads the same arrays, which need not wait on the sum's reader.
- `least-memory`: XLA:TPU's (`cost.peak.memory_scheduler`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from shardwright.cost.peak.device_program import DeviceProgram
from shardwright.cost.peak.fusion import Kernels
from shardwright.cost.peak.memory_scheduler import schedule_min_memory

#: Order names in hardware profiles.
SCHEDULES = ("breadth-first", "breadth-first, as written", "least-memory", "program", "post-order, reductions early")

#: Schedules with several possible orders, and these orders.
_EITHER = {"breadth-first": ("breadth-first, as written", "breadth-first")}

#: Opcodes available before the first kernel.
_GIVEN = frozenset({"constant", "parameter"})

#: Nodes run together.
ScheduleStep = tuple[int, ...]


def possible_orders(name: str) -> tuple[str, ...]:
    """All orders a program may run in under a compiler's schedule, given present knowledge."""
    return _EITHER.get(name, (name,))


def schedule(
    program: DeviceProgram, kernels: Kernels, name: str, together: Sequence[ScheduleStep] = ()
) -> list[ScheduleStep]:
    """Stored nodes in execution order.

    together: groups of nodes run together, after the last of them is ready; they must be independent.
    """
    stored = [node for node, is_kept in enumerate(kernels.is_stored) if is_kept]
    if name == "program":
        return _in_order(kernels, stored, together)
    if name == "post-order, reductions early":
        given = [node for node in stored if program.opcodes[node] in _GIVEN]
        post_order = [node for node in program.post_order() if kernels.is_stored[node]]
        reductions = [node for node in stored if program.opcodes[node] == "reduce"]
        return _in_order(kernels, [*given, *post_order], together, reductions)
    if name == "least-memory":
        return [(node,) for node in schedule_min_memory(program, kernels)]
    visited = stored if name == "breadth-first, as written" else program.post_order()
    return _breadth_first(kernels, stored, together, visited)


def _in_order(
    kernels: Kernels, visited: Sequence[int], together: Sequence[ScheduleStep], eager: Sequence[int] = ()
) -> list[ScheduleStep]:
    """Nodes in visiting order; a group runs at the first reader of any member.

    eager: nodes run at the earliest possible time.
    """
    step_of: dict[int, ScheduleStep] = {node: members for members in together for node in members}
    users: dict[int, list[int]] = {}
    waiting = {node: len(kernels.reads[node]) for node in eager}
    for node in eager:
        for source in kernels.reads[node]:
            users.setdefault(source, []).append(node)
    order: dict[ScheduleStep, None] = {}

    def run(step: ScheduleStep) -> None:
        order[step] = None
        for user in (user for node in step for user in users.get(node, ())):
            waiting[user] -= 1
            if not waiting[user]:
                run((user,))

    def missing(step: ScheduleStep) -> list[ScheduleStep]:
        needed = (step_of.get(source, (source,)) for node in step for source in kernels.reads[node])
        return [operand for operand in dict.fromkeys(needed) if operand not in order]

    todo: list[ScheduleStep] = [(node,) for node in reversed(visited) if node not in step_of]
    while todo:
        step = todo[-1]
        first = [] if step in order else missing(step)
        if first:
            todo += reversed(first)
            continue
        todo.pop()
        if step not in order:
            run(step)
    return list(order)


def _breadth_first(
    kernels: Kernels, nodes: Sequence[int], together: Sequence[ScheduleStep], visited: Sequence[int]
) -> list[ScheduleStep]:
    step_of: dict[int, ScheduleStep] = {node: members for members in together for node in members}
    users: dict[int, list[int]] = {node: [] for node in nodes}
    waiting = dict.fromkeys(nodes, 0)
    for node in visited:
        for source in kernels.reads[node] if node in waiting else ():
            users[source].append(node)
            waiting[node] += 1
    for readers in users.values():
        readers.sort(key=kernels.is_view.__getitem__)
    missing = {members: len(members) for members in together}
    queue: deque[ScheduleStep] = deque((node,) for node in nodes if not waiting[node])
    order: list[ScheduleStep] = []
    while queue:
        order.append(queue.popleft())
        for node in order[-1]:
            for user in users[node]:
                waiting[user] -= 1
                if waiting[user]:
                    continue
                step = step_of.get(user, (user,))
                missing[step] = missing.get(step, 1) - 1
                if not missing[step]:
                    queue.append(step)
    return order
