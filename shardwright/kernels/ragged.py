"""JAX's kernel for rows in groups, as a call in the text: it multiplies each row with its own group's matrix, no other.

    custom-call(x[b,m,k], w[g,k,n], sizes[b,g]), custom_call_target="shardwright.ragged_product"     -> y[b,m,n]
    custom-call(x[b,m,k], y[b,m,n], sizes[b,g]), …, backend_config="weights"                         -> dw[g,k,n]

Rows lie in order of their groups, in b blocks one behind the other, so that a device's blocks are such rows again;
sizes are those of the groups' parts in each block. With `rows, transposed` matrices are w[g,n,k]. A block's rows behind
the last group are 0.
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

#: How notes name it.
RAGGED_NAME = "jax.lax.ragged_dot"

#: Element types that the kernel multiplies.
RAGGED_TYPES = frozenset({"bf16", "f16"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedCall:
    """Which product a call is. weights: the gradient of the matrices. transposed: matrices lie [g, n, k]."""

    weights: bool = False
    transposed: bool = False

    @property
    def config(self) -> str:
        """The call's configuration; `read_ragged` reads it."""
        return "weights" if self.weights else "rows, transposed" if self.transposed else "rows"

    @property
    def blocks(self) -> dict[str, int]:
        """Elements of the kernel's blocks by the dimensions of the rule that are to be whole numbers of them."""
        return {"k": SIDE if self.weights else DEPTH, "n": SIDE}

    def rule_text(self, rows: tuple[int, int], groups: int, matrix: tuple[int, int]) -> str:
        """Shardy's rule. rows: blocks, and rows of each. matrix: k and n."""
        sizes = dict(zip("bmgkn", (*rows, groups, *matrix), strict=True))
        matrices = "[g, n, k]" if self.transposed else "[g, k, n]"
        operands, result, summed = (
            ("[b, m, k], [b, m, n]", "[g, k, n]", "b") if self.weights else (f"[b, m, k], {matrices}", "[b, m, n]", "k")
        )
        said = ", ".join(f"{name}={size}" for name, size in sizes.items())
        return (
            f"#sdy.op_sharding_rule<({operands}, [b, g])->({result}) {{{said}}} "
            f"reduction={{{summed}}} need_replication={{m, g}}>"
        )

    def rows(self, operand_shapes: Sequence[tuple[int, ...]]) -> int:
        """Rows that the kernel multiplies at most: those of blocks that two groups share count twice.

        operand_shapes: of a part, in blocks or not.
        """
        return prod(operand_shapes[0][:-1]) + (operand_shapes[2][-1] - 1) * SIDE

    def flops(self, operand_shapes: Sequence[tuple[int, ...]], result: tuple[int, ...]) -> float:
        """Operations, two a multiply-add, of a part."""
        return 2.0 * self.rows(operand_shapes) * operand_shapes[0][-1] * result[-1]


_CALLS = {call.config: call for call in (RaggedCall(), RaggedCall(transposed=True), RaggedCall(weights=True))}


def read_ragged(instruction: Instruction) -> RaggedCall | None:
    """The product that a call is; None of any other instruction."""
    if instruction.opcode != "custom-call" or instruction.get("custom_call_target") != RAGGED_TARGET:
        return None
    return _CALLS.get(instruction.get("backend_config") or "")
