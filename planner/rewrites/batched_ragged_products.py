"""Ragged products of groups of equal sizes as products of a batch of groups: nothing is computed besides."""

from __future__ import annotations

from shardwright.hlo import Instruction
from shardwright.planner.rewrites import edit
from shardwright.planner.rewrites.instruction_writer import InstructionWriter


def write_batch(product: Instruction, names: edit.Names) -> list[Instruction]:
    """The instructions ahead of a product of matrices (`can_tile`), which becomes the last of them."""
    writer = InstructionWriter(product, names)
    lhs, other, sizes = product.operands
    groups = sizes.shape.leaves[0].dimensions[0]
    (ragged,), (contracted,) = product.get("lhs_ragged_dims"), product.get("lhs_contracting_dims")
    (other_contracted,) = product.get("rhs_contracting_dims")
    result = product.shape.leaves[0]
    precision = product.attributes.get("operand_precision")
    said = {} if precision is None else {"operand_precision": precision.text}
    rows = _by_group(writer, lhs, ragged, groups)
    if ragged == contracted:
        right = _by_group(writer, other, other_contracted, groups)
        of_batch = other_contracted
        sides = ragged + 1, other_contracted + 1
    else:
        right, of_batch = other, 0
        sides = (contracted + 1 if contracted > ragged else contracted), other_contracted
    dims = result.dimensions
    if ragged != contracted:
        dims = groups, dims[0] // groups, *dims[1:]
    batch = writer.array(
        "dot", result.element_type, dims, rows, right,
        lhs_batch_dims=f"{{{ragged}}}", lhs_contracting_dims=f"{{{sides[0]}}}",
        rhs_batch_dims=f"{{{of_batch}}}", rhs_contracting_dims=f"{{{sides[1]}}}", **said,
    )  # fmt: skip
    product.opcode, product.operands = ("convert" if ragged == contracted else "reshape"), (batch,)
    product.attributes = {name: each for name, each in product.attributes.items() if name == "metadata"}
    return writer.written


def _by_group(writer: InstructionWriter, rows: Instruction, dim: int, groups: int) -> Instruction:
    """A matrix with a dimension of groups ahead of that of their rows."""
    leaf = rows.shape.leaves[0]
    dims = [*leaf.dimensions[:dim], groups, leaf.dimensions[dim] // groups, *leaf.dimensions[dim + 1 :]]
    return writer.array("reshape", leaf.element_type, tuple(dims), rows)
