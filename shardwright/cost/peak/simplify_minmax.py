"""Maximum of a reduction and its initial value: XLA's AlgebraicSimplifier takes the reduction itself.

Frameworks write such a maximum in the softmax, to subtract it. The rest is one chain from the reduction on.
"""

from __future__ import annotations

from shardwright.cost.peak.device_program import DeviceProgram


def simplify_limits(program: DeviceProgram) -> None:
    """Let the readers of `maximum(reduce(x, c), c)`, and of such minima, read the reduction.

    Changes the program in place; unread nodes stay in it, dead.
    """
    instead = list(range(len(program.opcodes)))
    for node, opcode in enumerate(program.opcodes):
        operands = tuple([instead[operand] for operand in program.operands[node]])
        program.operands[node] = operands
        if opcode not in ("maximum", "minimum"):
            continue
        for reduction, limit in (operands, operands[::-1]):
            if _is_reduction_from(program, reduction, opcode, limit):
                instead[node] = reduction
                break
    program.root = instead[program.root]


def _is_reduction_from(program: DeviceProgram, reduction: int, opcode: str, limit: int) -> bool:
    """Whether a node is a reduction by `opcode` of one array, with the constant in `limit` its initial value."""
    instruction = program.instructions[reduction]
    if program.opcodes[reduction] != "reduce" or len(program.operands[reduction]) != 2:
        return False
    (applied,) = instruction.called["to_apply"]
    first = _number(program, program.operands[reduction][1])
    return applied.root.opcode == opcode and first is not None and first == _number(program, limit)


def _number(program: DeviceProgram, node: int) -> object:
    """The constant in all elements of an array."""
    while program.opcodes[node] == "broadcast":
        (node,) = program.operands[node]
    return program.instructions[node].payload if program.opcodes[node] == "constant" else None
