"""Ragged products as calls of JAX's kernel (`shardwright.kernels.ragged`).

Rows go into blocks, one behind the other, and each block gets the sizes of the groups' parts in it: a device's blocks
are rows in groups again, and whatever splits the rows moves nothing. A product is the same of its own blocks, and a
gradient of matrices a sum over devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from shardwright.hlo import Computation, Instruction
from shardwright.kernels import NAME_ATTRIBUTE, PRICE_ATTRIBUTE, RULE_ATTRIBUTE, Price
from shardwright.kernels.prices import BY_KERNEL
from shardwright.kernels.ragged import RAGGED_NAME, RAGGED_TARGET, RAGGED_TYPES, SIDE, RaggedCall
from shardwright.planner.rewrites import edit
from shardwright.planner.rewrites.group_integers import GroupIntegers
from shardwright.planner.rewrites.instruction_writer import InstructionWriter
from shardwright.planner.tuning import LEAST_BLOCK_ROWS, MOST_KERNEL_GROUPS


def kernel_call(product: Instruction) -> RaggedCall | None:
    """The kernel's call that computes a product of matrices; None where its sizes, types or layouts are not the
    kernel's."""
    lhs, rhs, sizes = (operand.shape.leaves[0] for operand in product.operands)
    result = product.shape.leaves[0]
    (ragged,), (contracted,) = product.get("lhs_ragged_dims"), product.get("lhs_contracting_dims")
    (other,) = product.get("rhs_contracting_dims")
    weights = ragged == contracted
    call = RaggedCall(weights=weights, transposed=not weights and other == 2)
    one_type = {lhs.element_type, rhs.element_type, result.element_type}
    if ragged != 0 or (weights and other != 0) or len(one_type) > 1 or not one_type <= RAGGED_TYPES:
        return None
    widths = {"k": lhs.dimensions[1], "n": result.dimensions[-1]}
    fits = all(widths[name] % block == 0 for name, block in call.blocks.items())
    has_blocks = block_rows(lhs.dimensions[0]) >= LEAST_BLOCK_ROWS
    return call if fits and has_blocks and sizes.dimensions[0] <= MOST_KERNEL_GROUPS else None


def block_rows(rows: int) -> int:
    """Rows of a block: the largest power of two that divides them, and no more than one of the kernel's."""
    return min(SIDE, rows & -rows)


def write_kernel(
    product: Instruction, call: RaggedCall, names: edit.Names, regions: dict[str, Computation]
) -> list[Instruction]:
    """The instructions ahead of a product, which becomes the last of them. regions: see `GroupIntegers`."""
    return _Kernel(product, call, names, regions).write()


class _Kernel(GroupIntegers):
    """Writes one product."""

    def __init__(
        self, product: Instruction, call: RaggedCall, names: edit.Names, regions: dict[str, Computation]
    ) -> None:
        super().__init__(InstructionWriter(product, names), regions)
        self._product, self._call = product, call
        rows = product.operands[0].shape.leaves[0].dimensions[0]
        self._block = block_rows(rows)
        self._blocks = rows // self._block

    def write(self) -> list[Instruction]:
        product, call = self._product, self._call
        lhs, rhs, sizes = product.operands
        parts = self._sizes_in_blocks(self.to_integers(sizes))
        operands = self._in_blocks(lhs), self._in_blocks(rhs) if call.weights else rhs, parts
        result = product.shape.leaves[0]
        attributes = call_attributes(call, operands, result.dimensions[-1])
        if call.weights:
            product.opcode, product.operands = "custom-call", operands
            kept = {name: each for name, each in product.attributes.items() if name == "metadata"}
            product.attributes = kept | {name: edit.attribute(name, text) for name, text in attributes.items()}
        else:
            dims = (self._blocks, self._block, result.dimensions[-1])
            blocks = self.writer.array("custom-call", result.element_type, dims, *operands, **attributes)
            product.opcode, product.operands = "reshape", (blocks,)
            product.attributes = {name: each for name, each in product.attributes.items() if name == "metadata"}
        return self.writer.written

    def _in_blocks(self, rows: Instruction) -> Instruction:
        leaf = rows.shape.leaves[0]
        return self.writer.array("reshape", leaf.element_type, (self._blocks, self._block, leaf.dimensions[1]), rows)

    def _sizes_in_blocks(self, sizes: Instruction) -> Instruction:
        """[blocks, groups]: how many rows of each group a block has."""
        ends = self.sum_up_to(sizes)
        dims = (self._blocks, sizes.shape.leaves[0].dimensions[0])
        first, behind = (self.writer.spread(each, dims, [1]) for each in (self.binary("subtract", ends, sizes), ends))
        number = self.iota(dims, 0)
        start = self.binary("multiply", number, self.filled(self._block, number))
        overlap = self.binary(
            "subtract",
            self.binary("minimum", behind, self.plus(start, self._block)),
            self.binary("maximum", first, start),
        )
        return self.binary("maximum", overlap, self.filled(0, overlap))


def call_attributes(call: RaggedCall, operands: Sequence[Instruction], columns: int) -> dict[str, str]:
    """The attributes, as texts, of a call of these operands. columns: of its result."""
    shapes = [operand.shape.leaves[0].dimensions for operand in operands]
    rows, width = shapes[0][:-1], shapes[0][-1]
    matrix = (width, shapes[1][-1] if call.weights else columns)
    rule = call.rule_text(rows, shapes[2][-1], matrix)
    price = Price(flops=2.0 * prod(rows) * matrix[0] * matrix[1], source=BY_KERNEL)
    said = {RULE_ATTRIBUTE: rule, NAME_ATTRIBUTE: RAGGED_NAME, PRICE_ATTRIBUTE: price.to_text()}
    return {
        "custom_call_target": f'"{RAGGED_TARGET}"',
        "api_version": "API_VERSION_STATUS_RETURNING",
        "frontend_attributes": "{" + ",".join(f'{name}="{text}"' for name, text in said.items()) + "}",
        "backend_config": f'"{call.config}"',
    }
