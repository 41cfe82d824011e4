"""Consumer of a copy: the copy has the layout of its use, not of its value.

Operands of products are transposed to the dimension order of their kernels (`dot_decomposer`), whatever the value's
sharding; operands of other instructions are resharded on use.
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
from shardwright.plans.shardings import Mesh, TensorSharding

#: Opcodes that end a reshard.
_MOVES = frozenset({"all-gather", "all-to-all", "collective-permute", "dynamic-slice", "reduce-scatter"})


class CopyReader(NamedTuple):
    """The consumer of a copy: its name, and the number of the operand; of several that share the copy, the first.

    is_transposed: whether the copy is needed under every sharding of the value.
    """

    name: str
    operand: int
    is_transposed: bool


def reader_of(program: DeviceProgram, users: Sequence[Sequence[int]], node: int) -> CopyReader | None:
    """The consumer of a copy; None if the node is no copy, or one shared by a chain of several instructions.

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
    """A node in the role of its reader's operand; None if a compiler replaced that operand."""
    instruction = program.instructions[user]
    if program.opcodes[user] != instruction.opcode or len(program.operands[user]) != len(instruction.operands):
        return None
    if is_turned and instruction.opcode not in PRODUCTS:
        return None
    return CopyReader(instruction.name, program.operands[user].index(node), is_turned)


def operand_copy_bytes(product: Instruction, operand: int, used: Sequence[TensorSharding], mesh: Mesh) -> int:
    """Bytes on one device of an operand's transposed copy; 0 if the kernel reads it in place.

    used: the product's sharding of each operand.
    """
    shapes = [factor.shape.leaves[0] for factor in product.operands]
    lengths = [sharding.shard_shape(shape.dimensions, mesh) for shape, sharding in zip(shapes, used, strict=True)]
    if product.opcode == "dot" and list(operand_orders(product, lengths))[operand][0] != "transpose":
        return 0
    return (prod(lengths[operand]) * ELEMENT_BITS[shapes[operand].element_type] + 7) // 8
