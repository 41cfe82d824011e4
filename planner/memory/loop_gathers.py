"""What loops carry unchanged from arguments, and who decides what is stored of it as long as they run.

An argument that a loop reads gathered is stored twice then: as the argument lies, and gathered. Where a compiler makes
what is the same in each pass ahead of the loop (`peak.hoisting`), the copy lies as an instruction of the body uses it,
wherever the plan gathers it; that the loop carries it otherwise may cost nothing. Where it does not, the copy lies as
the loop carries it. Where weights are rounded ahead of loops, only that copy is left: nothing is said of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from shardwright.hlo import Instruction
from shardwright.planner.graph.dataflow import Dataflow, Leaf, Node

#: What an instruction reads: its node, and which of its uses it is.
LoopUse = tuple[int, int]


def find_loop_uses(flow: Dataflow, hoists: str) -> dict[str, dict[int, list[LoopUse]]]:
    """Per loop and argument that it carries unchanged, by name and node, the uses that each decide what is stored of it
    besides the argument. hoists: `Compiler.hoists_loop_invariants`.
    """
    found: dict[str, dict[int, list[LoopUse]]] = {}
    for loop in flow.entering:
        if loop.opcode == "while" and hoists in {"none", "all"}:
            by_argument: dict[int, list[LoopUse]] = {}
            for argument, reading in _uses_in_loop(flow, loop, is_hoisting=hoists == "all"):
                by_argument.setdefault(argument, []).append(reading)
            found[loop.name] = by_argument
    return found


def argument_of_use(flow: Dataflow, reading: LoopUse) -> int:
    """The argument that a reading is of, through the loops that carry it."""
    node, number = reading
    source = flow.nodes[node].uses[number].source[0]
    while source not in flow.parameters:
        source = flow.nodes[source].uses[0].source[0]
    return source


def _uses_in_loop(flow: Dataflow, loop: Instruction, *, is_hoisting: bool) -> Iterator[tuple[int, LoopUse]]:
    begins = _loop_carried_arguments(flow, loop, {(argument, 0): argument for argument in flow.parameters})
    if not is_hoisting:
        read = {use.source for node in flow.nodes for use in node.uses}
        yield from ((argument, (leaf[0], 0)) for leaf, argument in begins.items() if leaf in read)
        return
    inside = _loops_within(loop)
    for nested in inside[1:]:
        begins |= _loop_carried_arguments(flow, nested, begins)
    bodies = {each.called["body"][0].name for each in inside}
    body = [node for node in flow.nodes if node.computation in bodies]
    unchanged = _invariant_nodes(flow, loop, body)
    for node in body:
        if node.is_value or node.index in unchanged:  # which is made ahead of the loop itself
            continue
        for number, use in enumerate(node.uses):
            if use.source in begins:
                yield begins[use.source], (node.index, number)


def _loops_within(loop: Instruction) -> list[Instruction]:
    """A loop and those in it, however deep, outer ones first: not those of conditionals, ahead of which nothing is
    made."""
    (body,) = loop.called["body"]
    nested = [_loops_within(each) for each in body.instructions if each.opcode == "while"]
    return [loop, *(each for found in nested for each in found)]


def _loop_carried_arguments(flow: Dataflow, loop: Instruction, begins: Mapping[Leaf, int]) -> dict[Leaf, int]:
    """What a loop carries unchanged of some arguments, and of which. begins: of which what it takes is."""
    uses = {leaf: flow.nodes[leaf[0]].uses for leaf in flow.entering[loop]}
    return {leaf: begins[each[0].source] for leaf, each in uses.items() if len(each) == 1 and each[0].source in begins}


def _invariant_nodes(flow: Dataflow, loop: Instruction, body: Sequence[Node]) -> frozenset[int]:
    """Nodes of a loop's body that are the same in each pass; more than those that are made ahead of it."""
    entering = {leaf[0] for leaf in flow.entering[loop]}
    found: set[int] = set()
    for node in body:
        is_carried = node.index in entering and len(node.uses) == 1
        if is_carried or (node.index not in entering and all(use.source[0] in found for use in node.uses)):
            found.add(node.index)
    return frozenset(found)
