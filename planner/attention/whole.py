"""Values of arrays that depend on no argument: tables, positions, counts. Computed whole, at their own sizes."""

from __future__ import annotations

import re
from math import prod
from typing import Any

import numpy as np

from shardwright.hlo import ArrayShape, Instruction
from shardwright.planner.attention.elementwise import (
    ELEMENTWISE,
    OPERATIONS,
    REDUCTIONS,
    Array,
    compare,
    convert,
)
from shardwright.planner.attention.flow import Flow
from shardwright.planner.attention.tuning import MAX_DEPTH, MAX_WHOLE_ELEMENTS

_COMMENT = re.compile(r"/\*.*?\*/")
_NUMBER = re.compile(r"[^\s{},]+")
_WORDS = {"true": 1.0, "false": 0.0}


class UnknownValueError(Exception):
    """A value depends on arguments, or on operations that are not evaluated here."""


class WholeValues:
    """Evaluates whole arrays, each once."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._values: dict[Instruction, Array | None] = {}

    def value(self, instruction: Instruction, depth: int = 0) -> Array:
        """Raises UnknownValueError."""
        instruction = self._flow.origin(instruction)
        if instruction not in self._values:
            self._values[instruction] = self._try(instruction, depth)
        value = self._values[instruction]
        if value is None:
            raise UnknownValueError
        return value

    def _try(self, instruction: Instruction, depth: int) -> Array | None:
        shape = instruction.shape
        if depth > MAX_DEPTH or not isinstance(shape, ArrayShape) or prod(shape.dimensions) > MAX_WHOLE_ELEMENTS:
            return None
        try:
            value = self._compute(instruction, shape, depth + 1)
        except (UnknownValueError, KeyError, ValueError, IndexError):
            return None
        return value if value.shape == tuple(shape.dimensions) else None

    def _compute(self, instruction: Instruction, shape: ArrayShape, depth: int) -> Array:
        opcode, dims = instruction.opcode, shape.dimensions
        if opcode == "constant":
            return literal(instruction)
        if opcode == "iota":
            return iota(instruction, [np.arange(size) for size in dims]) + np.zeros(dims, np.int64)
        if opcode in ("parameter", "dot", "while", "get-tuple-element"):
            raise UnknownValueError
        operands = [self.value(operand, depth) for operand in instruction.operands]
        return _apply(instruction, shape, operands)


def literal(constant: Instruction) -> Array:
    """A constant's value. Raises UnknownValueError."""
    shape = constant.shape.leaves[0]
    if constant.is_elided or prod(shape.dimensions) > MAX_WHOLE_ELEMENTS or shape.element_type[0] == "c":
        raise UnknownValueError
    words = _NUMBER.findall(_COMMENT.sub("", constant.payload))
    values = [_WORDS[word] if word in _WORDS else float(word) for word in words]
    return convert(np.array(values, np.float64).reshape(shape.dimensions), shape.element_type)


def iota(instruction: Instruction, coordinates: list[Array]) -> Array:
    """An iota at given coordinates of each dimension, of size 1 along the others."""
    dim = instruction.get("iota_dimension", 0)
    dim = int(dim[0]) if isinstance(dim, tuple | list) else int(dim)
    dims = [1] * len(coordinates)
    dims[dim] = len(coordinates[dim])
    return convert(coordinates[dim].astype(np.int64).reshape(dims), instruction.shape.leaves[0].element_type)


def elementwise(instruction: Instruction, operands: list[Array]) -> Array:
    with np.errstate(all="ignore"):
        if instruction.opcode == "compare":
            return compare(instruction.get("direction"), operands[0], operands[1])
        if instruction.opcode == "convert":
            return convert(operands[0], instruction.shape.leaves[0].element_type)
        result: Array = np.asarray(OPERATIONS[instruction.opcode](*operands))
        return result


def reduction(instruction: Instruction, operand: Array, initial: Array, axes: tuple[int, ...]) -> Array:
    """A reduction of one array. Raises UnknownValueError for regions of more than one operation."""
    region = instruction.called["to_apply"][0]
    if len(region.instructions) != 3 or region.root.opcode not in REDUCTIONS:
        raise UnknownValueError
    with np.errstate(all="ignore"):
        total = np.asarray(REDUCTIONS[region.root.opcode](operand, axis=axes))
        result: Array = np.asarray(OPERATIONS[region.root.opcode](total, initial))
        return result


def _apply(instruction: Instruction, shape: ArrayShape, operands: list[Array]) -> Array:
    opcode, dims = instruction.opcode, shape.dimensions
    if opcode in ELEMENTWISE:
        return elementwise(instruction, operands)
    if opcode == "broadcast":
        return np.broadcast_to(spread(operands[0], instruction.get("dimensions", ()), len(dims)), dims)
    if opcode == "reshape":
        return operands[0].reshape(dims)
    if opcode == "transpose":
        return operands[0].transpose(instruction.get("dimensions"))
    if opcode == "concatenate":
        return np.concatenate(operands, axis=instruction.get("dimensions")[0])
    if opcode == "slice":
        return operands[0][tuple(slice(*each) for each in instruction.get("slice"))]
    if opcode == "reduce" and len(operands) == 2:
        return reduction(instruction, operands[0], operands[1], tuple(instruction.get("dimensions")))
    if opcode == "reduce-window" and len(operands) == 2:
        return _running_sum(instruction, operands[0])
    if opcode == "gather":
        return _gather(instruction, operands[0], operands[1])
    raise UnknownValueError


def spread(value: Array, along: Any, rank: int) -> Array:
    """A value of dimensions `along`, with dimensions of size 1 between them."""
    order = np.argsort(along)
    dims = [1] * rank
    for place, dim in enumerate(along):
        dims[dim] = value.shape[place]
    return value.transpose(order).reshape(dims) if value.ndim else value.reshape(dims)


def _running_sum(instruction: Instruction, operand: Array) -> Array:
    window = instruction.get("window")
    dims = [dim for dim, size in enumerate(window.sizes) if size != 1]
    (dim,) = dims if len(dims) == 1 else (-1,)
    size = operand.shape[dim]
    running = dim >= 0 and window.sizes[dim] == size and tuple(window.padding_low)[dim] == size - 1
    if not running or instruction.called["to_apply"][0].root.opcode != "add" or set(window.strides) != {1}:
        raise UnknownValueError
    return np.cumsum(operand, axis=dim)


def _gather(instruction: Instruction, operand: Array, indices: Array) -> Array:
    """Rows of an array by their numbers: dimensions that are looked up are dropped, all others are whole."""
    mapped = list(instruction.get("start_index_map", ()))
    sizes = list(instruction.get("slice_sizes", ()))
    offsets = list(instruction.get("offset_dims", ()))
    others = [dim for dim in range(operand.ndim) if dim not in mapped]
    vector = int(np.ravel(instruction.get("index_vector_dim"))[0])
    plain = list(instruction.get("collapsed_slice_dims", ())) == sorted(mapped) and vector in (
        indices.ndim,
        indices.ndim - 1,
    )
    if (
        not plain
        or any(sizes[dim] != operand.shape[dim] for dim in others)
        or "operand_batching_dims" in (instruction.attributes)
    ):
        raise UnknownValueError
    places = indices[..., None] if vector == indices.ndim else indices
    clipped = [np.clip(places[..., k], 0, operand.shape[dim] - 1) for k, dim in enumerate(mapped)]
    rows = operand.transpose([*mapped, *others])[tuple(clipped)]
    rank = rows.ndim
    batch = [dim for dim in range(rank) if dim not in offsets]
    result: Array = rows.transpose(np.argsort([*batch, *offsets]))
    return result
