"""Which operands XLA:TPU reads rounded to bfloat16, so that float32 may be stored, gathered and sent so.

After XLA's BFloat16Propagation (xla/service/bfloat16_propagation.cc), and `EffectiveOperandPrecisionIsOutputPrecision`
(xla/service/float_support.cc) for what passes elements on; read off programs compiled for v5e (libtpu 0.0.42.1).
"""

from __future__ import annotations

from math import prod

from shardwright.cost.opcodes import IDENTITIES, PRODUCTS
from shardwright.hlo import Instruction

#: Opcodes whose result elements are elements of their operands, and the operands concerned; None: all.
_PASSING: dict[str, tuple[int, ...] | None] = {
    **dict.fromkeys(IDENTITIES, (0,)),
    **dict.fromkeys(("abs", "broadcast", "copy", "reverse", "slice", "transpose", "dynamic-slice", "gather"), (0,)),
    **dict.fromkeys(("concatenate", "maximum", "minimum", "clamp"), None),
    "dynamic-update-slice": (0, 1), "pad": (0, 1), "select": (1, 2),
}  # fmt: skip

#: Reductions that choose one of the elements.
_CHOOSING = frozenset({"maximum", "minimum"})


def rounds_operand(instruction: Instruction, position: int) -> bool:
    """Whether an operand counts as its bfloat16: of a product at the default precision, or converted to that.

    A product with a vector is none to XLA:TPU, but a multiplication and a sum.
    """
    if instruction.opcode == "convert":
        return instruction.shape.leaves[0].element_type == "bf16"
    if instruction.opcode not in PRODUCTS or position > 1 or _has_vector(instruction):
        return False
    precisions = instruction.get("operand_precision", ())
    return not precisions or precisions[position] == "default"


def passes_rounded(instruction: Instruction, position: int) -> bool:
    """Whether only the readers of an instruction's result decide if an operand may be rounded."""
    if instruction.opcode in ("reduce", "reduce-window"):
        (region, *_) = instruction.called["to_apply"]
        return len(instruction.shape.leaves) == 1 and region.root.opcode in _CHOOSING
    if instruction.opcode not in _PASSING:
        return False
    operands = _PASSING[instruction.opcode]
    return operands is None or position in operands


def _has_vector(instruction: Instruction) -> bool:
    """Whether an operand of a product has summed and batch dimensions only."""
    if instruction.opcode != "dot":
        return False
    for side, operand in zip(("lhs", "rhs"), instruction.operands, strict=True):
        shape = operand.shape.leaves[0].dimensions
        taken = {*instruction.get(f"{side}_contracting_dims", ()), *(instruction.get(f"{side}_batch_dims") or ())}
        if prod(size for dim, size in enumerate(shape) if dim not in taken) == 1:
            return True
    return False
