"""Which instruction a copy of a value was made for: the copy lies as that one uses the value, not as it was made.

Products have their operands turned into the order of dimensions that their kernels take (`dots`), however the values
lie; what any instruction uses in another layout than the value has for others is brought there for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from shardwright.cost.opcodes import PRODUCTS
from shardwright.cost.peak.device_program import DeviceProgram
from shardwright.cost.peak.dot_decomposer import operand_orders
from shardwright.hlo import Instruction
from shardwright.hlo.shapes import ELEMENT_BITS
from shardwright.shardings import Mesh, TensorSharding

#: What moves a value to another layout, last of all.
_MOVES = frozenset({"all-gather", "all-to-all", "collective-permute", "dynamic-slice", "reduce-scatter"})


class CopyReader(NamedTuple):
    """The instruction that a copy is made for, by name, and which of its operands it is: of several that share it the
    first.

    is_turned: whether the copy is there however the value lies.
    """

    name: str
    operand: int
    is_transposed: bool


def reader_of(program: DeviceProgram, users: Sequence[Sequence[int]], node: int) -> CopyReader | None:
    """The instruction that a node is a copy for; None if it is none, or one that several instructions share in turn.

    users: the nodes that read each node.
    """
    opcode, instruction = program.opcodes[node], program.instructions[node]
    is_turned = opcode == "transpose" and node in program.marks
    if not is_turned and (opcode not in _MOVES or opcode == instruction.opcode):
        return None
    while users[node]:
        user = users[node][0]
        if program.instructions[user] is not instruction:
            return _operand_as_read(program, user, node, is_turned=is_turned)
        if program.opcodes[user] in _MOVES:
            return None
        node = user
    return None


def _operand_as_read(program: DeviceProgram, user: int, node: int, *, is_turned: bool) -> CopyReader | None:
    """A node as an operand of the instruction that reads it, unless a compiler made another one of that."""
    instruction = program.instructions[user]
    if program.opcodes[user] != instruction.opcode or len(program.operands[user]) != len(instruction.operands):
        return None
    if is_turned and instruction.opcode not in PRODUCTS:
        return None
    return CopyReader(instruction.name, program.operands[user].index(node), is_turned)


def operand_copy_bytes(product: Instruction, operand: int, used: Sequence[TensorSharding], mesh: Mesh) -> int:
    """Bytes on one device of an operand's turned copy; 0 where the kernel takes it as it lies.

    used: how the product uses each of its operands.
    """
    shapes = [each.shape.leaves[0] for each in product.operands]
    lengths = [lies.shard_shape(shape.dimensions, mesh) for shape, lies in zip(shapes, used, strict=True)]
    if product.opcode == "dot" and list(operand_orders(product, lengths))[operand][0] != "transpose":
        return 0
    return (prod(lengths[operand]) * ELEMENT_BITS[shapes[operand].element_type] + 7) // 8
