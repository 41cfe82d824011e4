"""Invariants within one instruction, beyond its syntax, checked before further use.

XLA's own reader relies on the same (and ends its process on some of these): a text that passes here can be handed on.
It is no shape inference: equal shapes of an `add`'s operands are left to XLA's verifier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod

from shardwright.hlo.ir import Instruction
from shardwright.hlo.opcodes import ARITY, REQUIRED
from shardwright.hlo.shapes import ArrayShape, Shape, TupleShape


def find_problem(instruction: Instruction) -> str | None:
    """What is wrong with an instruction of a known opcode, or None."""
    opcode = instruction.opcode
    arity = ARITY.get(opcode)
    if arity is not None and len(instruction.operands) != arity:
        return (
            f"{opcode} takes {arity} operand{'s' * (arity != 1)}, {instruction.name!r} has {len(instruction.operands)}"
        )
    required = REQUIRED.get(opcode)
    if required is not None:
        for name in required:
            if name not in instruction.attributes:
                return f"{opcode} needs the attribute {name}="
    check = _CHECKS.get(opcode)
    return None if check is None else check(instruction)


def _rank(shape: Shape) -> int:
    return shape.rank if isinstance(shape, ArrayShape) else 0


def _within(numbers: Iterable[object], rank: int) -> bool:
    values = list(numbers)
    return all(type(number) is int and 0 <= number < rank for number in values) and len(set(values)) == len(values)


def _dimensions(instruction: Instruction, rank: int, count: int | None = None) -> str | None:
    dimensions = instruction.get("dimensions", ())
    if not _within(dimensions, rank) or (count is not None and len(dimensions) != count):
        exactly = "different" if count is None else str(count)
        return f"{instruction.opcode} needs {exactly} dimensions between 0 and {rank}, got dimensions={dimensions}"
    return None


def _get_tuple_element(instruction: Instruction) -> str | None:
    index = instruction.get("index")
    shape = instruction.operands[0].shape
    if not isinstance(shape, TupleShape) or not 0 <= index < len(shape.elements):
        return f"index={index} is not an element of {instruction.operands[0].name!r}"
    return None


def _tuple(instruction: Instruction) -> str | None:
    elements = len(instruction.shape.elements) if isinstance(instruction.shape, TupleShape) else -1
    if elements != len(instruction.operands):
        return f"a tuple of {len(instruction.operands)} operands does not have this shape"
    return None


def _broadcast(instruction: Instruction) -> str | None:
    source, result = _rank(instruction.operands[0].shape), _rank(instruction.shape)
    return _dimensions(instruction, result, source)


def _transpose(instruction: Instruction) -> str | None:
    rank = _rank(instruction.operands[0].shape)
    return _dimensions(instruction, rank, rank)


def _reverse(instruction: Instruction) -> str | None:
    return _dimensions(instruction, _rank(instruction.operands[0].shape))


def _one_dimension(instruction: Instruction) -> str | None:
    if not instruction.operands:
        return f"{instruction.opcode} takes at least one operand"
    shape = instruction.operands[0].shape
    return _dimensions(instruction, shape.rank if isinstance(shape, ArrayShape) else 1 << 16, 1)


def _pairs_of_operands(instruction: Instruction) -> str | None:
    if not instruction.operands or len(instruction.operands) % 2:
        return f"{instruction.opcode} takes operands and as many initial values, got {len(instruction.operands)}"
    return None


def _reduce(instruction: Instruction) -> str | None:
    return _pairs_of_operands(instruction) or _dimensions(instruction, _rank(instruction.operands[0].shape))


def _scatter(instruction: Instruction) -> str | None:
    if len(instruction.operands) < 3 or len(instruction.operands) % 2 == 0:
        return f"scatter takes operands, indices and as many updates, got {len(instruction.operands)}"
    return None


def _at_least_one(instruction: Instruction) -> str | None:
    return None if instruction.operands else f"{instruction.opcode} takes at least one operand"


def _elements(instruction: Instruction) -> str | None:
    before, after = instruction.operands[0].shape, instruction.shape
    if not isinstance(before, ArrayShape) or not isinstance(after, ArrayShape):
        return f"{instruction.opcode} takes an array and gives an array"
    if prod(before.dimensions) != prod(after.dimensions):
        return f"{instruction.operands[0].name!r} has {prod(before.dimensions)} elements, not {prod(after.dimensions)}"
    return None


def _dynamic_reshape(instruction: Instruction) -> str | None:
    return _at_least_one(instruction) or _elements(instruction)


def _device_number(instruction: Instruction) -> str | None:
    shape = instruction.shape
    if not isinstance(shape, ArrayShape) or shape.element_type != "u32" or shape.dimensions:
        return f"{instruction.opcode} has the shape u32[]"
    return None


def _slice(instruction: Instruction) -> str | None:
    rank, ranges = _rank(instruction.operands[0].shape), instruction.get("slice")
    if len(ranges) != rank or any(stride < 1 for _, _, stride in ranges):
        return f"slice needs {rank} ranges with strides above 0"
    return None


def _pad(instruction: Instruction) -> str | None:
    rank = _rank(instruction.operands[0].shape)
    return None if len(instruction.get("padding")) == rank else f"pad needs padding= for {rank} dimensions"


def _batch_norm(instruction: Instruction) -> str | None:
    rank, feature = _rank(instruction.operands[0].shape), instruction.get("feature_index")
    return None if 0 <= feature < rank else f"feature_index={feature} is not a dimension of the first operand"


def _iota(instruction: Instruction) -> str | None:
    rank, dimension = _rank(instruction.shape), instruction.get("iota_dimension")
    return None if 0 <= dimension < max(rank, 1) else f"iota_dimension={dimension} is not a dimension of the result"


def _starts(instruction: Instruction, first: int) -> str | None:
    """Start indices: one scalar for each dimension, or all in one vector."""
    operands = instruction.operands
    if len(operands) >= first:
        rank = _rank(operands[0].shape)
        if len(operands) == first + rank or (len(operands) == first + 1 and _rank(operands[first].shape) == 1):
            return None
    return f"{instruction.opcode} takes {first} operand{'s' * (first != 1)} and a start index for each dimension"


def _dynamic_slice(instruction: Instruction) -> str | None:
    problem = _starts(instruction, 1)
    if problem is None and len(instruction.get("dynamic_slice_sizes")) != _rank(instruction.operands[0].shape):
        return "dynamic_slice_sizes= needs a size for each dimension"
    return problem


def _dynamic_update_slice(instruction: Instruction) -> str | None:
    return _starts(instruction, 2)


def _dot(instruction: Instruction) -> str | None:
    for side, operand in zip(("lhs", "rhs"), instruction.operands, strict=False):
        dimensions = (*instruction.get(f"{side}_batch_dims", ()), *instruction.get(f"{side}_contracting_dims", ()))
        if not _within(dimensions, _rank(operand.shape)):
            return f"{side} dimensions {dimensions} are not different dimensions of {operand.name!r}"
    for kind in ("batch", "contracting"):
        lhs_dims, rhs_dims = instruction.get(f"lhs_{kind}_dims", ()), instruction.get(f"rhs_{kind}_dims", ())
        if len(lhs_dims) != len(rhs_dims):
            return f"lhs_{kind}_dims and rhs_{kind}_dims differ in length"
    return None


def _callee(instruction: Instruction, name: str, operands: int) -> str | None:
    for computation in instruction.called.get(name, ()):
        if len(computation.parameters) != operands:
            return f"{name}={computation.name} takes {len(computation.parameters)} parameters, not {operands}"
    return None


def _call(instruction: Instruction) -> str | None:
    return _callee(instruction, "to_apply", len(instruction.operands))


def _fusion(instruction: Instruction) -> str | None:
    return _callee(instruction, "calls", len(instruction.operands))


def _while(instruction: Instruction) -> str | None:
    return _callee(instruction, "condition", 1) or _callee(instruction, "body", 1)


def _conditional(instruction: Instruction) -> str | None:
    if instruction.operands and "branch_computations" in instruction.called:
        branches = len(instruction.called["branch_computations"])
    elif "true_computation" in instruction.called and "false_computation" in instruction.called:
        branches = 2
    else:
        return "conditional needs branch_computations=, or true_computation= and false_computation="
    if not branches or len(instruction.operands) != branches + 1:
        return f"conditional with {branches} branches takes {branches + 1} operands, got {len(instruction.operands)}"
    for name in ("branch_computations", "true_computation", "false_computation"):
        problem = _callee(instruction, name, 1)
        if problem is not None:
            return problem
    return None


def _async_start(instruction: Instruction) -> str | None:
    shape = instruction.shape
    if not isinstance(shape, TupleShape) or len(shape.elements) < 2 or not isinstance(shape.elements[0], TupleShape):
        return "async-start needs a result of the form ((operands), results, …)"
    return None


def _async_step(instruction: Instruction) -> str | None:
    before = instruction.operands[0].opcode
    if not before.endswith(("-start", "-update")):
        return f"{instruction.opcode} follows an async-start or async-update, not {before}"
    return None


def _tuple_result(instruction: Instruction) -> str | None:
    if not isinstance(instruction.shape, TupleShape) or not instruction.shape.elements:
        return f"{instruction.opcode} has a tuple as its result"
    return None


_CHECKS: dict[str, Callable[[Instruction], str | None]] = {
    "all-gather": _at_least_one,
    "all-gather-start": _at_least_one,
    "all-reduce": _at_least_one,
    "all-reduce-start": _at_least_one,
    "all-to-all": _at_least_one,
    "async-done": _async_step,
    "async-start": _async_start,
    "async-update": _async_step,
    "batch-norm-grad": _batch_norm,
    "batch-norm-inference": _batch_norm,
    "batch-norm-training": _batch_norm,
    "broadcast": _broadcast,
    "call": _call,
    "collective-broadcast": _at_least_one,
    "collective-permute": _at_least_one,
    "collective-permute-start": _at_least_one,
    "concatenate": _one_dimension,
    "conditional": _conditional,
    "dot": _dot,
    "dynamic-reshape": _dynamic_reshape,
    "dynamic-slice": _dynamic_slice,
    "dynamic-update-slice": _dynamic_update_slice,
    "fusion": _fusion,
    "get-dimension-size": _one_dimension,
    "get-tuple-element": _get_tuple_element,
    "infeed": _tuple_result,
    "iota": _iota,
    "map": _at_least_one,
    "pad": _pad,
    "partition-id": _device_number,
    "recv": _tuple_result,
    "reduce": _reduce,
    "reduce-scatter": _at_least_one,
    "reduce-window": _pairs_of_operands,
    "replica-id": _device_number,
    "reshape": _elements,
    "reverse": _reverse,
    "scan": _at_least_one,
    "scatter": _scatter,
    "set-dimension-size": _one_dimension,
    "slice": _slice,
    "sort": _one_dimension,
    "transpose": _transpose,
    "tuple": _tuple,
    "while": _while,
}
