"""What XLA does with opcodes, as far as costs need it: fused, a view of its operand, or a kernel of its own."""

from __future__ import annotations

#: One result element from the operands' elements at the same place; XLA fuses chains of these.
ELEMENTWISE = frozenset({
    "abs", "acos", "acosh", "add", "and", "asin", "asinh", "atan2", "atanh", "cbrt", "ceil", "clamp", "compare",
    "complex", "convert", "cos", "cosh", "count-leading-zeros", "divide", "erf", "exp2", "exponential",
    "exponential-minus-one", "floor", "imag", "is-finite", "log", "log-plus-one", "log2", "logistic", "maximum",
    "minimum", "multiply", "negate", "not", "or", "popcnt", "power", "real", "reduce-precision", "remainder",
    "round-nearest-afz", "round-nearest-even", "rsqrt", "select", "shift-left", "shift-right-arithmetic",
    "shift-right-logical", "sign", "sine", "sinh", "sqrt", "stochastic-convert", "subtract", "tan", "tanh", "xor",
    "map",
})  # fmt: skip

#: Re-indexing that XLA computes inside the kernel that reads it.
FUSED_INDEXING = frozenset(
    {"broadcast", "iota", "reverse", "slice", "pad", "transpose", "concatenate", "reduce-precision"}
)

#: The result is (part of) the operands' own memory.
VIEWS = frozenset({
    "tuple", "get-tuple-element", "bitcast", "reshape", "opt-barrier", "optimization-barrier", "add-dependency",
    "after-all", "domain", "copy-done", "get-dimension-size", "set-dimension-size",
})  # fmt: skip

#: Custom calls that only mark a value (annotations and constraints): identities.
MARKER_TARGETS = frozenset({"Sharding", "shardwright.annotate", "SPMDFullToShardShape", "SPMDShardToFullShape"})
