"""In which order the kernels of a program run.

`breadth-first` is XLA:CPU's default (BFScheduler in xla/hlo/transforms/simplifiers/hlo_memory_scheduler.cc,
chosen by xla_cpu_enable_concurrency_optimized_scheduler): an instruction is queued as soon as its last
operand has run. `program` keeps the order of the text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from shardwright.cost.fusion import Kernels, Program

#: Orders by name, as hardware profiles name them.
SCHEDULES = ("breadth-first", "program")


def schedule(program: Program, kernels: Kernels, name: str, together: Sequence[Sequence[int]] = ()) -> list[int]:
    """Kept nodes in the order they run.

    together: groups of nodes that run as one, once the last of them can.
    """
    kept = [node for node, is_kept in enumerate(kernels.is_kept) if is_kept]
    return kept if name == "program" else _breadth_first(program, kernels, kept, together)


def _breadth_first(
    program: Program, kernels: Kernels, kept: Sequence[int], together: Sequence[Sequence[int]]
) -> list[int]:
    group = {node: members for members in together for node in members}
    users: dict[int, list[int]] = {node: [] for node in kept}
    waiting = dict.fromkeys(kept, 0)
    for node in kept:
        for source in kernels.reads[node]:
            users[source].append(node)
            waiting[node] += 1
    still = {members[0]: len(members) for members in together}
    queue = deque(node for node in kept if not waiting[node])
    order: list[int] = []
    while queue:
        node = queue.popleft()
        order.append(node)
        for user in users[node]:
            waiting[user] -= 1
            if waiting[user]:
                continue
            members = group.get(user)
            if members is None:
                queue.append(user)
                continue
            still[members[0]] -= 1
            if not still[members[0]]:
                queue.extend(members)
    if len(order) < len(kept):  # groups that wait for one another: they cannot run as one
        return _breadth_first(program, kernels, kept, ())
    return order
