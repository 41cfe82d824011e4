"""What loops carry unchanged from arguments, and who decides what is stored of it as long as they run.

An argument that a loop reads gathered is stored twice then: as the argument lies, and gathered. Where a compiler makes
what is the same in each pass ahead of the loop (`cost.hoisting`), the copy lies as an instruction of the body uses it,
wherever the plan gathers it; that the loop carries it otherwise may cost nothing. Where it does not, the copy lies as
the loop carries it. Where weights are rounded ahead of loops, only that copy is left: nothing is said of it.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.hlo import Instruction
from shardwright.planner.dataflow import Dataflow, Leaf, computations_of

#: What an instruction reads: its node, and which of its uses it is.
Reading = tuple[int, int]


def readings(flow: Dataflow, hoists: str) -> dict[str, dict[int, list[Reading]]]:
    """Per loop and argument that it carries unchanged, by name and node, the uses that each decide what is stored of it
    besides the argument. hoists: `Compiler.hoists_loop_invariants`.
    """
    found: dict[str, dict[int, list[Reading]]] = {}
    for loop, carried in flow.entering.items():
        if loop.opcode == "while" and hoists in {"none", "all"}:
            by_argument: dict[int, list[Reading]] = {}
            for argument, reading in _of_loop(flow, loop, carried, is_hoisting=hoists == "all"):
                by_argument.setdefault(argument, []).append(reading)
            found[loop.name] = by_argument
    return found


def argument_of(flow: Dataflow, reading: Reading) -> int:
    """The argument that a reading is of, through the loops that carry it."""
    node, number = reading
    return _begins_as(flow, flow.nodes[node].uses[number].source)[0]


def _begins_as(flow: Dataflow, leaf: Leaf) -> Leaf:
    """What a value is that loops carry unchanged, before the outermost of them; others as they are."""
    while True:
        node = flow.nodes[leaf[0]]
        if leaf[0] in flow.parameters or not node.is_value or len(node.uses) != 1:
            return leaf
        leaf = node.uses[0].source


def _of_loop(
    flow: Dataflow, loop: Instruction, carried: tuple[Leaf, ...], *, is_hoisting: bool
) -> Iterator[tuple[int, Reading]]:
    arguments, inside = frozenset(flow.parameters), computations_of(loop)
    body = [node for node in flow.nodes if node.computation in inside]
    begins = {
        leaf: flow.nodes[leaf[0]].uses[0].source[0]
        for leaf in carried
        if len(flow.nodes[leaf[0]].uses) == 1 and flow.nodes[leaf[0]].uses[0].source[0] in arguments
    }
    if not is_hoisting:
        read = {use.source for node in body for use in node.uses}
        yield from ((argument, (leaf[0], 0)) for leaf, argument in begins.items() if leaf in read)
        return
    fixed = _unchanged(flow, loop, carried)
    for node in body:
        if node.is_value or node.index in fixed:  # which is made ahead of the loop itself
            continue
        for number, use in enumerate(node.uses):
            argument = _begins_as(flow, use.source)[0]
            if use.source[0] in fixed and flow.nodes[use.source[0]].is_value and argument in arguments:
                yield argument, (node.index, number)


def _unchanged(flow: Dataflow, loop: Instruction, carried: tuple[Leaf, ...]) -> frozenset[int]:
    """Nodes of a loop's body that are the same in each pass."""
    inside = computations_of(loop)
    entering = {leaf[0] for leaf in carried}
    found: set[int] = set()
    for node in flow.nodes:
        if node.computation not in inside:
            continue
        is_carried = node.index in entering and len(node.uses) == 1
        if is_carried or (node.index not in entering and all(use.source[0] in found for use in node.uses)):
            found.add(node.index)
    return frozenset(found)
