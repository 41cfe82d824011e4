"""Order of XLA:TPU: the memory minimum of several orders, then products delayed behind collectives they can hide.

After XLA's DefaultMemoryScheduler (xla/hlo/transforms/simplifiers/hlo_memory_scheduler.cc), the best of a list schedule
and post-orders, and its LatencyHidingScheduler (xla/service/latency_hiding_scheduler.cc): within the memory available,
kernels needed only by variable updates run during later collectives. The inputs of a weight's gradient are live longer
than in the list schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush

from shardwright.cost.opcodes import PRODUCTS
from shardwright.cost.peak.device_program import DeviceProgram
from shardwright.cost.peak.fusion import Kernels
from shardwright.cost.tuning import COLLECTIVES_AHEAD

#: Opcodes in the caller's memory, or the program's own.
_CALLERS = frozenset({"parameter", "constant"})

#: Collectives overlapped with products.
_ASYNC_COLLECTIVES = frozenset({"all-gather", "all-to-all", "collective-permute"})


def schedule_min_memory(program: DeviceProgram, kernels: Kernels) -> list[int]:
    """Stored nodes in execution order."""
    graph = _Graph(program, kernels)
    orders = (_ListSchedule(graph).run(), _post_order(graph))
    return _delay_products(graph, min(orders, key=graph.max_live_bytes))


class _Graph:
    """Dependencies between a program's stored nodes.

    reads: per node, the stored nodes that it reads.
    stored: per node, the nodes whose buffers it shows.
    users: inverse of `reads`.
    size_bytes: stored by a node's kernel; 0 on views.
    results: nodes whose buffers the program returns.
    """

    def __init__(self, program: DeviceProgram, kernels: Kernels) -> None:
        self.program = program
        self.nodes = [node for node, is_kept in enumerate(kernels.is_stored) if is_kept]
        self.reads = {node: tuple(kernels.reads[node]) for node in self.nodes}
        shown: dict[int, tuple[int, ...]] = {}
        for node in self.nodes:
            shown_sources = (kept_node for operand in program.operands[node] for kept_node in shown.get(operand, ()))
            shown[node] = tuple(dict.fromkeys(shown_sources)) if kernels.is_view[node] else (node,)
        self.stored = {
            node: tuple(dict.fromkeys(kept_node for source in self.reads[node] for kept_node in shown[source]))
            for node in self.nodes
        }
        self.users: dict[int, list[int]] = {node: [] for node in self.nodes}
        for node, sources in self.reads.items():
            for source in sources:
                self.users[source].append(node)
        self.size_bytes = {
            node: 0 if kernels.is_view[node] or program.opcodes[node] in _CALLERS else sum(program.sizes_bytes[node])
            for node in self.nodes
        }
        self.results = frozenset(shown[program.root])

    def max_live_bytes(self, order: Sequence[int]) -> int:
        """Maximum of live bytes over the order."""
        last = {buffer: node for node in order for buffer in (node, *self.stored[node])}
        freed: dict[int, int] = {}
        for node, reader in last.items():
            if node not in self.results:
                freed[reader] = freed.get(reader, 0) + self.size_bytes[node]
        live = most = 0
        for node in order:
            live += self.size_bytes[node]
            most = max(most, live)
            live -= freed.get(node, 0)
        return most


class _ListSchedule:
    """Greedy list schedule: the ready node with the smallest allocation minus freed bytes; ties in text order.

    Left out: memory of loop bodies.
    """

    def __init__(self, graph: _Graph) -> None:
        self.graph = graph
        self.waiting = {node: len(sources) for node, sources in graph.reads.items()}
        self.readers: dict[int, set[int]] = {node: set() for node in graph.nodes}  # still to run
        for node, stored in graph.stored.items():
            for buffer in stored:
                self.readers[buffer].add(node)
        self.ready: list[tuple[int, int]] = []
        self.latest: dict[int, tuple[int, int]] = {}

    def run(self) -> list[int]:
        for node, count in self.waiting.items():
            if not count:
                self._queue(node)
        order: list[int] = []
        while self.ready:
            entry = heappop(self.ready)
            node = entry[1]
            if self.latest.get(node) == entry:  # else it has run, or was requeued
                del self.latest[node]
                order.append(node)
                self._record_run(node)
        return order

    def _queue(self, node: int) -> None:
        graph = self.graph
        freed = sum(
            graph.size_bytes[buffer]
            for buffer in graph.stored[node]
            if len(self.readers[buffer]) == 1 and buffer not in graph.results
        )
        self.latest[node] = (graph.size_bytes[node] - freed, node)
        heappush(self.ready, self.latest[node])

    def _record_run(self, node: int) -> None:
        for buffer in self.graph.stored[node]:
            readers = self.readers[buffer]
            readers.remove(node)
            if len(readers) == 1:  # the last one frees it
                self._queue_again(*readers)
        for user in self.graph.users[node]:
            self.waiting[user] -= 1
            if not self.waiting[user]:
                self._queue(user)

    def _queue_again(self, node: int) -> None:
        if node in self.latest:
            self._queue(node)


def _post_order(graph: _Graph) -> list[int]:
    """Each node directly before its first reader, from the first result on."""
    order: dict[int, None] = {}
    todo = [*reversed(graph.nodes), graph.program.root]
    while todo:
        node = todo[-1]
        missing = [source for source in graph.reads[node] if source not in order]
        if missing and node not in order:
            todo += reversed(missing)
        else:
            todo.pop()
            order[node] = None
    return list(order)


def _delay_products(graph: _Graph, order: Sequence[int]) -> list[int]:
    """The order with products needed only by updates, and their dependents, delayed behind more collectives."""
    movable, hidden = _movable(graph)
    if not hidden or not movable:
        return list(order)
    held: dict[int, int] = {}  # node → number of collectives started before it runs
    moved: list[int] = []
    started = 0
    for node in order:
        until = max((held[source] for source in graph.reads[node] if source in held), default=0)
        if node in movable:
            until = max(until, started + COLLECTIVES_AHEAD)
        if until > started and started < len(hidden):
            held[node] = until
            continue
        moved.append(node)
        if node in hidden:
            started += 1
            moved += _pop_released(held, started if started < len(hidden) else None)
    return moved + _pop_released(held, None)


def _pop_released(ends: dict[int, int], position: int | None) -> list[int]:
    """Remove the nodes held until `position` (all if None), in holding order."""
    released = [node for node, until in ends.items() if position is None or until <= position]
    for node in released:
        del ends[node]
    return released


def _movable(graph: _Graph) -> tuple[set[int], set[int]]:
    """Kernels of products with no dependent products, and the collectives with one."""
    multiplies = set(_with_products(graph))
    awaited: set[int] = set()
    for node in reversed(graph.nodes):
        if any(user in multiplies or user in awaited for user in graph.users[node]):
            awaited.add(node)
    hidden = {node for node in awaited if graph.program.opcodes[node] in _ASYNC_COLLECTIVES}
    return multiplies - awaited, hidden


def _with_products(graph: _Graph) -> Iterator[int]:
    """The stored nodes whose kernels compute a product: their own, or a fused one."""
    program, kept_nodes = graph.program, set(graph.nodes)
    users = program.users()
    computes = [opcode in PRODUCTS for opcode in program.opcodes]
    for node, is_product in enumerate(computes):
        if is_product and node in kept_nodes:
            yield node
        elif is_product:
            for user in users[node]:
                computes[user] = True
