"""Costs of a plan's decisions: its collectives, one by one, and the seconds of compute and communication."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

from shardwright.cost import Move, reshard, wire_bytes
from shardwright.cost.compute import Traffic
from shardwright.cost.moves.device_groups import groups_along
from shardwright.cost.moves.relayout import LOOP, MoveEnds
from shardwright.placements import read_placement
from shardwright.planner.graph.dataflow import Leaf, Node, Use, computations_of
from shardwright.planner.plans.assemble import Decisions
from shardwright.planner.plans.causes import Causes
from shardwright.planner.plans.combiner import Combinable, combine
from shardwright.planner.segments.readiness import CombinedCollective
from shardwright.planner.strategies.expansion import Exchange, local_results, stages_of_sum
from shardwright.plans.plan import PlannedCollective
from shardwright.plans.shardings import TensorSharding

#: A reshard: value, whether inside its loop, layout before, layout after.
_Reshard = tuple[Leaf, bool, TensorSharding, TensorSharding]


@dataclass(slots=True, kw_only=True)
class _CollectiveLedger:
    """Collects collectives; a reshard common to several readers is done once: inside a loop, and once more after it.

    decisions: the plan's.
    collectives: the collectives so far.
    overlappable: index of a collective → its value, overlappable with compute, and the computation of the reader.
    combinable: index of a collective that the compiler may combine → its data for the combiner.
    transpose_times: (node, seconds a step of transposes for the reshards of its operands or results).
    loop_computations: loop-carried leaf → computations inside the loop.
    moved: reshards done.
    exact: those of them with a reader for which the compiler does not round the value.
    """

    decisions: Decisions
    collectives: list[PlannedCollective] = field(default_factory=list)
    overlappable: dict[int, tuple[Leaf, str]] = field(default_factory=dict)
    combinable: dict[int, Combinable] = field(default_factory=dict)
    transpose_times: list[tuple[Node, float]] = field(default_factory=list)
    loop_computations: dict[Leaf, frozenset[str]] = field(default_factory=dict)
    moved: set[_Reshard] = field(default_factory=set)
    exact: set[_Reshard] = field(default_factory=set)

    def __post_init__(self) -> None:
        graph = self.decisions.graph
        for loop, leaves in graph.flow.leaves.items():
            if loop.opcode == "while":
                self.loop_computations.update(dict.fromkeys(leaves, computations_of(loop)))
        rounded = graph.variables.rounded
        if not rounded.uses:
            return
        for node in graph.flow.nodes:
            for use in node.uses:
                if use.source in rounded.hubs and (node.index, use.position) not in rounded.uses:
                    self.exact.update(done for done, *_ in self._reshards(node, use))

    def add_use(self, node: Node, use: Use, causes: Causes | None) -> None:
        """Adds the reshards of an operand to the layout a node uses, without those done for earlier readers."""
        rounded = self.decisions.graph.variables.rounded.uses
        for done, before, after, moves in self._reshards(node, use):
            if done in self.moved:
                continue
            self.moved.add(done)
            cause = causes.move(node, use) if causes else ""
            is_rounded = (node.index, use.position) in rounded and done not in self.exact
            self._add_transpose(node, use.source, before, after, use.weight, self._ends(node, use, after))
            self._add(node, cause, use.source, moves, use.weight, use.runs, is_read=True, is_rounded=is_rounded)

    def _reshards(
        self, node: Node, use: Use
    ) -> Iterator[tuple[_Reshard, TensorSharding, TensorSharding, tuple[Move, ...]]]:
        """The reshards of an operand to the layout a node uses: its key, layouts before and after, and its moves."""
        target = self._used(node, use)
        sharding = self.decisions.result(use.source)
        if sharding is target:
            return
        is_inside = node.computation in self.loop_computations.get(use.source, ())
        source = self.decisions.source(node, use, target)
        for before, after in ((sharding, source), (source, target)):
            moves = self._moves(use.source, before, after) if before != after else ()
            if moves:
                key = (use.source, is_inside, before, self._sharding_after(use.source, before, after, moves))
                yield key, before, after, moves

    def _used(self, node: Node, use: Use) -> TensorSharding:
        """The layout in which a node uses an operand.

        Forwarded values take the layout of their carrier: a sum carried by a loop, read whole by its body, is reduced
        at every source: before the loop and in each pass.
        """
        if node.is_value:
            return self.decisions.result((node.index, 0))
        return self.decisions.strategies[node.index].operands[use.position]

    def add_reduction(self, node: Node, leaf: int, stages: Sequence[TensorSharding], cause: str) -> None:
        """Adds the reduction of a result through the layouts of `stages`, in order."""
        whole = (node.index, leaf)
        *sums, last = ([*self._moves(whole, before, after)] for before, after in pairwise(stages))
        made = self.decisions.strategies[node.index].results[leaf]
        may_stay_partial = stages[0] == made  # else its strategy counted the reduction
        is_rounded = may_stay_partial and whole in self.decisions.graph.variables.rounded.leaves
        once = [move for moves in sums for move in moves]
        self._add(node, cause, whole, once, node.weight, node.runs, is_rounded=is_rounded)
        self._add(node, cause, whole, last, node.weight, node.runs, is_read=True, is_rounded=is_rounded)
        ends = self.decisions.graph.variables.ends_of(whole, LOOP)
        self._add_transpose(node, whole, stages[-2], stages[-1], node.weight, ends)

    def _ends(self, node: Node, use: Use, after: TensorSharding) -> MoveEnds:
        """The producer of an operand, and the reader of its layout after a move: the node, or the shared layout."""
        layout = self.decisions.graph.variables
        ends = layout.ends(node, use)
        if layout.source(node, use) == use.source:
            return layout.layout_ends[use.source] if after == self.decisions.shared_layouts.get(use.source) else ends
        is_reduced = self.decisions.strategies[use.source[0]].results[use.source[1]].unreduced
        return MoveEnds(LOOP, ends.reader) if is_reduced else ends

    def _add_transpose(
        self, node: Node, leaf: Leaf, before: TensorSharding, after: TensorSharding, weight: float, ends: MoveEnds
    ) -> None:
        shape = self.decisions.graph.flow.nodes[leaf[0]].shapes[leaf[1]]
        seconds = self.decisions.graph.prices.transpose_s(shape, before, after, ends)
        if seconds:
            self.transpose_times.append((node, weight * seconds))

    def _moves(self, leaf: Leaf, source: TensorSharding, target: TensorSharding) -> tuple[Move, ...]:
        graph = self.decisions.graph
        node = graph.flow.nodes[leaf[0]]
        shape = node.shapes[leaf[1]]
        equal_dims: frozenset[int] = frozenset()
        if node.instruction.opcode == "broadcast" and not node.is_value:
            spread = node.instruction.get("dimensions", ())
            if not (spread or source.unreduced or target.unreduced):
                return ()  # full of one number: rematerialized in any other layout (`xla.emit`)
            equal_dims = frozenset(range(shape.rank)) - set(spread)
        return reshard(shape.element_type, shape.dimensions, source, target, graph.prices.mesh, equal_dims)

    def _sharding_after(
        self, leaf: Leaf, before: TensorSharding, after: TensorSharding, moves: tuple[Move, ...]
    ) -> TensorSharding:
        """The layout after `moves`; it may serve more readers than those of `after`.

        If XLA gathers the value whole, it serves all readers with the same gather, also those that keep it on one
        device as a partial sum.
        """
        if before.unreduced:
            return after
        whole = TensorSharding.replicated(len(before.dims))
        return whole if moves == self._moves(leaf, before, whole) else TensorSharding(after.dims)

    def _add(
        self,
        node: Node,
        cause: str,
        leaf: Leaf,
        moves: Sequence[Move],
        weight: float,
        runs: int,
        *,
        is_read: bool = False,
        is_rounded: bool,
    ) -> None:
        """Adds moves of a node's result or operand, in order.

        is_read: for a reader; values fused into the reader are written first. is_rounded: for readers that read the
        value rounded to bfloat16; a reduce-scatter is not.
        """
        graph = self.decisions.graph
        launch_s = graph.prices.profile.launch_s if is_read and graph.variables.kernels.is_fused[leaf[0]] else 0.0
        for place, whole_move in enumerate(moves):
            is_sent_rounded = is_rounded and whole_move.kind != "reduce-scatter"
            move = whole_move.in_half() if is_sent_rounded else whole_move
            once_s = move.time_s(graph.prices.mesh, graph.prices.topology) + (0.0 if place else launch_s)
            count = max(1, runs)
            if leaf in graph.overlappable:
                self.overlappable[len(self.collectives)] = leaf, node.computation
            if graph.prices.topology.max_combined_bytes(move.kind, move.group_size):
                self.combinable[len(self.collectives)] = Combinable(leaf=leaf, move=move, weight=weight)
            self.collectives.append(
                PlannedCollective(
                    kind=move.kind,
                    axes=move.axes,
                    instruction=node.instruction.name,
                    cause=cause,
                    payload_bytes=move.payload_bytes,
                    wire_bytes=move.wire_bytes,
                    count=count,
                    time_s=once_s * weight,
                    groups=self._groups(move),
                    sent_as="bf16" if is_sent_rounded else "",
                )
            )

    def combine(self) -> None:
        """Lets collectives that the compiler combines share one latency."""
        graph = self.decisions.graph
        mesh, topology = graph.prices.mesh, graph.prices.topology
        numbers = combine(tuple(self.combinable.values()), graph.flow, topology)
        members = Counter(numbers)
        names: dict[int, int] = {}
        for (place, combinable), number in zip(self.combinable.items(), numbers, strict=True):
            if members[number] == 1:
                continue
            alone, move = self.collectives[place], combinable.move
            saved_s = combinable.weight * (
                move.time_s(mesh, topology) - move.time_s(mesh, topology, 1 / members[number])
            )
            combined = names.setdefault(number, len(names) + 1)
            self.collectives[place] = replace(alone, time_s=alone.time_s - saved_s, combined=combined)

    def _groups(self, move: Move) -> tuple[tuple[int, ...], ...]:
        """The devices of each group, unless groups span the axes."""
        mesh = self.decisions.graph.prices.mesh
        return groups_along(move.atoms, mesh) if move.group_size < mesh.size(move.axes) else ()

    def add_exchange(self, node: Node, exchange: Exchange, cause: str) -> None:
        prices = self.decisions.graph.prices
        self.collectives.append(
            PlannedCollective(
                kind=exchange.kind,
                axes=exchange.axes,
                instruction=node.instruction.name,
                cause=cause,
                payload_bytes=exchange.payload_bytes,
                wire_bytes=wire_bytes(exchange.kind, exchange.payload_bytes, prices.mesh.size(exchange.axes)),
                count=max(1, node.runs),
                time_s=node.weight * prices.collective_s(exchange.kind, exchange.axes, exchange.payload_bytes),
            )
        )


def list_collectives(decisions: Decisions, causes: Causes | None = None) -> tuple[PlannedCollective, ...]:
    """Reductions of partial results and reshards of operands, in program order; `causes` None: without causes."""
    return tuple(_ledger(decisions, causes).collectives)


class Communication(NamedTuple):
    """Seconds of communication, a step.

    exposed_s: the step waits for it.
    hidden_s: overlapped with compute.
    promised_s: beyond all compute available for overlap, in any order.
    """

    exposed_s: float
    hidden_s: float
    promised_s: float


def communication(decisions: Decisions) -> Communication:
    """Seconds of all collectives, and of the arrival of the client's arguments."""
    ledger, overlap = _ledger(decisions, None), decisions.graph.prices.topology.overlap
    whole_s = sum(collective.time_s for collective in ledger.collectives) + arrival_time_s(decisions)
    beside, readiness = _overlappable_moves(ledger, overlap), decisions.graph.readiness
    if readiness is None or not beside:
        return Communication(whole_s, 0.0, 0.0)
    times = [*_computing_s(decisions)]
    hidden_s = readiness.overlap_s(beside, times)
    behind_s = sum(seconds for node, seconds in times if node.index in readiness.hiding_nodes)
    return Communication(whole_s - hidden_s, hidden_s, max(0.0, sum(moved.seconds for moved in beside) - behind_s))


def _overlappable_moves(ledger: _CollectiveLedger, overlap: float) -> list[CombinedCollective]:
    """Overlappable seconds of the collectives that move gradients, combined ones as one."""
    members: defaultdict[int, list[tuple[Leaf, str]]] = defaultdict(list)
    seconds: defaultdict[int, float] = defaultdict(float)
    for place, moved in ledger.overlappable.items():
        number = ledger.collectives[place].combined or -place
        members[number].append(moved)
        seconds[number] += overlap * ledger.collectives[place].time_s
    return [CombinedCollective(tuple(leaves), seconds[number]) for number, leaves in members.items()]


def _ledger(decisions: Decisions, causes: Causes | None) -> _CollectiveLedger:
    ledger = _CollectiveLedger(decisions=decisions)
    flow, is_free = decisions.graph.flow, decisions.graph.is_cheap_to_recompute
    for node in flow.nodes:
        if node.weight == 0 and not node.is_value:
            continue
        strategy = decisions.strategies[node.index]
        for use in node.uses:
            if not is_free[use.source[0]]:  # rematerialized per reader
                ledger.add_use(node, use, causes)
        for exchange in strategy.exchanges:
            ledger.add_exchange(node, exchange, causes.exchange(node, exchange.kind) if causes else "")
        if node.is_value:
            continue
        for i, stages in enumerate(zip(*stages_of_sum(strategy), decisions.shardings[node.index], strict=True)):
            if stages[0] != stages[-1]:
                ledger.add_reduction(node, i, stages, causes.reduction(node) if causes else "")
    ledger.combine()
    return ledger


class OwnTimes(NamedTuple):
    """Seconds, a step, of all that one device does by itself: its compute, and moves between its memory and its
    host's."""

    compute_s: float
    transfers_s: float


def total_own_times_s(decisions: Decisions) -> OwnTimes:
    """Seconds of all instructions on one device, a step."""
    compute_s, transfers_s = 0.0, 0.0
    for node, seconds in node_times_s(decisions):
        if read_placement(node.instruction) is None:
            compute_s += seconds
        else:
            transfers_s += seconds
    return OwnTimes(compute_s, transfers_s)


def node_times_s(decisions: Decisions) -> Iterator[tuple[Node, float]]:
    """Seconds of each instruction on one device, a step: compute, and transposes for its reshards."""
    if decisions.graph.prices.has_transposes:
        yield from _ledger(decisions, None).transpose_times
    yield from _computing_s(decisions)


def _computing_s(decisions: Decisions) -> Iterator[tuple[Node, float]]:
    """Compute seconds of each instruction on one device, a step."""
    prices = decisions.graph.prices
    once: dict[tuple[int, int, bool, Traffic | None], float] = {}  # equal instructions share their strategies
    layout = decisions.graph.variables
    for node in decisions.graph.flow.nodes:
        if not node.is_value and node.weight:
            strategy = decisions.strategies[node.index]
            ends = layout.ends_kernel(node.index)
            traffic = layout.kernels.traffic[node.index]
            key = (layout.signatures[node.index], id(strategy), ends, traffic)
            if key not in once:
                local = local_results(strategy)
                once[key] = prices.compute_s(
                    node.instruction, strategy.operands, local, ends_kernel=ends, traffic=traffic
                )
            yield node, node.weight * layout.kernels.parts[node.index] * once[key]


def arrival_time_s(decisions: Decisions) -> float:
    """Seconds, a step, until every device has its part of the client's arguments."""
    graph = decisions.graph
    return sum(
        graph.prices.arrival_s(graph.flow.nodes[node].shapes[0], decisions.result((node, 0)))
        for node in sorted(graph.fed_arguments)
    )
