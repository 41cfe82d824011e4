"""The forward pass of a training step: computations of loss and metrics from batch and parameters, gradients excluded.

Neither the order of results or of instructions matters, nor the form of the loss. A node is *behind* the turn to the
backward pass when it is a gradient or depends on one. Gradients are found

- by JAX's name stack, where the text has it: `transpose(jvp(..))` outermost; a derivative inside the loss (a force, a
  penalty on gradients) belongs to the forward pass;
- else by the reverse-mode form of each product y = a · b of two values: products dy · b and a · dy with one more value
  dy that depends on y. A loop backwards over rows written by a forward loop is behind as well;
- by an optimization barrier before a recomputation of existing values.

The forward pass is then the ancestors of the scalar results not behind (loss, accuracy, perplexity, not the norm of the
gradients), and of products with parameters that have gradients. When all scalars are behind (adversarial examples), it
is the ancestors of those with minimal dependencies, norms aside.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from shardwright.planner.graph.dataflow import BARRIERS, Dataflow, Leaf
from shardwright.planner.graph.value_numbering import number_values
from shardwright.planner.rewrites.stacked_loops import match_stacked_loop

#: Instructions with a layout choice of their own.
CHOICE_OPCODES = frozenset({
    "dot", "convolution", "gather", "scatter", "while", "conditional", "sort", "reduce-window", "select-and-scatter",
    "ragged-dot", "custom-call", "fft",
})  # fmt: skip

#: Products, linear in either operand.
_PRODUCT_OPCODES = frozenset({"dot", "convolution", "ragged-dot"})

#: Instructions that move or convert a value: its product is a product of the value itself.
_VIEW_OPCODES = frozenset({"bitcast", "broadcast", "convert", "copy", "reshape", "reverse", "transpose"})

#: The outermost transform of JAX's name stack is a transposition.
_TRANSPOSED = re.compile(r"(?:^|/)transpose\(")


def forward_nodes(
    flow: Dataflow, free: Sequence[bool], state: frozenset[int], once: frozenset[int] = frozenset()
) -> list[int]:
    """Arrays on a path from batch and state to the loss, in order; empty when the loss is unknown.

    free: per node, whether it is recomputed for each reader.
    state: nodes of arguments that are parameters or optimizer state.
    once: nodes known to run once a step, with any number of micro-batches: updates, norms of gradients.
    """
    of_state, of_batch = _origins(flow, state)
    both = [a and b for a, b in zip(of_state, of_batch, strict=True)]
    readers = _readers(flow)
    gradients = _gradients(flow, both, readers)
    behind = _dependents(readers, gradients)
    ends = _results(flow, readers, state, behind, once)
    needed = ancestors(flow, [*ends, *_trainable_products(flow, of_state, of_batch, behind, gradients)])
    return [
        node.index
        for node in flow.nodes
        if needed[node.index] and both[node.index] and not free[node.index] and any(shape.rank for shape in node.shapes)
    ]


def ancestors(flow: Dataflow, nodes: Iterable[int]) -> list[bool]:
    """Per node, whether it is one of `nodes` or an ancestor of one; in-place updates of arguments excluded."""
    is_ancestor = [False] * len(flow.nodes)
    todo = list(nodes)
    arguments = set(flow.parameters)
    while todo:
        i = todo.pop()
        if is_ancestor[i]:
            continue
        is_ancestor[i] = True
        if i not in arguments:
            todo += [use.source[0] for use in flow.nodes[i].uses]
    return is_ancestor


def _origins(flow: Dataflow, state: frozenset[int]) -> tuple[list[bool], list[bool]]:
    """Per node, whether it depends on state, and whether on other arguments; loop-carried values by their start."""
    arguments = set(flow.parameters)
    of_state, of_batch = [False] * len(flow.nodes), [False] * len(flow.nodes)
    for node in flow.nodes:
        i = node.index
        if i in arguments:
            of_state[i], of_batch[i] = i in state, i not in state
            continue
        for use in node.uses:
            source = use.source[0]
            of_state[i] = of_state[i] or of_state[source]
            of_batch[i] = of_batch[i] or of_batch[source]
    return of_state, of_batch


def _readers(flow: Dataflow) -> list[list[int]]:
    """Per node its readers. Arguments read nothing."""
    arguments = set(flow.parameters)
    readers: list[list[int]] = [[] for _ in flow.nodes]
    for node in flow.nodes:
        if node.index not in arguments:
            for use in node.uses:
                readers[use.source[0]].append(node.index)
    return readers


def _dependents(readers: Sequence[Sequence[int]], nodes: Iterable[int]) -> list[bool]:
    """Per node, whether it is one of `nodes` or depends on one, also through loops."""
    is_dependent = [False] * len(readers)
    todo = list(nodes)
    while todo:
        i = todo.pop()
        if not is_dependent[i]:
            is_dependent[i] = True
            todo += readers[i]
    return is_dependent


# ---- where the forward pass ends ----------------------------------------------


def _results(
    flow: Dataflow,
    readers: Sequence[Sequence[int]],
    state: frozenset[int],
    behind: Sequence[bool],
    once: frozenset[int],
) -> list[int]:
    """Scalar results computed from batch and state; only those independent of gradients, if any."""
    numbers = [
        node for number, node in enumerate(flow.outputs) if number not in flow.aliases and _is_number(flow, node)
    ]
    of_state = _dependents(readers, state) if numbers else []
    of_batch = _dependents(readers, set(flow.parameters).difference(state)) if numbers else []
    candidates = [node for node in numbers if of_state[node] and of_batch[node]]
    ahead = [node for node in candidates if not behind[node]]
    return ahead or _minimal_results(flow, [node for node in candidates if once.isdisjoint(_arrays(flow, node))])


def _is_number(flow: Dataflow, node: int) -> bool:
    shape = flow.nodes[node].shapes[0]
    return shape.rank == 0 and shape.element_type[0] in "fb"


def _minimal_results(flow: Dataflow, nodes: Sequence[int]) -> list[int]:
    """The `nodes` whose dependencies are no proper superset of another one's."""
    needs = {node: _arrays(flow, node) for node in nodes}
    return [node for node in nodes if not any(other < needs[node] for other in needs.values())]


def _arrays(flow: Dataflow, node: int) -> frozenset[int]:
    needed = ancestors(flow, [node])
    return frozenset(i for i, is_needed in enumerate(needed) if is_needed and flow.nodes[i].shapes[0].rank)


def _trainable_products(
    flow: Dataflow,
    of_state: Sequence[bool],
    of_batch: Sequence[bool],
    behind: Sequence[bool],
    gradients: Collection[int],
) -> list[int]:
    """Products of the entry with parameters, ahead of the turn, that lead to gradients: no result may need them."""
    if not gradients:
        return []
    leads, arguments = ancestors(flow, gradients), set(flow.parameters)
    return [
        node.index
        for node in flow.nodes
        if node.instruction.opcode in CHOICE_OPCODES
        and node.computation == flow.module.entry.name
        and node.index not in arguments
        and of_batch[node.index]
        and leads[node.index]
        and not behind[node.index]
        and any(of_state[source] and not of_batch[source] for source, _ in (use.source for use in node.uses))
    ]


# ---- gradients ------------------------------------------------------------------


def _gradients(flow: Dataflow, both: Sequence[bool], readers: Sequence[Sequence[int]]) -> set[int]:
    """Nodes known to be in the backward pass."""
    arguments = set(flow.parameters)
    inner = [node for node in flow.nodes if both[node.index] and node.index not in arguments]
    again = {i for i in _find_recomputed(flow, readers) if both[i]}
    named = {node.index for node in inner if _TRANSPOSED.search(node.instruction.op_name)}
    if named:
        return named | again  # copies of the forward pass keep its names
    return {i for i in (*_reverse_loops(flow), *_cotangents(flow)) if both[i]} | again


def _reverse_loops(flow: Dataflow) -> set[int]:
    """Loops over rows in the opposite direction of the loop that wrote them."""
    loops = {
        node.index: loop
        for node in flow.nodes
        if node.instruction.opcode == "while" and not node.is_value and (loop := match_stacked_loop(node.instruction))
    }
    reversed_loops = set()
    for i, loop in loops.items():
        for use in flow.nodes[i].uses:
            source, leaf = use.source
            writer = loops.get(source)
            if writer is None or use.position not in loop.reads or leaf not in writer.writes:
                continue
            if writer.is_descending != loop.is_descending:
                reversed_loops.add(i)
    return reversed_loops


def _find_recomputed(flow: Dataflow, readers: Sequence[Sequence[int]]) -> set[int]:
    """Nodes behind an optimization barrier that repeat the computation of a node behind none."""
    barriers = {node.index for node in flow.nodes if node.is_value and node.instruction.opcode in BARRIERS}
    if not barriers:
        return set()
    held, meaning = _dependents(readers, barriers), number_values(flow)
    first = {meaning[i][:1] for i, is_held in enumerate(held) if not is_held}
    return {i for i, is_held in enumerate(held) if is_held and i not in barriers and meaning[i][:1] in first}


def _cotangents(flow: Dataflow) -> set[int]:
    """Products dy · b and a · dy, given a product y = a · b that dy depends on."""
    products = _products(flow)
    by_pair: dict[frozenset[Leaf], list[int]] = {}
    beside: dict[Leaf, set[Leaf]] = {}
    for i, (a, b) in products.items():
        if a != b:
            by_pair.setdefault(frozenset((a, b)), []).append(i)
            beside.setdefault(a, set()).add(b)
            beside.setdefault(b, set()).add(a)
    number = {i: bit for bit, i in enumerate(products)}
    behind = _products_before(flow, number)
    cotangents: set[int] = set()
    for pair, same_factors in by_pair.items():
        a, b = pair
        for dy in beside[a] & beside[b]:
            if any(behind[dy[0]] >> number[i] & 1 for i in same_factors):
                cotangents.update(by_pair[frozenset((a, dy))], by_pair[frozenset((b, dy))])
    return cotangents


def _products(flow: Dataflow) -> dict[int, tuple[Leaf, Leaf]]:
    """Products of two arrays: node → its two factors, traced through moves and conversions."""
    meaning, arguments = number_values(flow), set(flow.parameters)
    origins: dict[int, Leaf] = {}

    def origin(leaf: Leaf) -> Leaf:
        return origins.get(leaf[0]) or meaning[leaf[0]][leaf[1]]

    factors = {}
    for node in flow.nodes:
        opcode, i = node.instruction.opcode, node.index
        if node.is_value or i in arguments:
            continue
        if opcode in _VIEW_OPCODES and node.uses[0].source[0] < i:
            origins[i] = origin(node.uses[0].source)
        elif opcode in _PRODUCT_OPCODES:
            factors[i] = (origin(node.uses[0].source), origin(node.uses[1].source))
    return factors


def _products_before(flow: Dataflow, number: Mapping[int, int]) -> list[int]:
    """Per node the products it depends on: a bit set by their numbers."""
    arguments = set(flow.parameters)
    bits: list[int] = []
    for node in flow.nodes:
        own = 1 << number[node.index] if node.index in number else 0
        if node.index not in arguments:
            for use in node.uses:
                own |= bits[use.source[0]] if use.source[0] < node.index else 0
        bits.append(own)
    return bits
