"""What of the graph of decisions does not depend on the mesh: its variables, and which of them are hubs.

A variable is a node that chooses its strategy, or a *hub*: how a value lies for its readers. A value with several
readers that would have it moved has one, so that a move which several share (a gradient reduced once,
weights gathered for forward and backward) is paid once; so has every value that crosses from one segment to another.
What a loop carries and others read behind it has a hub for those alone: a gradient that a loop adds up stays a
partial sum inside, and is reduced once for all who read it.

What is made from constants, iota and scalars alone is left out: any device can make any part of it, so it takes
the sharding its readers want (`ProgramVariables.is_free`).
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass

from shardwright.cost.moves.relayout import LOOP, STORED, MoveEnds, maker_of, reader_of
from shardwright.hlo import Instruction
from shardwright.planner.costs.kernels import Kernels
from shardwright.planner.graph.dataflow import BARRIERS, Dataflow, Leaf, Node, Use, computations_of
from shardwright.planner.rules.linear import is_zero, why_not_partial
from shardwright.planner.segments.dominator_cut import Segments
from shardwright.planner.segments.forward_pass import CHOICE_OPCODES
from shardwright.planner.strategies.expansion import ways_through
from shardwright.planner.strategies.rule_cache import RuleCache

#: Instructions that cost next to nothing to make anew in any sharding, when all they read is free too.
_CHEAP_OPCODES = frozenset({
    "constant", "iota", "broadcast", "convert", "compare", "select", "add", "subtract", "multiply", "divide", "negate",
    "and", "or", "not", "xor", "maximum", "minimum", "reshape", "transpose", "sign", "abs", "clamp", "rsqrt", "sqrt",
    "exponential", "power", "copy", "floor", "shift-left", "shift-right-logical",
})  # fmt: skip

#: Instructions that fill memory with little.
FILL_OPCODES = frozenset({"broadcast", "iota"})

_VIEW_OPCODES = frozenset({"convert", "copy", "transpose", "reshape", "bitcast"})

#: A variable: (node, -1) its strategy, (node, leaf) the hub of one of its array leaves.
Variable = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramVariables:
    """What of the graph does not depend on the mesh.

    signatures: per node, a number that is equal for instructions with equal strategies (`RuleCache.number`); -1 for
    what only hands on.
    is_free: nodes made anew for each reader. can_be_partial: per node, whether its value may be a partial sum.
    ways: per node, which operands may be partial together.
    hubs: values with a hub, and the largest weight of a use of it. crossing: variables that other segments depend on,
    and which: hubs that they read, and makers of what they take as it is made.
    hub_ends: of a hub, what makes its value, and what the pickiest of its readers does. gradients: sums that no product
    waits for.
    apart: hubs of what a loop carries, for readers behind it: the loop. direct: readers inside it, and what they read.
    handed_on: values that all their readers take as they are made, partial sums too. only_use: of values without a hub
    that one node reads, which, and at which of its operand leaves.
    whole: hubs that lie reduced, because what is made anew for each reader reads them.
    last_read: of values made anew, the last node that chooses freely and reads one, and at which of its operand leaves.
    kernels: what fusion makes of the nodes; what is made anew is part of its readers' kernels, besides.
    keys: nodes unlike others of their kind (pinned, confined, sent with every step), equal keys where they are alike.
    """

    flow: Dataflow
    segments: Segments
    signatures: tuple[int, ...]
    is_cheap_to_recompute: tuple[bool, ...]
    can_be_partial: tuple[bool, ...]
    partial_operand_sets: tuple[tuple[frozenset[int], ...], ...]
    shared_layouts: Mapping[Leaf, float]
    layout_ends: Mapping[Leaf, MoveEnds]
    gradients: frozenset[Leaf]
    cross_segment: Mapping[Variable, tuple[int, ...]]
    after_loops: Mapping[Leaf, Instruction]
    in_loop_readers: frozenset[tuple[int, Leaf]]
    forwarded_values: frozenset[Leaf]
    single_use: Mapping[Leaf, tuple[int, int]]
    always_reduced: frozenset[Leaf]
    last_consumer: Mapping[Leaf, tuple[int, int]]
    kernels: Kernels
    keys: Mapping[int, Hashable]

    def describe(self, variable: Variable) -> Hashable:
        """What decides the states and costs of a variable on any mesh, besides what it is connected to."""
        index, leaf = variable
        node = self.flow.nodes[index]
        crosses = variable in self.cross_segment
        if leaf >= 0:
            may_be_partial = self.can_be_partial[index] and variable not in self.always_reduced
            is_apart, is_fused = variable in self.after_loops, self.kernels.is_fused[index]
            ends = self.layout_ends[variable]
            return (node.shapes[leaf], may_be_partial, self.shared_layouts[variable], crosses, is_apart, is_fused, ends)
        uses = [  # of values made anew: whether they are zero
            (use.position, self.can_be_partial[use.source[0]])
            for use in node.uses
            if self.is_cheap_to_recompute[use.source[0]]
        ]
        direct = (
            [use.position for use in node.uses if (index, use.source) in self.in_loop_readers]
            if self.in_loop_readers
            else ()
        )
        what = node.shapes if node.is_value else self.signatures[index]
        return (
            what,
            node.is_value,
            node.weight,
            crosses,
            self.can_be_partial[index],
            self.ends_kernel(index),
            self.kernels.is_fused[index],
            self.kernels.parts[index],
            self.kernels.traffic[index],
            self.partial_operand_sets[index],
            tuple(uses),
            tuple(direct),
            self.keys.get(index),
        )

    def pays_for(self, node: Node, use: Use) -> bool:
        """Whether a node decides what something takes that it reads: that is made anew, and nothing reads it later.
        What is made anew for others too is no smaller, or stored besides."""
        return self.last_consumer.get(use.source) == (node.index, use.position)

    def ends_kernel(self, index: int) -> bool:
        """Whether a node takes a launch of its own."""
        return self.kernels.ends[index] and not self.is_cheap_to_recompute[index]

    def ends(self, node: Node, use: Use) -> MoveEnds:
        """What makes a value, and what a node that reads it does about the order of its elements."""
        return self.ends_of(use.source, _reader_kind(node, use))

    def ends_of(self, leaf: Leaf, reader: int) -> MoveEnds:
        """What makes a value, and a reader's way with the order of its elements."""
        return _ends(self.flow, self.kernels, self.gradients, leaf, reader)

    def source(self, node: Node, use: Use) -> Variable:
        """The variable that decides how a node finds what it reads: a hub, or the strategy that makes it."""
        is_hub = use.source in self.shared_layouts and (node.index, use.source) not in self.in_loop_readers
        return use.source if is_hub else (use.source[0], -1)


def build_variables(
    flow: Dataflow,
    free: Sequence[bool],
    segments: Segments,
    pinned: Mapping[int, Hashable],
    keys: Mapping[int, Hashable],
    kernels: Kernels,
    rules: RuleCache,
    gradients: frozenset[Leaf],
) -> ProgramVariables:
    """Decide what may be partial and which values get hubs.

    pinned: nodes that may not choose freely, each with a key that is equal where what is left to it is.
    keys: the same of nodes that differ in anything else. kernels: see `find_kernels`. rules: of the instructions.
    gradients: see `exposed.gradients`.
    """
    signatures = [-1 if node.is_value else rules.number(node.instruction) for node in flow.nodes]
    partial, ways = _partial_sums(flow, free, frozenset(pinned), signatures, rules)
    readers = _readers(flow, free, partial)
    apart, direct = _find_after_loops(flow, segments, readers.uses, readers.always_reduced)
    hubs, crossing = _find_shared_layouts(flow, segments, readers, partial, apart, direct)
    return ProgramVariables(
        flow=flow,
        segments=segments,
        signatures=tuple(signatures),
        is_cheap_to_recompute=tuple(free),
        can_be_partial=tuple(partial),
        partial_operand_sets=ways,
        shared_layouts=hubs,
        layout_ends={
            leaf: _ends(flow, kernels, gradients, leaf, _strictest_reader(leaf, readers, direct)) for leaf in hubs
        },
        gradients=gradients,
        cross_segment=crossing,
        after_loops=apart,
        in_loop_readers=direct,
        forwarded_values=frozenset([leaf for leaf in readers.hard if all(use.hard for _, use in readers.uses[leaf])]),
        single_use={
            leaf: (found[0][0].index, found[0][1].position)
            for leaf, found in readers.uses.items()
            if len(found) == 1 and leaf not in hubs
        },
        always_reduced=frozenset(readers.always_reduced),
        last_consumer=readers.last_consumer,
        kernels=kernels,
        keys={node: (pinned.get(node), keys.get(node)) for node in {*pinned, *keys}},
    )


def _partial_sums(
    flow: Dataflow, free: Sequence[bool], pinned: frozenset[int], signatures: Sequence[int], rules: RuleCache
) -> tuple[Sequence[bool], tuple[tuple[frozenset[int], ...], ...]]:
    """Which nodes may be partial sums, and for each node the sets of operands that it may hand on as such."""
    instructions = {number: node.instruction for number, node in zip(signatures, flow.nodes, strict=True)}
    through = {number: ways_through(each) for number, each in instructions.items() if number >= 0}
    ways = [() if free[n.index] or n.is_value else through[signatures[n.index]] for n in flow.nodes]
    sums = {
        number: any(factor.reduction == "add" for factor in rules.of_number(number).factors)
        and not why_not_partial(each)
        for number, each in instructions.items()
        if number >= 0
    }
    made = [not free[n.index] and not n.is_value and sums[signatures[n.index]] for n in flow.nodes]
    partial = _can_be_partial(flow, free, made, ways, pinned)
    allowed = tuple(
        [
            tuple([way for way in found if _is_partial(node, way, partial)]) if found else ()
            for node, found in zip(flow.nodes, ways, strict=True)
        ]
    )
    return partial, allowed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Readers:
    """Who reads what of all that is not made anew for each reader.

    uses: the readers of each value, in program order. hard: values that somebody takes as they lie. whole: what may be
    partial and is read by something made anew. last: of what is made anew, its last reader and the operand there.
    """

    uses: Mapping[Leaf, Sequence[tuple[Node, Use]]]
    hard: Set[Leaf]
    always_reduced: Set[Leaf]
    last_consumer: Mapping[Leaf, tuple[int, int]]


def _readers(flow: Dataflow, free: Sequence[bool], partial: Sequence[bool]) -> _Readers:
    uses: dict[Leaf, list[tuple[Node, Use]]] = {}
    hard: set[Leaf] = set()
    whole: set[Leaf] = set()
    last: dict[Leaf, tuple[int, int]] = {}
    for node in flow.nodes:
        is_free = free[node.index]
        for use in node.uses:
            leaf = use.source
            if free[leaf[0]]:
                if not is_free:
                    last[leaf] = node.index, use.position
            elif not is_free:
                uses.setdefault(leaf, []).append((node, use))
                if use.hard:
                    hard.add(leaf)
            elif partial[leaf[0]]:
                whole.add(leaf)  # a scalar that something made anew reads
    return _Readers(uses=uses, hard=hard, always_reduced=whole, last_consumer=last)


def _find_shared_layouts(
    flow: Dataflow,
    segments: Segments,
    readers: _Readers,
    partial: Sequence[bool],
    apart: Container[Leaf],
    direct: Container[tuple[int, Leaf]],
) -> tuple[dict[Leaf, float], dict[Variable, tuple[int, ...]]]:
    """The values that get a hub, with how often they are moved a step; and what crosses to which other segments."""
    hubs: dict[Leaf, float] = {}
    crossing: dict[Variable, tuple[int, ...]] = {}
    arguments = frozenset(flow.parameters)
    for leaf in sorted({*readers.always_reduced, *readers.uses}):
        found = readers.uses.get(leaf, [])
        is_special = leaf in readers.always_reduced or leaf in apart
        if len(found) == 1 and segments.of[found[0][0].index] == segments.of[leaf[0]] and not is_special:
            continue  # most: one reader beside it
        if leaf in apart:
            found = [(node, use) for node, use in found if (node.index, leaf) not in direct]
        away = {segments.of[node.index] for node, _ in found}
        away.discard(segments.of[leaf[0]])
        if leaf in readers.hard:
            if away:
                maker = leaf[0], -1
                crossing[maker] = tuple(sorted({*crossing.get(maker, ()), *away}))
            continue
        is_shared = len(found) > 1 and (partial[leaf[0]] or leaf[0] in arguments or _count_choosers(found) > 1)
        if away or is_shared or is_special:
            hubs[leaf] = max((use.weight for _, use in found), default=flow.nodes[leaf[0]].weight)
        if away:
            crossing[leaf] = tuple(sorted(away))
    return hubs, crossing


def _strictest_reader(leaf: Leaf, readers: _Readers, direct: Container[tuple[int, Leaf]]) -> int:
    """What of a hub's readers cares most about the order of elements does."""
    found = readers.uses.get(leaf, ())
    return max((_reader_kind(node, use) for node, use in found if (node.index, leaf) not in direct), default=LOOP)


def _ends(flow: Dataflow, kernels: Kernels, late: Container[Leaf], leaf: Leaf, reader: int) -> MoveEnds:
    return MoveEnds(_producer_kind(flow, leaf), reader, kernels.is_fused[leaf[0]], leaf not in late)


def _producer_kind(flow: Dataflow, leaf: Leaf) -> int:
    node = flow.nodes[leaf[0]]
    return STORED if node.is_value else maker_of(node.instruction)


def _reader_kind(node: Node, use: Use) -> int:
    return STORED if node.is_value else reader_of(node.instruction, use.position)


def _count_choosers(found: Sequence[tuple[Node, Use]]) -> int:
    """How many readers choose how they take what they read."""
    return sum([node.instruction.opcode in CHOICE_OPCODES and not node.is_value for node, _ in found])


def _is_partial(node: Node, way: frozenset[int], can: Sequence[bool]) -> bool:
    """Whether all operands of a way may be partial sums."""
    return all(can[node.uses[leaf].source[0]] for leaf in way)


def _find_after_loops(
    flow: Dataflow, segments: Segments, uses: Mapping[Leaf, Sequence[tuple[Node, Use]]], whole: Container[Leaf]
) -> tuple[Mapping[Leaf, Instruction], frozenset[tuple[int, Leaf]]]:
    """What loops carry and several nodes read behind them, with the loop, and every reader inside of such a value.

    Not where a reader inside is of another segment, or takes the value as it lies.
    """
    apart: dict[Leaf, Instruction] = {}
    direct: set[tuple[int, Leaf]] = set()
    for loop, carried in flow.leaves.items():
        if loop.opcode != "while":
            continue
        inside = computations_of(loop)
        for leaf in carried:
            found = uses.get(leaf, ())
            within = [node for node, _ in found if node.computation in inside]
            if leaf in whole or len(found) - len(within) < 2 or any(use.hard for _, use in found):
                continue
            if all(segments.of[node.index] == segments.of[leaf[0]] for node in within):
                apart[leaf] = loop
                direct.update((node.index, leaf) for node in within)
    return apart, frozenset(direct)


def _can_be_partial(
    flow: Dataflow,
    free: Sequence[bool],
    made: Sequence[bool],
    ways: Sequence[tuple[frozenset[int], ...]],
    pinned: frozenset[int],
) -> list[bool]:
    """Per node, whether its value may be a partial sum: made by a contracted factor, or linear in what may be one.

    made: nodes with such a factor. What loops carry may be if anything that flows into it may, for a whole value can
    become a partial sum: assumed first, dropped until nothing changes.
    """
    fixed = pinned | set(flow.parameters) | set(flow.outputs)
    fixed |= {node.index for node in flow.nodes if node.is_value and node.instruction.opcode in BARRIERS}
    can = [False] * len(flow.nodes)
    for node in flow.nodes:
        can[node.index] = node.is_value and bool(node.uses) and node.index not in fixed and node.shapes[0].rank > 0
        can[node.index] = can[node.index] and node.shapes[0].element_type.startswith(("f", "bf"))
    zero = [
        not node.is_value
        and (free[node.index] or node.instruction.opcode in FILL_OPCODES)
        and is_zero(node.instruction)
        and node.shapes[0].element_type.startswith(("f", "bf"))
        for node in flow.nodes
    ]
    # In order, so that again is only to be looked where something is fed from behind: what a loop carries.
    has_loops = any(use.source[0] > node.index for node in flow.nodes if can[node.index] for use in node.uses)
    changed = True
    while changed:
        changed = False
        for node in flow.nodes:
            i = node.index
            if i in fixed:
                continue
            if free[i]:
                found = zero[i]
            elif node.is_value:
                found = can[i] and any(can[use.source[0]] for use in node.uses if use.source[0] != i)
            else:
                found = made[i] or zero[i] or (bool(ways[i]) and any(_is_partial(node, way, can) for way in ways[i]))
            if found != can[i]:
                can[i] = found
                changed = has_loops
    return can


def variables_of(layout: ProgramVariables, nodes: Sequence[int]) -> tuple[list[Variable], int]:
    """The variables of `nodes`, each followed by its hubs, then the hubs they read from elsewhere; how many are own."""
    own: list[Variable] = []
    elsewhere: dict[Variable, None] = {}
    inside = set(nodes)
    for index in nodes:
        own.append((index, -1))
        own += [
            (index, leaf)
            for leaf in range(len(layout.flow.nodes[index].shapes))
            if (index, leaf) in layout.shared_layouts
        ]
        for use in layout.flow.nodes[index].uses:
            if use.source[0] not in inside and not layout.is_cheap_to_recompute[use.source[0]]:
                elsewhere[layout.source(layout.flow.nodes[index], use)] = None
    return [*own, *elsewhere], len(own)


def with_views(flow: Dataflow, nodes: frozenset[int]) -> frozenset[int]:
    """`nodes`, and what only rearranges or converts their values."""
    found = set(nodes)
    if nodes:
        for node in flow.nodes:
            if node.instruction.opcode in _VIEW_OPCODES and not node.is_value and node.uses[0].source[0] in found:
                found.add(node.index)
    return frozenset(found)


def cheap_nodes(flow: Dataflow, pinned: Container[int], *, with_stored: bool = False) -> list[bool]:
    """Per node, whether each reader gets it made anew, in the sharding that it wants.

    Not what a loop carries or the program returns: that is stored once. with_stored: that too, as it is made of
    nothing that is split.
    """
    stored = {use.source[0] for node in flow.nodes if node.is_value and node.shapes[0].dimensions for use in node.uses}
    free: list[bool] = []
    for node in flow.nodes:
        is_free = (
            node.instruction.opcode in _CHEAP_OPCODES
            and not node.is_value
            and (with_stored or node.index not in stored)
            and len(node.shapes) == 1
            and node.index not in pinned
        )
        if is_free:
            for use in node.uses:  # most are left at the first
                source, leaf = use.source
                if source >= node.index or not (free[source] or not flow.nodes[source].shapes[leaf].dimensions):
                    is_free = False
                    break
        free.append(is_free)
    return free
