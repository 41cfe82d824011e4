"""In which order the kernels of a program run.

`breadth-first` is XLA:CPU's default (BFScheduler in xla/hlo/transforms/simplifiers/hlo_memory_scheduler.cc,
chosen by xla_cpu_enable_concurrency_optimized_scheduler): an instruction is queued as soon as its last
operand has run, views after kernels: XLA makes its bitcasts of reshapes once the kernels are there, so that they
are the last of a value's readers. A value's other readers are queued in the order in which XLA's partitioner made them,
post-order, unless a later pass made them anew: `breadth-first, as written` has them in the order of the text. Which of
two readers comes first may decide a peak. `program` keeps the order of the text. `post-order, reductions early` is
close to XLA:GPU's: everything right before the first that needs it, but for reductions, which are part of a kernel that
reads the same arrays, so that those need not wait for whoever reads the sum. `least-memory` is XLA:TPU's
(`cost.peak.least_memory`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from shardwright.cost.peak.device_program import DeviceProgram
from shardwright.cost.peak.fusion import Kernels
from shardwright.cost.peak.memory_scheduler import schedule_min_memory

#: Orders by name, as hardware profiles name them.
SCHEDULES = ("breadth-first", "breadth-first, as written", "least-memory", "program", "post-order, reductions early")

#: The orders that a program may run in by a compiler's schedule, where that leaves more than one.
_EITHER = {"breadth-first": ("breadth-first, as written", "breadth-first")}

#: What is there before anything runs.
_GIVEN = frozenset({"constant", "parameter"})

#: Nodes that run as one.
ScheduleStep = tuple[int, ...]


def possible_orders(name: str) -> tuple[str, ...]:
    """The orders that a program may run in, for all that is known of a compiler with this schedule."""
    return _EITHER.get(name, (name,))


def schedule(
    program: DeviceProgram, kernels: Kernels, name: str, together: Sequence[ScheduleStep] = ()
) -> list[ScheduleStep]:
    """Kept nodes in the order they run.

    together: groups of nodes that run as one, once the last of them can; none may wait for another.
    """
    kept = [node for node, is_kept in enumerate(kernels.is_stored) if is_kept]
    if name == "program":
        return _in_order(kernels, kept, together)
    if name == "post-order, reductions early":
        given = [node for node in kept if program.opcodes[node] in _GIVEN]
        post_order = [node for node in program.post_order() if kernels.is_stored[node]]
        reductions = [node for node in kept if program.opcodes[node] == "reduce"]
        return _in_order(kernels, [*given, *post_order], together, reductions)
    if name == "least-memory":
        return [(node,) for node in schedule_min_memory(program, kernels)]
    visited = kept if name == "breadth-first, as written" else program.post_order()
    return _breadth_first(kernels, kept, together, visited)


def _in_order(
    kernels: Kernels, visited: Sequence[int], together: Sequence[ScheduleStep], eager: Sequence[int] = ()
) -> list[ScheduleStep]:
    """Nodes as they are visited, in which what runs as one runs where the first reader of any of it does.

    eager: nodes that run as soon as they can.
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
        return [each for each in dict.fromkeys(needed) if each not in order]

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
    kernels: Kernels, kept: Sequence[int], together: Sequence[ScheduleStep], visited: Sequence[int]
) -> list[ScheduleStep]:
    step_of: dict[int, ScheduleStep] = {node: members for members in together for node in members}
    users: dict[int, list[int]] = {node: [] for node in kept}
    waiting = dict.fromkeys(kept, 0)
    for node in visited:
        for source in kernels.reads[node] if node in waiting else ():
            users[source].append(node)
            waiting[node] += 1
    for readers in users.values():
        readers.sort(key=kernels.is_view.__getitem__)
    missing = {members: len(members) for members in together}
    queue: deque[ScheduleStep] = deque((node,) for node in kept if not waiting[node])
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
