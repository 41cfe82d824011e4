"""Propagation of partial sums: the operands in which an instruction is linear.

A value *partial* over a mesh axis has one summand on every device along it. f may be applied to the summands instead of
their sum when `f(a + b) = f(a) + f(b)`. A `LinearWay` concerns ONE mesh axis: its operand leaves are partial over the
axis, every other operand leaf is whole over it (neither split nor partial: all devices must apply the same function),
and every leaf of the result is then partial over it.

A whole value may also be *used* like a partial one: XLA keeps it on the first device along the axis and puts zeros on
the others, without communication (`becomes_partial`). This adds a partial sum to a whole value, and starts a loop
accumulating partial sums.

Only sums stay partial: a maximum or a product is reduced at its producer. Left out on purpose:

- booleans: their `add` is an or, and no all-reduce of a sum fits them;
- narrowing converts (each summand would be rounded before the sum), and any between integers and others (an integer
  wraps where the sum of its summands does not);
- division of integers: it truncates each summand.

Linear means linear over finite numbers: overflowing summands, or a partial sum divided by zero, may give a NaN where
the sum would have given infinity.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from shardwright.hlo import Instruction
from shardwright.planner.rules.base import Factor, operand_leaves
from shardwright.planner.rules.reduction import reduction_of
from shardwright.planner.xla_version import xla_version
from shardwright.reserved_names import IDENTITY_TARGETS

#: From this version on XLA keeps partial sums of lookups and batch-grouped convolutions. jaxlib 0.11.1 is wrong.
XLA_KEEPS_SUMS = (0, 11, 2)


@dataclass(frozen=True, slots=True)
class LinearWay:
    """Operand leaves (indexed like `Factor.operands`) that are partial together; the rest are whole.

    No leaf at all: the result is zero, a partial sum of zero summands.
    """

    operands: frozenset[int]


def linear_ways(instruction: Instruction) -> tuple[LinearWay, ...]:
    """The ways to propagate a partial sum through `instruction`; () when it is linear in nothing.

    Forwarding instructions (tuples, loops, calls, conditionals) have none: their leaves resolve to the computing
    consumer.
    """
    if not all(_is_summable(leaf.element_type) for leaf in instruction.shape.leaves):
        return ()
    is_start = is_zero(instruction) and all(becomes_partial(leaf.element_type) for leaf in instruction.shape.leaves)
    zero: tuple[tuple[int, ...], ...] = ((),) if is_start else ()
    ways = _WAYS.get(instruction.opcode)
    return tuple(LinearWay(frozenset(way)) for way in (*zero, *(ways(instruction) if ways else ())))


def becomes_partial(element_type: str) -> bool:
    """Whether a value of this type, whole over an axis, may be used like a partial one.

    Not complex ones: XLA (jaxlib 0.11.2) ends its process on some of them.
    """
    return _is_summable(element_type) and not element_type.startswith("c")


def why_not_partial(instruction: Instruction, factors: Iterable[Factor] = ()) -> str | None:
    """Why nothing may stay partial when `instruction` has a contracted factor on some axis; None when it may.

    factors: the axes' factors; none: only reasons independent of them.

    XLA reduces such a sum by itself, whatever its result's sharding, and then mistakes the whole sum for a summand:
    lookups before `XLA_KEEPS_SUMS`, images split with borders in some layouts ever since (pinned by
    tests/planner/rules/test_linear.py and test_image_sums.py). The TPU compiler (libtpu 0.0.42.1) makes two results of
    a complex one and ends its process where only one of them is partial. Every contracted axis is reduced at the
    instruction then, and no other axis is partial in its result.
    """
    if any(leaf.element_type.startswith("c") for leaf in instruction.shape.leaves):
        return "the TPU compiler splits complex sums into two, and ends where they are partial"
    if instruction.opcode == "convolution" and any(factor.halo for factor in factors):
        return "XLA reduces what a convolution sums over an image that is split with borders at once"
    if xla_version() >= XLA_KEEPS_SUMS:
        return None
    if instruction.opcode == "gather":
        return "XLA reduces rows that each device looks up in its part of the table at once"
    return None


#: Possessive: the scan of a literal of millions of elements stops at the first nonzero one.
_ZEROS = re.compile(r"(?:[\s{},()+\-.0]++|(?<=[0-9.])[eE][+\-]?+[0-9]++)*+", re.ASCII)

#: Instructions whose elements are all elements of their one operand, unchanged or converted.
_COPYING = frozenset({"broadcast", "reshape", "bitcast", "transpose", "copy", "convert", "slice", "reverse"})


def is_zero(instruction: Instruction) -> bool:
    """Whether every element is zero, judging by a literal and copies of it."""
    while instruction.opcode in _COPYING and instruction.operands:
        instruction = instruction.operands[0]
    if instruction.opcode != "constant" or instruction.is_elided:
        return False
    return bool(_ZEROS.fullmatch(instruction.payload)) and "0" in instruction.payload


def _is_summable(element_type: str) -> bool:
    return element_type != "pred"


# ---- ways by opcode ----------------------------------------------------------

_Ways = Callable[[Instruction], Iterable[tuple[int, ...]]]


def _all_together(instruction: Instruction) -> Iterable[tuple[int, ...]]:
    """`f(a + b, c + d) = f(a, c) + f(b, d)`."""
    yield tuple(range(len(operand_leaves(instruction))))


def _one_of_two(_: Instruction) -> Iterable[tuple[int, ...]]:
    """A product of any kind: `f(a + b, c) = f(a, c) + f(b, c)`, likewise on the right."""
    yield (0,)
    yield (1,)


def _first(_: Instruction) -> Iterable[tuple[int, ...]]:
    """Linear in the first operand; the others position its elements."""
    yield (0,)


def _convert(instruction: Instruction) -> Iterable[tuple[int, ...]]:
    source, target = operand_leaves(instruction)[0].element_type, instruction.shape.leaves[0].element_type
    if _is_widening(source, target):
        yield (0,)


#: Explicit significand bits, and exponent bits, of the float types that a training step computes in.
SIGNIFICANT_BITS = {"bf16": (7, 8), "f16": (10, 5), "f32": (23, 8), "f64": (52, 11)}
_PARTS = {"c64": "f32", "c128": "f64"}


def _is_widening(source: str, target: str) -> bool:
    """Whether every number of `source` is one of `target`, both floats or complex."""
    if source == target:
        return True
    if source in _PARTS and target not in _PARTS:
        return False
    have, want = (SIGNIFICANT_BITS.get(_PARTS.get(kind, kind)) for kind in (source, target))
    return have is not None and want is not None and have[0] <= want[0] and have[1] <= want[1]


def _divide(instruction: Instruction) -> Iterable[tuple[int, ...]]:
    if instruction.shape.leaves[0].element_type[0] not in "su":
        yield (0,)


def _select(_: Instruction) -> Iterable[tuple[int, ...]]:
    """`p ? a : b`, the same element on every device because `p` is whole."""
    yield (1, 2)


def _pad(instruction: Instruction) -> Iterable[tuple[int, ...]]:
    """The padding is added on every device: it must be zero."""
    if is_zero(instruction.operands[1]):
        yield (0,)


def _sum(instruction: Instruction) -> Iterable[tuple[int, ...]]:
    """A reduce or reduce-window of one array by addition, from zero."""
    if len(instruction.operands) == 2 and _adds(instruction, "to_apply") and is_zero(instruction.operands[1]):
        yield (0,)


def _scatter(instruction: Instruction) -> Iterable[tuple[int, ...]]:
    """Updates added to one array: linear in both together."""
    if len(instruction.operands) == 3 and _adds(instruction, "to_apply"):
        yield (0, 2)


def _select_and_scatter(instruction: Instruction) -> Iterable[tuple[int, ...]]:
    """The gradient of a pooling: the operand selects, the source is added up from zero."""
    if _adds(instruction, "scatter") and is_zero(instruction.operands[2]):
        yield (1,)


def _adds(instruction: Instruction, region: str) -> bool:
    return reduction_of(instruction.called[region][0]) == "add"


def _custom_call(instruction: Instruction) -> Iterable[tuple[int, ...]]:
    """Annotations forward their operand."""
    if instruction.get("custom_call_target", "") in IDENTITY_TARGETS and len(instruction.operands) == 1:
        yield (0,)


_WAYS: dict[str, _Ways] = {
    **dict.fromkeys(("add", "subtract", "complex", "concatenate"), _all_together),
    **dict.fromkeys(("negate", "copy", "real", "imag"), _first),
    **dict.fromkeys(("broadcast", "reshape", "bitcast", "transpose", "slice", "reverse"), _first),
    **dict.fromkeys(("dynamic-slice", "gather"), _first),
    **dict.fromkeys(("multiply", "dot", "convolution"), _one_of_two),
    **dict.fromkeys(("reduce", "reduce-window"), _sum),
    "convert": _convert,
    "divide": _divide,
    "select": _select,
    "pad": _pad,
    "dynamic-update-slice": lambda _: [(0, 1)],
    "scatter": _scatter,
    "select-and-scatter": _select_and_scatter,
    "custom-call": _custom_call,
}
