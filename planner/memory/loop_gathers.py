"""Loop-carried arguments, and the uses that decide their copies stored during a loop.

An argument read gathered in a loop is stored twice: in its own sharding, and gathered. A compiler that hoists
loop-invariant code (`peak.loop_invariant_code_motion`) gives the copy the sharding of its use in the body, wherever the
plan gathers it; another sharding of the loop-carried value may cost nothing. Without hoisting the copy has the sharding
of the loop-carried value. When weights are rounded ahead of loops, only that copy remains: this case is ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from shardwright.hlo import Instruction
from shardwright.planner.graph.dataflow import Dataflow, Leaf, Node

#: A use by an instruction: its node, and the number among the node's uses.
LoopUse = tuple[int, int]


def find_loop_uses(flow: Dataflow, hoists: str) -> dict[str, dict[int, list[LoopUse]]]:
    """Loop name → loop-carried argument (node) → the uses that decide the stored copies.

    hoists: `Compiler.hoists_loop_invariants`.
    """
    uses_by_loop: dict[str, dict[int, list[LoopUse]]] = {}
    for loop in flow.entering:
        if loop.opcode == "while" and hoists in {"none", "all"}:
            by_argument: dict[int, list[LoopUse]] = {}
            for argument, reading in _uses_in_loop(flow, loop, is_hoisting=hoists == "all"):
                by_argument.setdefault(argument, []).append(reading)
            uses_by_loop[loop.name] = by_argument
    return uses_by_loop


def argument_of_use(flow: Dataflow, reading: LoopUse) -> int:
    """The argument behind a use, through the loops that carry it."""
    node, number = reading
    source = flow.nodes[node].uses[number].source[0]
    while source not in flow.parameters:
        source = flow.nodes[source].uses[0].source[0]
    return source


def _uses_in_loop(flow: Dataflow, loop: Instruction, *, is_hoisting: bool) -> Iterator[tuple[int, LoopUse]]:
    begins = _loop_carried_arguments(flow, loop, {(argument, 0): argument for argument in flow.parameters})
    if not is_hoisting:
        sources = {use.source for node in flow.nodes for use in node.uses}
        yield from ((argument, (leaf[0], 0)) for leaf, argument in begins.items() if leaf in sources)
        return
    inside = _loops_within(loop)
    for nested in inside[1:]:
        begins |= _loop_carried_arguments(flow, nested, begins)
    bodies = {inner.called["body"][0].name for inner in inside}
    body = [node for node in flow.nodes if node.computation in bodies]
    unchanged = _invariant_nodes(flow, loop, body)
    for node in body:
        if node.is_value or node.index in unchanged:  # hoisted itself
            continue
        for number, use in enumerate(node.uses):
            if use.source in begins:
                yield begins[use.source], (node.index, number)


def _loops_within(loop: Instruction) -> list[Instruction]:
    """A loop and all loops nested in it, outer ones first. Loops in conditionals are excluded: nothing is hoisted out
    of those."""
    (body,) = loop.called["body"]
    nested = [_loops_within(loop_within) for loop_within in body.instructions if loop_within.opcode == "while"]
    return [loop, *(loop_within for loops in nested for loop_within in loops)]


def _loop_carried_arguments(flow: Dataflow, loop: Instruction, begins: Mapping[Leaf, int]) -> dict[Leaf, int]:
    """Loop-carried leaf → argument, for arguments unchanged by a loop. begins: the same of the loop's inputs."""
    uses = {leaf: flow.nodes[leaf[0]].uses for leaf in flow.entering[loop]}
    return {
        leaf: begins[entries[0].source]
        for leaf, entries in uses.items()
        if len(entries) == 1 and entries[0].source in begins
    }


def _invariant_nodes(flow: Dataflow, loop: Instruction, body: Sequence[Node]) -> frozenset[int]:
    """Loop-invariant nodes of a loop's body; a superset of the hoisted ones."""
    entering = {leaf[0] for leaf in flow.entering[loop]}
    invariant: set[int] = set()
    for node in body:
        is_carried = node.index in entering and len(node.uses) == 1
        if is_carried or (node.index not in entering and all(use.source[0] in invariant for use in node.uses)):
            invariant.add(node.index)
    return frozenset(invariant)
