"""Sums that begin with a scatter into zeros: XLA's AlgebraicSimplifier scatters into the other term instead.

The gradient of an embedding that is also the last layer's weight is such a sum. Without the zeros one table less is
stored, and the product that the other term is can run as soon as its operands are there.
"""

from __future__ import annotations

from shardwright.cost.program import Program


def scatter_into_terms(program: Program) -> None:
    """Rewrite `add(x, scatter(zeros, …))` as `scatter(x, …)` where nobody else reads the scatter.

    Changes the program; what it no longer reads stays in it, dead.
    """
    users = program.users()
    for node, opcode in enumerate(program.opcodes):
        if opcode != "add" or len(set(program.operands[node])) != 2:
            continue
        for scatter, other in (program.operands[node], program.operands[node][::-1]):
            if _fills_zeros(program, scatter) and users[scatter] == [node]:
                program.opcodes[node] = "scatter"
                program.operands[node] = (other, *program.operands[scatter][1:])
                break


def _fills_zeros(program: Program, node: int) -> bool:
    """Whether a node adds values up in an array of zeros."""
    instruction = program.instructions[node]
    if program.opcodes[node] != "scatter" or instruction.opcode != "scatter" or len(program.sizes_bytes[node]) != 1:
        return False
    (applied,) = instruction.called["to_apply"]
    return applied.root.opcode == "add" and _is_zero(program, program.operands[node][0])


def _is_zero(program: Program, node: int) -> bool:
    while program.opcodes[node] in ("broadcast", "convert"):
        (node,) = program.operands[node]
    return program.opcodes[node] == "constant" and program.instructions[node].payload in ("0", "-0")
