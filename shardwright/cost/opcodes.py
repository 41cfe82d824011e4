"""What XLA does with opcodes, as far as costs need it: fused, a view of its operand, or a kernel of its own."""

from __future__ import annotations

#: Elementwise, and too costly to compute twice (XLA's InstructionFusion::IsExpensive).
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

#: Those of them whose results must lie where their first operands did: where others still read those, XLA copies them.
COPYING = frozenset({"dynamic-update-slice", "scatter", "while"})

#: Kernels of libraries, or of matrix units.
PRODUCTS = frozenset({"dot", "convolution"})

#: The operand's elements in the same order: a view where the operand is stored, else part of the kernel that makes it.
IDENTITIES = frozenset({"bitcast", "reshape", "domain", "copy-done", "set-dimension-size"})

#: Part of the first operand.
SLICES = frozenset({"dynamic-slice", "slice"})

#: The result is (part of) the operands' own memory.
TUPLE_VIEWS = frozenset({
    "tuple", "get-tuple-element", "opt-barrier", "optimization-barrier", "add-dependency", "after-all",
})  # fmt: skip

#: What takes and gives any element type on any device: XLA's FloatNormalizationVisitor leaves them out, or its
#: simplifier takes its conversions off again where elements only come to lie in another order.
ANY_TYPE = IDENTITIES | TUPLE_VIEWS | {
    "bitcast-convert", "broadcast", "call", "conditional", "constant", "convert", "copy", "custom-call", "parameter",
    "transpose", "while",
}  # fmt: skip

#: Custom calls that only mark a value (annotations and constraints): identities.
MARKER_TARGETS = frozenset({
    "Sharding", "shardwright.annotate", "xla.sdy.FuncResultSharding", "SPMDFullToShardShape", "SPMDShardToFullShape",
})  # fmt: skip

#: What a kernel can compute from element to element, so that it can take in what it reads.
LOOPS = ELEMENTWISE | INDEXING | IDENTITIES | {"dynamic-slice", "dynamic-update-slice", "gather"}

#: What no two kernels compute, each for itself.
EXPENSIVE = EXPENSIVE_ELEMENTWISE | {"gather", "reduce", "map", "pad"}
