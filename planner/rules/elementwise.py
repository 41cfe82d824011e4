"""Element by element: every dimension is a factor of all operands and of the result."""

from __future__ import annotations

from functools import lru_cache

from shardwright.hlo import Instruction
from shardwright.planner.rules.base import Factor, OpRule, operand_leaves, strategy_rule

UNARY = (
    "abs", "acos", "acosh", "asin", "asinh", "atanh", "cbrt", "ceil", "convert", "copy", "cosine", "cosh",
    "count-leading-zeros", "erf", "exp2", "exponential", "exponential-minus-one", "floor", "imag", "is-finite", "log",
    "log-plus-one", "log2", "logistic", "negate", "not", "popcnt", "real", "reduce-precision", "round-nearest-afz",
    "round-nearest-even", "rsqrt", "sign", "sine", "sinh", "sqrt", "tan", "tanh",
)  # fmt: skip
BINARY = (
    "add", "and", "atan2", "compare", "complex", "divide", "maximum", "minimum", "mulhi", "multiply", "or", "power",
    "remainder", "shift-left", "shift-right-arithmetic", "shift-right-logical", "stochastic-convert", "subtract",
    "xor",
)  # fmt: skip
#: `select` may have a scalar predicate, `clamp` scalar bounds; `map` applies a scalar computation.
NARY = ("clamp", "map", "select")


@strategy_rule(*UNARY, *BINARY, *NARY)
def elementwise(instruction: Instruction) -> OpRule:
    """`i j, i j -> i j`; scalar operands are used whole."""
    result = instruction.shape.leaves[0].dimensions
    split = tuple(leaf.dimensions == result for leaf in operand_leaves(instruction))
    return _elementwise(result, split)


@lru_cache(maxsize=4096)
def _elementwise(dimensions: tuple[int, ...], split: tuple[bool, ...]) -> OpRule:
    """Rules are shared: most of a program is elementwise on few shapes."""
    return OpRule(
        factors=tuple(
            Factor(
                name=f"d{dim}",
                size=size,
                operands=tuple(dim if is_split else None for is_split in split),
                results=(dim,),
                may_pad=True,
            )
            for dim, size in enumerate(dimensions)
            if size > 1
        )
    )
