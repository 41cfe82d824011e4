"""Scatters into zeros, with fewer arrays stored by XLA, and scatters XLA makes itself.

Sums with a scatter into zeros: XLA's AlgebraicSimplifier scatters into the other term instead. Example: the gradient of
an embedding that is also the last layer's weight. This saves one table of zeros, and the product in the other term can
run directly after its operands.

Scatters of one element per row: XLA:TPU compares indices elementwise instead, and stores nothing. Example: the gradient
of a lookup along an axis, in the cross entropy of labels.
"""

from __future__ import annotations

from math import prod

from shardwright.cost.peak.device_program import DeviceProgram
from shardwright.hlo import Instruction

#: Bytes of an element's index along one dimension.
_INDEX_BYTES = 4


def scatter_into_terms(program: DeviceProgram) -> None:
    """Rewrite `add(x, scatter(zeros, …))` to `scatter(x, …)` if the scatter has no other reader.

    Changes the program in place; unread nodes stay in it, dead.
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


def writes_one_a_row(program: DeviceProgram, instruction: Instruction, operands: tuple[int, ...]) -> bool:
    """Whether a scatter adds one value, at one index, to each row of an array of zeros.

    operands: nodes of the program.
    """
    if not _adds_to_zeros(program, instruction, operands):
        return False
    into, _, updates = (operand.shape.leaves[0] for operand in instruction.operands)
    indexed = instruction.get("scatter_dims_to_operand_dims", ())
    rows = prod(size for dim, size in enumerate(into.dimensions) if dim not in indexed)
    return (
        len(indexed) == 1
        and indexed == instruction.get("inserted_window_dims", ())
        and prod(updates.dimensions) == rows
    )


def _fills_zeros(program: DeviceProgram, node: int) -> bool:
    """Whether a node sums values into an array of zeros."""
    instruction = program.instructions[node]
    return program.opcodes[node] == instruction.opcode and _adds_to_zeros(program, instruction, program.operands[node])


def _adds_to_zeros(program: DeviceProgram, instruction: Instruction, operands: tuple[int, ...]) -> bool:
    if instruction.opcode != "scatter" or len(instruction.shape.leaves) != 1:
        return False
    (applied,) = instruction.called["to_apply"]
    return applied.root.opcode == "add" and _is_zero(program, operands[0])


def _is_zero(program: DeviceProgram, node: int) -> bool:
    constant = program.constant_of(node)
    return constant is not None and program.instructions[constant].payload in ("0", "-0")


def select_by_indices(program: DeviceProgram, instruction: Instruction, operands: tuple[int, ...]) -> int:
    """Add the expansion of a select-and-scatter, on compilers without that instruction; returns the result's node.

    Windows reduce the indices of all elements, one array of them per dimension; the selected elements are scattered to.
    After SelectAndScatterExpander (xla/service/select_and_scatter_expander.cc).
    """
    operand, source, first = operands
    count, windows = program.elements[operand], program.elements[source]

    def add(opcode: str, operands: tuple[int, ...], sizes: tuple[int, ...], elements: int, *mark: object) -> int:
        node = program.add(opcode, instruction, operands, sizes, elements)
        program.marks[node] = (opcode, *mark)
        return node

    rank = instruction.shape.leaves[0].rank
    indices = [add("iota", (), (_INDEX_BYTES * count,), count, dim) for dim in range(rank)]
    places = _INDEX_BYTES * windows
    sizes = (*program.sizes_bytes[source], *[places] * rank)
    selected = add("reduce-window", (operand, *indices), sizes, (1 + rank) * windows)
    joined = add("concatenate", (selected,), (rank * places,), rank * windows)
    spread = add("broadcast", (first,), program.sizes_bytes[operand], count)
    return add("scatter", (spread, joined, source), program.sizes_bytes[operand], count)
