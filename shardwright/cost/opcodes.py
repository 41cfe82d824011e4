"""XLA's treatment of opcodes in cost formulas: fused, a view of the operand, or a separate kernel."""

from __future__ import annotations

from shardwright.reserved_names import ENTER_REGION, LEAVE_REGION

#: Elementwise, too costly to recompute (XLA's InstructionFusion::IsExpensive).
EXPENSIVE_ELEMENTWISE = frozenset({
    "acos", "acosh", "asin", "asinh", "atan2", "atanh", "cbrt", "cosh", "cosine", "divide", "erf", "exp2",
    "exponential", "exponential-minus-one", "log", "log-plus-one", "log2", "logistic", "power", "remainder",
    "rsqrt", "sine", "sinh",
    "sqrt", "tan", "tanh",
})  # fmt: skip

#: One result element from the operands' elements at the same place; XLA fuses chains of these.
ELEMENTWISE = EXPENSIVE_ELEMENTWISE | {
    "abs", "add", "and", "ceil", "clamp", "compare", "complex", "convert", "count-leading-zeros", "floor", "imag",
    "is-finite", "maximum", "minimum", "multiply", "negate", "not", "or", "popcnt", "real", "reduce-precision",
    "round-nearest-afz", "round-nearest-even", "select", "shift-left", "shift-right-arithmetic",
    "shift-right-logical", "sign", "stochastic-convert", "subtract", "xor", "map",
}  # fmt: skip

#: Re-indexing that XLA computes inside the kernel that reads it.
INDEXING = frozenset({"broadcast", "iota", "reverse", "slice", "pad", "transpose", "concatenate", "copy"})

#: Kernels that write over their operands although they are not elementwise; XLA's in-place instructions.
IN_PLACE = frozenset({"dynamic-update-slice", "scatter", "while", "conditional", "sort", "custom-call"})

#: Those that must overwrite their first operand: XLA copies it if it has other readers.
COPYING = frozenset({"dynamic-update-slice", "scatter", "while"})

#: Kernels of libraries, or of matrix units.
PRODUCTS = frozenset({"dot", "convolution"})

#: The operand's elements in the same order: a view of a stored operand, else part of its producer's kernel.
IDENTITIES = frozenset({"bitcast", "reshape", "domain", "copy-done", "set-dimension-size"})

#: Part of the first operand.
SLICES = frozenset({"dynamic-slice", "slice"})

#: The result is (part of) the operands' own memory.
TUPLE_VIEWS = frozenset({
    "tuple", "get-tuple-element", "opt-barrier", "optimization-barrier", "add-dependency", "after-all",
})  # fmt: skip

#: Opcodes on any element type on any device: XLA's FloatNormalizationVisitor skips them, or its simplifier removes
#: the conversions of mere reorders.
ANY_TYPE = IDENTITIES | TUPLE_VIEWS | {
    "bitcast-convert", "broadcast", "call", "conditional", "constant", "convert", "copy", "custom-call", "parameter",
    "transpose", "while",
}  # fmt: skip

#: Custom calls that only mark a value (annotations, constraints, borders of manual regions): identities.
MARKER_TARGETS = frozenset({
    "Sharding", "shardwright.annotate", "xla.sdy.FuncResultSharding", "SPMDFullToShardShape", "SPMDShardToFullShape",
    ENTER_REGION, LEAVE_REGION,
})  # fmt: skip

#: Opcodes computed element by element in a kernel that can fuse its operands.
LOOPS = ELEMENTWISE | INDEXING | IDENTITIES | {"dynamic-slice", "dynamic-update-slice", "gather"}

#: Opcodes never computed twice in different kernels.
EXPENSIVE = EXPENSIVE_ELEMENTWISE | {"gather", "reduce", "map", "pad"}
