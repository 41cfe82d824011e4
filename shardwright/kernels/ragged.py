"""JAX's kernel for rows in groups, as a call in the text: it multiplies each row with its own group's matrix, no other.

    custom-call(x[b,m,k], w[g,k,n], sizes[b,g]), custom_call_target="shardwright.ragged_product"     -> y[b,m,n]
    custom-call(x[b,m,k], y[b,m,n], sizes[b,g]), …, backend_config="weights"                         -> dw[g,k,n]

Rows lie in order of their groups, in b blocks one behind the other, so that a device's blocks are such rows again;
sizes are those of the groups' parts in each block. With `rows, transposed` matrices are w[g,n,k]. A block's rows behind
the last group are 0.

Of rows that are sent to their experts, each of e blocks has groups and matrices of its own, and each of r replicas of
them rows in order (`…, of blocks`). All that a device has are multiplied at once, with a copy of the matrices for each
replica; gradients are summed over replicas. Of a block's rows behind its last group, one operand of a gradient has to
be 0, and the other a number.

    custom-call(x[r,e,m,k], w[e,g,k,n], sizes[r,e,g]), …, backend_config="rows, of blocks"       -> y[r,e,m,n]
    custom-call(x[r,e,m,k], y[r,e,m,n], sizes[r,e,g]), …, backend_config="weights, of blocks"    -> dw[e,g,k,n]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from shardwright.hlo import Instruction

#: The target of such calls.
RAGGED_TARGET = "shardwright.ragged_product"

#: Elements of the kernel's blocks, as measured (docs/hardware.md): of a result's sides, and of what is summed at once.
SIDE, DEPTH = 128, 64

#: What configurations of calls end in whose blocks have groups of their own.
OF_BLOCKS = ", of blocks"

#: How notes name it.
RAGGED_NAME = "jax.lax.ragged_dot"

#: Element types that the kernel multiplies.
RAGGED_TYPES = frozenset({"bf16", "f16"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedCall:
    """Which product a call is. weights: the gradient of the matrices. transposed: matrices lie [g, n, k]. of_blocks:
    each block has groups of its own."""

    weights: bool = False
    transposed: bool = False
    of_blocks: bool = False

    @property
    def config(self) -> str:
        """The call's configuration; `read_ragged` reads it."""
        product = "weights" if self.weights else "rows, transposed" if self.transposed else "rows"
        return product + (OF_BLOCKS if self.of_blocks else "")

    @property
    def blocks(self) -> dict[str, int]:
        """Elements of the kernel's blocks by the dimensions of the rule that are to be whole numbers of them."""
        return {"k": SIDE if self.weights else DEPTH, "n": SIDE}

    def rule_text(self, rows: tuple[int, ...], groups: int, matrix: tuple[int, int]) -> str:
        """Shardy's rule. rows: b and m, or r, e and m. matrix: k and n."""
        blocks, own = ("re", "e") if self.of_blocks else ("b", "")
        sizes = dict(zip(f"{blocks}mgkn", (*rows, groups, *matrix), strict=True))
        left, result, matrices = f"{blocks}mk", f"{blocks}mn", f"{own}gnk" if self.transposed else f"{own}gkn"
        operands, result = ((left, result), matrices) if self.weights else ((left, matrices), result)
        dims = ", ".join(_dims(each) for each in (*operands, f"{blocks}g"))
        said = ", ".join(f"{name}={size}" for name, size in sizes.items())
        summed = blocks[0] if self.weights else "k"
        return (
            f"#sdy.op_sharding_rule<({dims})->({_dims(result)}) {{{said}}} "
            f"reduction={{{summed}}} need_replication={{m, g}}>"
        )

    def rows(self, operand_shapes: Sequence[tuple[int, ...]]) -> int:
        """Rows that the kernel multiplies at most: those of its blocks that two groups share count twice.

        operand_shapes: of a part, in blocks or not.
        """
        rows, _, sizes = operand_shapes
        groups = prod(sizes) if self.of_blocks else sizes[-1]
        return prod(rows[:-1]) + (groups - 1) * SIDE

    def copied_elements(self, operand_shapes: Sequence[tuple[int, ...]], result: tuple[int, ...]) -> int:
        """Elements of the copies of matrices, or of gradients before they are summed, of a part; 0: it makes none."""
        sizes = operand_shapes[2]
        if not self.of_blocks or sizes[0] == 1:
            return 0
        return prod(sizes) * operand_shapes[0][-1] * result[-1]

    def flops(self, operand_shapes: Sequence[tuple[int, ...]], result: tuple[int, ...]) -> float:
        """Operations, two a multiply-add, of a part."""
        return 2.0 * self.rows(operand_shapes) * operand_shapes[0][-1] * result[-1]


_CALLS = {
    call.config: call
    for of_blocks in (False, True)
    for call in (
        RaggedCall(of_blocks=of_blocks),
        RaggedCall(transposed=True, of_blocks=of_blocks),
        RaggedCall(weights=True, of_blocks=of_blocks),
    )
}


def read_ragged(instruction: Instruction) -> RaggedCall | None:
    """The product that a call is; None of any other instruction."""
    if instruction.opcode != "custom-call" or instruction.get("custom_call_target") != RAGGED_TARGET:
        return None
    return _CALLS.get(instruction.get("backend_config") or "")


def _dims(names: str) -> str:
    return f"[{', '.join(names)}]"
