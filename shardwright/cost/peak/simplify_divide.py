"""Division by a broadcast: XLA:CPU's AlgebraicSimplifier multiplies by the broadcast inverse.

`x / broadcast(s)` becomes `x * broadcast(1 / s)` if that broadcast is the only reader of its operand
(algebraic_simplifier.cc, jaxlib 0.10.2). Among several quotients by one broadcast, the first in post-order is
rewritten; afterwards the inverse reads `s` too. The forward and the backward pass of a softmax thus have separate
broadcasts, and neither is stored. With a recomputed forward pass, the backward pass's quotient may come first:
gradients of queries and keys ahead of those of values.
"""

from __future__ import annotations

from itertools import pairwise

from shardwright.cost.peak.device_program import DeviceProgram

_FLOATS = frozenset({"bf16", "f16", "f32", "f64"})

#: Mark of a divisor broadcast in one quotient alone, by a pass after the inverting one.
OWN_BROADCAST = ("of a product",)


def multiply_by_inverses(program: DeviceProgram) -> DeviceProgram:
    """The program with multiplications by inverses; equal nodes must already be merged."""
    spread = _find_divisions(program)
    if not spread:
        return program
    rewritten, place = DeviceProgram(), list[int]()
    for node in range(len(program.opcodes)):
        opcode, operands = program.opcodes[node], tuple([place[operand] for operand in program.operands[node]])
        if node in spread:
            opcode, operands = "multiply", (operands[0], _add_inverse(program, rewritten, spread[node], place))
        place.append(rewritten.add_like(program, node, operands, opcode))
    rewritten.marks.update({place[node]: mark for node, mark in program.marks.items()})
    rewritten.parameters = [place[node] for node in program.parameters]
    rewritten.root = place[program.root]
    return rewritten.without_dead()


def _find_divisions(program: DeviceProgram) -> dict[int, int]:
    """Quotient that becomes a product → the broadcast it divides by.

    Broadcasts separated later still count with the others of their operand.
    """
    users = program.users()
    divisions: dict[int, int] = {}
    rewritten: set[int] = set()
    for node in program.post_order():
        if program.opcodes[node] != "divide" or not _is_float(program, node):
            continue
        spread = program.operands[node][1]
        if program.opcodes[spread] != "broadcast" or not _reads_alone(program, users, spread):
            continue
        (source,) = program.operands[spread]
        is_apart = program.marks.get(spread) == OWN_BROADCAST
        if is_apart or not rewritten & {spread, source}:
            divisions[node] = spread
            rewritten.add(source if is_apart else spread)
    return divisions


def _is_float(program: DeviceProgram, node: int) -> bool:
    return program.instructions[node].shape.leaves[0].element_type in _FLOATS


def _reads_alone(program: DeviceProgram, users: list[list[int]], spread: int) -> bool:
    """Whether a broadcast is the only reader of its operand at the simplifier's visit to the quotient.

    By then it has merged consecutive reshapes, and removed one that adds dimensions of one element. If a broadcast
    along such dimensions is spelled in three instructions (`xla.broadcasts`), it has just recreated the middle one.
    """
    (source,) = program.operands[spread]
    path = [spread, source]
    if program.opcodes[source] == "reshape":
        (below,) = program.operands[source]
        if _is_identity(program, below):
            return True
        between = [below] if program.opcodes[below] == "reshape" else []
        base = program.operands[below][0] if between else below
        if _adds_ones(_dimensions(program, base), _dimensions(program, source)):
            path += [*between, base]
    if program.opcodes[path[-1]] == "constant":
        return False
    return all(_is_only_reader(program, users[node], reader) for reader, node in pairwise(path))


def _is_only_reader(program: DeviceProgram, users: list[int], reader: int) -> bool:
    return all(user == reader or program.marks.get(user) == OWN_BROADCAST for user in users)


def _is_identity(program: DeviceProgram, node: int) -> bool:
    """Whether a node is a broadcast that repeats nothing."""
    return (
        program.opcodes[node] == "broadcast" and program.elements[node] == program.elements[program.operands[node][0]]
    )


def _dimensions(program: DeviceProgram, node: int) -> tuple[int, ...]:
    return program.instructions[node].shape.leaves[0].dimensions


def _adds_ones(before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """Whether a reshape from one shape to another only adds dimensions of one element."""
    rest = iter(after)
    return all(next((other for other in rest if other == size or other != 1), None) == size for size in before)


def _add_inverse(program: DeviceProgram, new_program: DeviceProgram, spread: int, place: list[int]) -> int:
    """Append the inverse of a broadcast's operand and its broadcast; returns the latter."""
    (source,) = program.operands[spread]
    operand, instruction = place[source], program.instructions[source]
    # The dividend, all ones, takes no memory.
    inverse = new_program.add(
        "divide", instruction, (operand, operand), program.sizes_bytes[source], program.elements[source]
    )
    new_program.marks[inverse] = ("inverse",)
    sizes, elements = program.sizes_bytes[spread], program.elements[spread]
    inverse_broadcast = new_program.add("broadcast", program.instructions[spread], (inverse,), sizes, elements)
    new_program.marks[inverse_broadcast] = ("of an inverse",)
    return inverse_broadcast
