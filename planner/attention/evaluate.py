"""Values of an attention's arrays at chosen coordinates of their axes.

What comes from arguments is a random number for each coordinate; what comes from none has its value. So two
computations that agree here agree for all arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np

from shardwright.hlo import ArrayShape, Instruction
from shardwright.planner.attention.axes import (
    CutAxisError,
    Label,
    Labels,
    NoLabelsError,
    flat,
    reshape_labels,
    unpermuted,
)
from shardwright.planner.attention.elementwise import ELEMENTWISE, Array
from shardwright.planner.attention.flow import Flow
from shardwright.planner.attention.tuning import MAX_DEPTH
from shardwright.planner.attention.whole import (
    UnknownValueError,
    WholeValues,
    elementwise,
    iota,
    literal,
    reduction,
    spread,
)

_Key = tuple[int, Labels]


class Leaves:
    """Values where an evaluation starts, by number and labels: equal ones are equal numbers in all evaluations.

    shared: axes of batch and heads; integers along these alone are lengths, up to `largest`; others are 0 and 1.
    flags: of all booleans; numbers have its sign, integers are 1 or 0.
    products: of them, the results of products.
    """

    def __init__(self, seed: int, shared: frozenset[str], largest: int, flags: bool | None = None) -> None:
        self._shared, self._largest = shared, largest
        self._flags = flags
        self._sign = -1 if flags is False or (flags is None and seed % 2) else 1
        self._random = np.random.default_rng(seed)
        self._values: dict[_Key, Array] = {}
        self.products: dict[Instruction, tuple[Labels, Array]] = {}

    def value(self, number: int, labels: Labels, dims: tuple[int, ...], element_type: str) -> Array:
        key = (number, labels)
        if key not in self._values:
            self._values[key] = self._draw(labels, dims, element_type)
        return self._values[key]

    def _draw(self, labels: Labels, dims: tuple[int, ...], element_type: str) -> Array:
        if self._flags is not None and element_type[0] in "psu":
            return np.full(dims, self._flags, np.bool_ if element_type == "pred" else np.int64)
        if element_type == "pred":
            return np.full(dims, self._sign > 0) if prod(dims) == 1 else np.asarray(self._random.random(dims) < 0.6)
        if element_type[0] in "su":
            is_length = self._shared.issuperset(flat(labels)) and self._largest > 1
            return np.asarray(
                self._random.integers(2, self._largest + 1, dims) if is_length else self._random.integers(0, 2, dims)
            )
        numbers = self._random.standard_normal(dims)
        has_sign = self._flags is not None or prod(dims) == 1  # what one number decides is seen with both signs
        return np.asarray(self._sign * np.abs(numbers) if has_sign else numbers)


class Evaluation:
    """Values at `coordinates`, by axis.

    sizes: of the axes.
    given: values of instructions, with their labels.
    labels: of the instructions between products.
    leaves: where a value is not known: UnknownValueError without them.
    """

    def __init__(
        self,
        flow: Flow,
        whole: WholeValues,
        sizes: Mapping[str, int],
        coordinates: Mapping[str, Array],
        given: Mapping[Instruction, tuple[Labels, Array]],
        labels: Mapping[Instruction, Labels],
        leaves: Leaves | None,
    ) -> None:
        self._flow, self._whole, self._sizes = flow, whole, sizes
        self._coordinates, self._given, self._labels, self._leaves = coordinates, given, labels, leaves
        self._values: dict[tuple[Instruction, Labels], Array] = {}
        self.leaf_products: set[Instruction] = set()
        self.drawn_axes: set[str] = set()

    def value(self, instruction: Instruction, labels: Labels, depth: int = 0) -> Array:
        """An array with one dimension a label, of size 1 where its values are all equal. Raises UnknownValueError,
        NoLabelsError."""
        source = self._flow.source(instruction)
        if source not in self._given and source not in self._labels:
            source = self._flow.origin(source)
        key = (source, labels)
        if key not in self._values:
            self._values[key] = self._compute(source, labels, depth + 1)
        return self._values[key]

    def points(self, label: Label) -> Array:
        """The coordinates of a dimension."""
        places = np.zeros(1, np.int64)
        for axis in label:
            places = (places[:, None] * self._sizes[axis] + self._coordinates[axis]).reshape(-1)
        return places

    def full(self, value: Array, labels: Labels) -> Array:
        """A value with all its elements."""
        return np.broadcast_to(value, [len(self.points(label or ())) for label in labels])

    def _compute(self, instruction: Instruction, labels: Labels, depth: int) -> Array:
        if instruction in self._given:
            expected, value = self._given[instruction]
            if expected != labels:
                raise NoLabelsError
            return value
        if any(label is None for label in labels):
            raise NoLabelsError
        try:
            if depth > MAX_DEPTH:
                raise UnknownValueError
            return self._apply(instruction, labels, depth)
        except (UnknownValueError, CutAxisError, NoLabelsError):
            if instruction in self._labels:
                raise
            return self._leaf(instruction, labels)

    def _apply(self, instruction: Instruction, labels: Labels, depth: int) -> Array:
        opcode, operands = instruction.opcode, instruction.operands
        if opcode in ELEMENTWISE:
            values = [self.value(each, labels if each.shape.leaves[0].rank else (), depth) for each in operands]
            return elementwise(instruction, values)
        if opcode == "constant" and not labels:
            return literal(instruction)
        if opcode == "iota":
            return iota(instruction, [self.points(label or ()) for label in labels])
        if opcode == "broadcast":
            along = instruction.get("dimensions", ())
            inner = self.value(operands[0], tuple(labels[dim] for dim in along), depth)
            return spread(inner, along, len(labels))
        if opcode == "transpose":
            order = instruction.get("dimensions")
            return self.value(operands[0], unpermuted(labels, order), depth).transpose(order)
        if opcode == "reshape":
            return self._reshape(instruction, labels, depth)
        if opcode == "reduce" and len(operands) == 2:
            return self._reduce(instruction, labels, depth)
        raise UnknownValueError

    def _reshape(self, instruction: Instruction, labels: Labels, depth: int) -> Array:
        (operand,) = instruction.operands
        source = operand.shape.leaves[0].dimensions
        inner = reshape_labels(labels, instruction.shape.leaves[0].dimensions, source, self._sizes)
        value = self.value(operand, inner, depth)
        if [label for label in inner if label] == [label for label in labels if label]:
            sizes = iter(size for size, label in zip(value.shape, inner, strict=True) if label)
            return value.reshape([next(sizes) if label else 1 for label in labels])
        return self.full(value, inner).reshape([len(self.points(label or ())) for label in labels])

    def _reduce(self, instruction: Instruction, labels: Labels, depth: int) -> Array:
        operand, initial = instruction.operands
        dims = operand.shape.leaves[0].dimensions
        axes = tuple(instruction.get("dimensions"))
        inner = self._labels.get(self._flow.source(operand))
        if inner is None:
            outer = iter(labels)
            inner = tuple((() if dims[dim] == 1 else None) if dim in axes else next(outer) for dim in range(len(dims)))
        if tuple(label for dim, label in enumerate(inner) if dim not in axes) != labels:
            raise NoLabelsError
        value = self.full(self.value(operand, inner, depth), inner)
        return reduction(instruction, value, self.value(initial, (), depth), axes)

    def _leaf(self, instruction: Instruction, labels: Labels) -> Array:
        shape = instruction.shape
        if not isinstance(shape, ArrayShape):
            raise UnknownValueError
        try:
            value = self._whole.value(instruction)
            return value[np.ix_(*[self.points(label or ()) for label in labels])] if labels else value
        except UnknownValueError:
            if self._leaves is None:
                raise
        dims = tuple(len(self.points(label or ())) for label in labels)
        self.drawn_axes.update(flat(labels))
        value = self._leaves.value(self._flow.number(instruction), labels, dims, shape.element_type)
        if instruction.opcode == "dot":
            self.leaf_products.add(instruction)
            self._leaves.products[instruction] = (labels, value)
        return value


def by_axis(value: Array, labels: Labels, axes: Label, counts: Mapping[str, int]) -> Array:
    """A full array with a dimension for each of `axes`, in their order."""
    order = flat(labels)
    return value.reshape([counts[axis] for axis in order]).transpose([order.index(axis) for axis in axes])
