"""Instructions on independent rows of dimension 0: computable for some rows only."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.hlo import ArrayShape, Instruction
from shardwright.planner.rules import rule_of
from shardwright.planner.rules.elementwise import BINARY, NARY, UNARY

#: Instructions without an attribute that counts rows.
_ROW_WISE = frozenset({*UNARY, *BINARY, *NARY, "broadcast", "reshape", "transpose", "reduce", "dot"})

#: Reductions with partial results joined by the instruction of the same name.
_JOINED = frozenset({"add", "multiply", "maximum", "minimum", "and", "or"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RowWise:
    """operands: those with the rows in dimension 0.
    reduction: the operation that joins results of some rows, for a sum over rows; None: the result has the rows in its
        dimension 0.
    """

    operands: tuple[int, ...]
    reduction: str | None = None


def row_wise(instruction: Instruction) -> RowWise | None:
    """The row structure of an instruction; None: dependent rows, or no rows."""
    if instruction.opcode not in _ROW_WISE or not isinstance(instruction.shape, ArrayShape):
        return None
    shapes = [operand.shape for operand in instruction.operands]
    if not all(isinstance(shape, ArrayShape) for shape in shapes):
        return None
    for factor in rule_of(instruction).factors:
        touched = [k for k, dim in enumerate(factor.operands) if dim is not None]
        sizes = {shapes[k].leaves[0].dimensions[0] for k in touched}
        if any(factor.operands[k] != 0 for k in touched) or sizes - {factor.size}:
            continue
        if factor.reduction is None and factor.results == (0,) and instruction.shape.dimensions[0] == factor.size:
            return RowWise(operands=tuple(touched))
        if factor.reduction in _JOINED and factor.results == (None,) and touched and instruction.opcode == "reduce":
            return RowWise(operands=tuple(touched), reduction=factor.reduction)
    return None
