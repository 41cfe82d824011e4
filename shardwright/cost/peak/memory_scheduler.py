"""The order of XLA:TPU: of two orders that with less memory, then products moved behind collectives they can hide.

After XLA's DefaultMemoryScheduler (xla/hlo/transforms/simplifiers/hlo_memory_scheduler.cc), which takes the best of a
list schedule and of post-orders, and its LatencyHidingScheduler (xla/service/latency_hiding_scheduler.cc): as long as
there is room, what only the updates of variables wait for runs while later collectives do. So what a weight's gradient
is made of is live for longer than the list schedule has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush

from shardwright.cost.opcodes import PRODUCTS
from shardwright.cost.peak.device_program import DeviceProgram
from shardwright.cost.peak.fusion import Kernels

#: Their memory is the caller's, or the program's own.
_CALLERS = frozenset({"parameter", "constant"})

#: Collectives that run beside products.
_ASYNC_COLLECTIVES = frozenset({"all-gather", "all-to-all", "collective-permute"})

#: So many of them begin before a product that can wait is run; fitted with benchmarks/check_memory.py.
_COLLECTIVES_AHEAD = 2


def schedule_min_memory(program: DeviceProgram, kernels: Kernels) -> list[int]:
    """Kept nodes in the order they run."""
    graph = _Graph(program, kernels)
    orders = (_ListSchedule(graph).run(), _post_order(graph))
    return _delay_products(graph, min(orders, key=graph.max_live_bytes))


class _Graph:
    """What reads what, of a program's kept nodes.

    reads: per node, the kept nodes that it reads. stored: the nodes whose buffers those show. users: of `reads`.
    size_bytes: of what a node's kernel stores; nothing for views. results: nodes whose buffers the program hands on.
    """

    def __init__(self, program: DeviceProgram, kernels: Kernels) -> None:
        self.program = program
        self.nodes = [node for node, is_kept in enumerate(kernels.is_stored) if is_kept]
        self.reads = {node: tuple(kernels.reads[node]) for node in self.nodes}
        shown: dict[int, tuple[int, ...]] = {}
        for node in self.nodes:
            read = (each for operand in program.operands[node] for each in shown.get(operand, ()))
            shown[node] = tuple(dict.fromkeys(read)) if kernels.is_view[node] else (node,)
        self.stored = {
            node: tuple(dict.fromkeys(each for source in self.reads[node] for each in shown[source]))
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
        """Bytes that are live at once, at most."""
        last = {each: node for node in order for each in (node, *self.stored[node])}
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
    """Of what can run, what takes least memory beyond what it frees; of equal ones the first of the text.

    Left out: what the bodies of loops take.
    """

    def __init__(self, graph: _Graph) -> None:
        self.graph = graph
        self.waiting = {node: len(sources) for node, sources in graph.reads.items()}
        self.readers: dict[int, set[int]] = {node: set() for node in graph.nodes}  # those that have not run
        for node, stored in graph.stored.items():
            for each in stored:
                self.readers[each].add(node)
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
            if self.latest.get(node) == entry:  # else it has run, or was queued again
                del self.latest[node]
                order.append(node)
                self._record_run(node)
        return order

    def _queue(self, node: int) -> None:
        graph = self.graph
        freed = sum(
            graph.size_bytes[each]
            for each in graph.stored[node]
            if len(self.readers[each]) == 1 and each not in graph.results
        )
        self.latest[node] = (graph.size_bytes[node] - freed, node)
        heappush(self.ready, self.latest[node])

    def _record_run(self, node: int) -> None:
        for each in self.graph.stored[node]:
            readers = self.readers[each]
            readers.remove(node)
            if len(readers) == 1:  # which frees it
                self._queue_again(*readers)
        for user in self.graph.users[node]:
            self.waiting[user] -= 1
            if not self.waiting[user]:
                self._queue(user)

    def _queue_again(self, node: int) -> None:
        if node in self.latest:
            self._queue(node)


def _post_order(graph: _Graph) -> list[int]:
    """Everything right before the first that needs it, from the first result on."""
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
    """The same order with products that only updates wait for, and what needs those, behind more collectives."""
    movable, hidden = _movable(graph)
    if not hidden or not movable:
        return list(order)
    held: dict[int, int] = {}  # by node, how many collectives have begun when it is run
    moved: list[int] = []
    begun = 0
    for node in order:
        until = max((held[source] for source in graph.reads[node] if source in held), default=0)
        if node in movable:
            until = max(until, begun + _COLLECTIVES_AHEAD)
        if until > begun and begun < len(hidden):
            held[node] = until
            continue
        moved.append(node)
        if node in hidden:
            begun += 1
            moved += _pop_released(held, begun if begun < len(hidden) else None)
    return moved + _pop_released(held, None)


def _pop_released(held: dict[int, int], begun: int | None) -> list[int]:
    """Take what is held until then, all where none is given, in the order that it was held in."""
    found = [node for node, until in held.items() if begun is None or until <= begun]
    for node in found:
        del held[node]
    return found


def _movable(graph: _Graph) -> tuple[set[int], set[int]]:
    """Kernels of products that no other product waits for, and the collectives that one waits for."""
    multiplies = set(_with_products(graph))
    awaited: set[int] = set()
    for node in reversed(graph.nodes):
        if any(user in multiplies or user in awaited for user in graph.users[node]):
            awaited.add(node)
    hidden = {node for node in awaited if graph.program.opcodes[node] in _ASYNC_COLLECTIVES}
    return multiplies - awaited, hidden


def _with_products(graph: _Graph) -> Iterator[int]:
    """The kept nodes whose kernels compute a product: their own, or one that they took in."""
    program, kept = graph.program, set(graph.nodes)
    users = program.users()
    computes = [opcode in PRODUCTS for opcode in program.opcodes]
    for node, is_product in enumerate(computes):
        if is_product and node in kept:
            yield node
        elif is_product:
            for user in users[node]:
                computes[user] = True
