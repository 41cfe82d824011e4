"""The mesh-independent part of the cost graph: its variables, among them the shared layouts.

A variable is a node with strategies, or a *shared layout*: the sharding of a value for its readers. A value gets one
when several readers want it resharded: a common reshard (a gradient reduced once, weights gathered for forward and
backward) is paid once. Every value crossing from one segment to another gets one too. A loop-carried value with readers
after the loop has a shared layout for those alone: a gradient accumulated in a loop stays a partial sum inside, and is
reduced once for all its readers.

Values made of constants, iota and scalars alone are left out: any device can compute any part of them. They take the
sharding wanted by each reader (`ProgramVariables.is_cheap_to_recompute`).
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass

from shardwright.cost.moves.relayout import LOOP, STORED, MoveEnds, maker_of, reader_of
from shardwright.hlo import Instruction
from shardwright.planner.costs.kernels import Kernels
from shardwright.planner.costs.rounded_uses import NOTHING_ROUNDED, RoundedUses
from shardwright.planner.graph.dataflow import BARRIERS, Dataflow, Leaf, Node, Use, computations_of
from shardwright.planner.rules.linear import is_zero, why_not_partial
from shardwright.planner.segments.dominator_cut import Segments
from shardwright.planner.segments.forward_pass import CHOICE_OPCODES
from shardwright.planner.strategies.expansion import ways_through
from shardwright.planner.strategies.rule_cache import RuleCache

#: Instructions with almost free recomputation in any sharding, when all their operands are cheap too.
_CHEAP_OPCODES = frozenset({
    "constant", "iota", "broadcast", "convert", "compare", "select", "add", "subtract", "multiply", "divide", "negate",
    "and", "or", "not", "xor", "maximum", "minimum", "reshape", "transpose", "sign", "abs", "clamp", "rsqrt", "sqrt",
    "exponential", "power", "copy", "floor", "shift-left", "shift-right-logical",
})  # fmt: skip

#: Instructions that write much memory at little computation.
FILL_OPCODES = frozenset({"broadcast", "iota"})

_VIEW_OPCODES = frozenset({"convert", "copy", "transpose", "reshape", "bitcast"})

#: A variable: (node, -1) is its strategy, (node, leaf) the shared layout of one of its array leaves.
Variable = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramVariables:
    """The mesh-independent part of the cost graph.

    signatures: per node, a number, equal for instructions with equal strategies (`RuleCache.number`); -1 for nodes that
        only forward a value.
    is_cheap_to_recompute: per node, whether it is recomputed for each reader.
    can_be_partial: per node, whether its value may be a partial sum.
    partial_operand_sets: per node, the sets of operands that may be partial together.
    shared_layouts: values with a shared layout, and the largest weight of a use of it.
    layout_ends: per shared layout, its producer's kind and its strictest reader's.
    gradients: sums read by no later product.
    rounded: uses of values that the compiler sends as bfloat16.
    cross_segment: variable → other segments that depend on it: shared layouts they read, and producers of values they
        take without a reshard.
    after_loops: shared layouts of loop-carried values, for readers after the loop → the loop.
    in_loop_readers: readers inside it, and the values they read.
    forwarded_values: values taken by all readers in their producers' shardings, partial sums too.
    single_use: value without a shared layout and with one reader → that node, and the operand leaf.
    always_reduced: shared layouts that exclude partial sums: a cheap value recomputed for each reader reads them.
    last_consumer: cheap value → its last reader with strategies of its own, and the operand leaf.
    kernels: the nodes' fusion; recomputed values are part of their readers' kernels in addition.
    inside: nodes in manual regions → the manual axes around what they give, which split nothing.
    keys: nodes with special conditions (pinned, confined, sent with every step) → a key, equal for equal conditions.
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
    rounded: RoundedUses
    cross_segment: Mapping[Variable, tuple[int, ...]]
    after_loops: Mapping[Leaf, Instruction]
    in_loop_readers: frozenset[tuple[int, Leaf]]
    forwarded_values: frozenset[Leaf]
    single_use: Mapping[Leaf, tuple[int, int]]
    always_reduced: frozenset[Leaf]
    last_consumer: Mapping[Leaf, tuple[int, int]]
    kernels: Kernels
    inside: Mapping[int, frozenset[tuple[str, int]]]
    keys: Mapping[int, Hashable]

    def describe(self, variable: Variable) -> Hashable:
        """The key of a variable's states and costs on any mesh, without its neighbours."""
        index, leaf = variable
        node = self.flow.nodes[index]
        crosses = variable in self.cross_segment
        if leaf >= 0:
            may_be_partial = self.can_be_partial[index] and variable not in self.always_reduced
            is_apart, is_fused = variable in self.after_loops, self.kernels.is_fused[index]
            ends = self.layout_ends[variable]
            return (
                node.shapes[leaf], may_be_partial, self.shared_layouts[variable], crosses, is_apart, is_fused, ends,
                variable in self.rounded.hubs, self.inside.get(index),
            )  # fmt: skip
        uses = [  # of cheap values: whether they are zero
            (use.position, self.can_be_partial[use.source[0]])
            for use in node.uses
            if self.is_cheap_to_recompute[use.source[0]]
        ]
        direct = (
            [use.position for use in node.uses if (index, use.source) in self.in_loop_readers]
            if self.in_loop_readers
            else ()
        )
        what = (node.shapes, self.inside.get(index)) if node.is_value else self.signatures[index]
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
            tuple([use.position for use in node.uses if (index, use.position) in self.rounded.uses]),
            self.keys.get(index),
        )

    def pays_for(self, node: Node, use: Use) -> bool:
        """Whether a node decides the bytes of a cheap value it reads: it is the last reader. Copies recomputed for
        other readers are no smaller, or stored in addition."""
        return self.last_consumer.get(use.source) == (node.index, use.position)

    def ends_kernel(self, index: int) -> bool:
        """Whether a node needs a kernel launch of its own."""
        return self.kernels.ends[index] and not self.is_cheap_to_recompute[index]

    def ends(self, node: Node, use: Use) -> MoveEnds:
        """The kinds of a value's producer and of one reader, with respect to the order of its elements."""
        return self.ends_of(use.source, _reader_kind(node, use))

    def ends_of(self, leaf: Leaf, reader: int) -> MoveEnds:
        """The kinds of a value's producer and of its reader, with respect to the order of its elements."""
        return _ends(self.flow, self.kernels, self.gradients, leaf, reader)

    def source(self, node: Node, use: Use) -> Variable:
        """The variable that decides the sharding of a node's operand before its reshard: a shared layout, or the
        producer's strategy."""
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
    rounded: RoundedUses = NOTHING_ROUNDED,
) -> ProgramVariables:
    """Decide the partial sums and the shared layouts.

    free: per node, whether it is recomputed for each reader.
    pinned: nodes with restricted strategies, each with a key, equal for equal restrictions.
    keys: the same for nodes with other differences.
    kernels: see `find_kernels`.
    rules: of the instructions.
    gradients: see `overlap.gradients`.
    rounded: see `find_rounded_uses`; by default of a compiler that rounds nothing.
    """
    signatures = [-1 if node.is_value else rules.number(node.instruction) for node in flow.nodes]
    inside = {n.index: axes for n in flow.nodes if (axes := rules.inside.axes.get(n.instruction))}
    # XLA takes no mark of a partial sum beside manual axes: in a region sums are reduced where they are made.
    partial, ways = _partial_sums(flow, free, frozenset([*pinned, *inside]), signatures, rules)
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
        rounded=rounded,
        cross_segment=crossing,
        after_loops=apart,
        in_loop_readers=direct,
        forwarded_values=frozenset([leaf for leaf in readers.hard if all(use.hard for _, use in readers.uses[leaf])]),
        single_use={
            leaf: (uses[0][0].index, uses[0][1].position)
            for leaf, uses in readers.uses.items()
            if len(uses) == 1 and leaf not in hubs
        },
        always_reduced=frozenset(readers.always_reduced),
        last_consumer=readers.last_consumer,
        kernels=kernels,
        inside=inside,
        keys={node: (pinned.get(node), keys.get(node)) for node in {*pinned, *keys}},
    )


def _partial_sums(
    flow: Dataflow, free: Sequence[bool], pinned: frozenset[int], signatures: Sequence[int], rules: RuleCache
) -> tuple[Sequence[bool], tuple[tuple[frozenset[int], ...], ...]]:
    """The nodes that may be partial sums, and for each node the sets of operands it may forward unreduced."""
    instructions = {number: node.instruction for number, node in zip(signatures, flow.nodes, strict=True)}
    through = {number: ways_through(instruction) for number, instruction in instructions.items() if number >= 0}
    ways = [() if free[n.index] or n.is_value else through[signatures[n.index]] for n in flow.nodes]
    sums = {
        number: any(factor.reduction == "add" for factor in rules.of_number(number).factors)
        and not why_not_partial(instruction)
        for number, instruction in instructions.items()
        if number >= 0
    }
    is_sum = [not free[n.index] and not n.is_value and sums[signatures[n.index]] for n in flow.nodes]
    partial = _can_be_partial(flow, free, is_sum, ways, pinned)
    allowed = tuple(
        [
            tuple([way for way in sets if _is_partial(node, way, partial)]) if sets else ()
            for node, sets in zip(flow.nodes, ways, strict=True)
        ]
    )
    return partial, allowed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Readers:
    """The readers of all values, cheap ones recomputed per reader aside.

    uses: the readers of each value, in program order.
    hard: values with a reader that allows no reshard.
    always_reduced: possible partial sums read by a cheap value.
    last_consumer: cheap value → its last reader, and the operand there.
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
                whole.add(leaf)  # a scalar read by a cheap value
    return _Readers(uses=uses, hard=hard, always_reduced=whole, last_consumer=last)


def _find_shared_layouts(
    flow: Dataflow,
    segments: Segments,
    readers: _Readers,
    partial: Sequence[bool],
    apart: Container[Leaf],
    direct: Container[tuple[int, Leaf]],
) -> tuple[dict[Leaf, float], dict[Variable, tuple[int, ...]]]:
    """Values with a shared layout, with their reshards a step; variables crossing to other segments, with those
    segments."""
    layouts: dict[Leaf, float] = {}
    crossing: dict[Variable, tuple[int, ...]] = {}
    arguments = frozenset(flow.parameters)
    for leaf in sorted({*readers.always_reduced, *readers.uses}):
        uses = readers.uses.get(leaf, [])
        is_special = leaf in readers.always_reduced or leaf in apart
        if len(uses) == 1 and segments.of[uses[0][0].index] == segments.of[leaf[0]] and not is_special:
            continue  # most: one reader in the same segment
        if leaf in apart:
            uses = [(node, use) for node, use in uses if (node.index, leaf) not in direct]
        away = {segments.of[node.index] for node, _ in uses}
        away.discard(segments.of[leaf[0]])
        if leaf in readers.hard:
            if away:
                maker = leaf[0], -1
                crossing[maker] = tuple(sorted({*crossing.get(maker, ()), *away}))
            continue
        is_shared = len(uses) > 1 and (partial[leaf[0]] or leaf[0] in arguments or _count_choosers(uses) > 1)
        if away or is_shared or is_special:
            layouts[leaf] = max((use.weight for _, use in uses), default=flow.nodes[leaf[0]].weight)
        if away:
            crossing[leaf] = tuple(sorted(away))
    return layouts, crossing


def _strictest_reader(leaf: Leaf, readers: _Readers, direct: Container[tuple[int, Leaf]]) -> int:
    """The kind of the shared layout's reader with the strictest order of elements."""
    uses = readers.uses.get(leaf, ())
    return max((_reader_kind(node, use) for node, use in uses if (node.index, leaf) not in direct), default=LOOP)


def _ends(flow: Dataflow, kernels: Kernels, late: Container[Leaf], leaf: Leaf, reader: int) -> MoveEnds:
    return MoveEnds(_producer_kind(flow, leaf), reader, kernels.is_fused[leaf[0]], leaf not in late)


def _producer_kind(flow: Dataflow, leaf: Leaf) -> int:
    node = flow.nodes[leaf[0]]
    return STORED if node.is_value else maker_of(node.instruction)


def _reader_kind(node: Node, use: Use) -> int:
    return STORED if node.is_value else reader_of(node.instruction, use.position)


def _count_choosers(readers: Sequence[tuple[Node, Use]]) -> int:
    """The number of readers with a free choice of operand shardings."""
    return sum([node.instruction.opcode in CHOICE_OPCODES and not node.is_value for node, _ in readers])


def _is_partial(node: Node, way: frozenset[int], can: Sequence[bool]) -> bool:
    """Whether all operands of a set may be partial sums."""
    return all(can[node.uses[leaf].source[0]] for leaf in way)


def _find_after_loops(
    flow: Dataflow, segments: Segments, uses: Mapping[Leaf, Sequence[tuple[Node, Use]]], whole: Container[Leaf]
) -> tuple[Mapping[Leaf, Instruction], frozenset[tuple[int, Leaf]]]:
    """Loop-carried values with several readers after the loop, each with the loop; and every reader of such a value
    inside it.

    A value is excluded by an inner reader in another segment, or by a reader that allows no reshard.
    """
    apart: dict[Leaf, Instruction] = {}
    direct: set[tuple[int, Leaf]] = set()
    for loop, carried in flow.leaves.items():
        if loop.opcode != "while":
            continue
        inside = computations_of(loop)
        for leaf in carried:
            readers = uses.get(leaf, ())
            within = [node for node, _ in readers if node.computation in inside]
            if leaf in whole or len(readers) - len(within) < 2 or any(use.hard for _, use in readers):
                continue
            if all(segments.of[node.index] == segments.of[leaf[0]] for node in within):
                apart[leaf] = loop
                direct.update((node.index, leaf) for node in within)
    return apart, frozenset(direct)


def _can_be_partial(
    flow: Dataflow,
    free: Sequence[bool],
    contracting: Sequence[bool],
    ways: Sequence[tuple[frozenset[int], ...]],
    pinned: frozenset[int],
) -> list[bool]:
    """Per node, whether its value may be a partial sum: computed with a contracted factor, or linear in a partial sum.

    contracting: nodes with such a factor.

    A loop-carried value may be one when any of its inputs may: a whole value can become a partial sum. Assumed at
    first, then dropped until a fixed point.
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
    # In program order: only values fed from later nodes (loop-carried ones) need another pass.
    has_loops = any(use.source[0] > node.index for node in flow.nodes if can[node.index] for use in node.uses)
    changed = True
    while changed:
        changed = False
        for node in flow.nodes:
            i = node.index
            if i in fixed:
                continue
            if free[i]:
                may_be_partial = zero[i]
            elif node.is_value:
                may_be_partial = can[i] and any(can[use.source[0]] for use in node.uses if use.source[0] != i)
            else:
                may_be_partial = (
                    contracting[i] or zero[i] or (bool(ways[i]) and any(_is_partial(node, way, can) for way in ways[i]))
                )
            if may_be_partial != can[i]:
                can[i] = may_be_partial
                changed = has_loops
    return can


def variables_of(layout: ProgramVariables, nodes: Sequence[int]) -> tuple[list[Variable], int]:
    """The variables of `nodes`, each followed by its shared layouts, then the shared layouts read from elsewhere; the
    number of own ones."""
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
    """`nodes`, and all nodes that only rearrange or convert their values."""
    members = set(nodes)
    if nodes:
        for node in flow.nodes:
            if node.instruction.opcode in _VIEW_OPCODES and not node.is_value and node.uses[0].source[0] in members:
                members.add(node.index)
    return frozenset(members)


def cheap_nodes(flow: Dataflow, pinned: Container[int], *, with_stored: bool = False) -> list[bool]:
    """Per node, whether it is recomputed for each reader, in the sharding wanted there.

    Loop-carried values and results of the program are excluded: they are stored once. with_stored: include them, when
    made of nothing sharded.
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
            for use in node.uses:  # most end at the first
                source, leaf = use.source
                if source >= node.index or not (free[source] or not flow.nodes[source].shapes[leaf].dimensions):
                    is_free = False
                    break
        free.append(is_free)
    return free
