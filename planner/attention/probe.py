"""Finds the softmax behind a product, and what is multiplied with the probabilities and their gradient.

The values between the products are computed at a few coordinates of each axis, for random scores and random gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from math import prod

import numpy as np

from shardwright.hlo import Instruction
from shardwright.planner.attention.axes import CutAxisError, Label, Labels, NoLabelsError, flat
from shardwright.planner.attention.cone import Cone, dims_of
from shardwright.planner.attention.elementwise import Array
from shardwright.planner.attention.evaluate import Evaluation, Leaves, by_axis
from shardwright.planner.attention.flow import Readers
from shardwright.planner.attention.softmax import (
    find_hidden,
    gradient_factor,
    is_close,
    kind_of,
    problem_of,
    slope_of,
    softmax,
)
from shardwright.planner.attention.tuning import CLOSE, SCORE_SPREAD
from shardwright.planner.attention.whole import UnknownValueError, WholeValues

#: Seeds of what is drawn, and of all: with those where all flags are off, or on, for rows that see no key.
_DRAWS = (0, 1)
_ALL_DRAWS = tuple(range(4))


@dataclass(slots=True)
class Probed:
    """What is known of a cone.

    slope: of the logits, by scores.
    logits: of which the probabilities are the softmax.
    outputs: ends that read the probabilities.
    gradients: ends that read a constant times the gradient of the scores, with the constant.
    sums: the same of reductions.
    gradient_product: the product that makes the gradient of the probabilities, with its labels; None without one.
    varying: axes of the scores along which the logits vary of themselves.
    hidden, hidden_gradients: what probabilities and gradients of scores are in rows that see no key.
    """

    slope: float
    logits: Instruction
    outputs: list[tuple[Instruction, int]]
    varying: Label
    gradients: list[tuple[Instruction, int, float]] = field(default_factory=list)
    sums: list[tuple[Instruction, float]] = field(default_factory=list)
    gradient_product: tuple[Instruction, Labels] | None = None
    hidden: set[str] = field(default_factory=set)
    hidden_gradients: set[str] = field(default_factory=set)


class Probe:
    """Values of one cone at a few coordinates, for two draws of scores and of what comes from arguments."""

    def __init__(self, cone: Cone, readers: Readers, whole: WholeValues) -> None:
        self._cone, self._readers, self._whole = cone, readers, whole
        self._coordinates = {axis: _points(size) for axis, size in cone.sizes.items()}
        self._counts = {axis: len(points) for axis, points in self._coordinates.items()}
        self._axes = (*(axis for axis in cone.sizes if axis not in cone.keys), *cone.keys)
        self._labels = cone.labels[cone.product]
        shared = frozenset(flat(self._labels[: len(dims_of(cone.product).batch)]))
        leaves = partial(Leaves, shared=shared, largest=max(cone.sizes[axis] for axis in cone.keys))
        self._leaves = [*(leaves(seed) for seed in _DRAWS), *(leaves(0, flags=flags) for flags in (False, True))]
        dims = [prod(self._counts[axis] for axis in label or ()) for label in self._labels]
        self._scores = [SCORE_SPREAD * np.random.default_rng(seed + 2).standard_normal(dims) for seed in _ALL_DRAWS]
        self._at_zero = [self._evaluation(np.zeros(dims), draw) for draw in _ALL_DRAWS]
        self._at_scores = [self._evaluation(self._scores[draw], draw) for draw in _ALL_DRAWS]

    def _evaluation(self, scores: Array, draw: int) -> Evaluation:
        cone = self._cone
        given = {cone.product: (self._labels, scores)}
        leaves = self._leaves[draw]
        return Evaluation(self._readers.flow, self._whole, cone.sizes, self._coordinates, given, cone.labels, leaves)

    def _value(self, instruction: Instruction, evaluation: Evaluation) -> Array | None:
        """A value of the cone by axes, keys last; None where it lacks some."""
        labels = self._cone.labels.get(instruction)
        if labels is None or None in labels or set(flat(labels)) != set(self._axes):
            return None
        try:
            value = evaluation.full(evaluation.value(instruction, labels), labels)
        except (UnknownValueError, NoLabelsError, CutAxisError, ValueError):
            return None
        return by_axis(value, labels, self._axes, self._counts)

    def _pairs(self, first: Instruction, second: Instruction) -> list[tuple[Array, Array]]:
        """Two values for each draw; none where one is missing."""
        values = [[self._value(each, self._at_scores[draw]) for each in (first, second)] for draw in _DRAWS]
        return [(a, b) for a, b in values if a is not None and b is not None]

    def slope(self, instruction: Instruction) -> float | None:
        """The slope of the logits of which a value is the softmax; None if it is none."""
        slopes = []
        for draw in _DRAWS:
            at_scores = self._value(instruction, self._at_scores[draw])
            at_zero = self._value(instruction, self._at_zero[draw])
            if at_scores is None or at_zero is None:
                return None
            scores = by_axis(self._scores[draw], self._labels, self._axes, self._counts)
            slopes.append(slope_of(scores, at_scores, at_zero))
        return _common(slopes)

    def problem(self, instruction: Instruction) -> str | None:
        """Why a value that is like probabilities is no softmax of scores times a constant; None for other values."""
        problems = {self._problem(instruction, draw) for draw in _DRAWS}
        return problems.pop() if len(problems) == 1 and dims_of(self._cone.product).batch else None

    def _problem(self, instruction: Instruction, draw: int) -> str | None:
        at_scores, at_zero = (self._value(instruction, each[draw]) for each in (self._at_scores, self._at_zero))
        if at_scores is None or at_zero is None:
            return None
        scores = by_axis(self._scores[draw], self._labels, self._axes, self._counts)
        return problem_of(scores, at_scores, at_zero)

    def are_equal(self, first: Instruction, second: Instruction) -> bool:
        pairs = self._pairs(first, second)
        return len(pairs) == len(_DRAWS) and all(
            np.allclose(a, b, rtol=CLOSE, atol=CLOSE, equal_nan=True) for a, b in pairs
        )

    def logits(self, probabilities: Instruction) -> Instruction | None:
        """The first value of which the probabilities are the softmax, in rows that see a key."""
        for value in self._cone.labels:
            pairs = self._pairs(value, probabilities)
            if len(pairs) == len(_DRAWS) and all(is_close(softmax(a), b, ~find_hidden(a)) for a, b in pairs):
                return value
        return None

    def hidden_kinds(self, value: Instruction, logits: Instruction) -> set[str]:
        """What a value is in rows that see no key (`softmax.kind_of`); empty where there are none."""
        kinds = set()
        for draw in _ALL_DRAWS:
            at_zero, here = self._value(logits, self._at_zero[draw]), self._value(value, self._at_scores[draw])
            rows = None if at_zero is None else find_hidden(at_zero)
            if rows is not None and here is not None and rows.any():
                kinds.add(kind_of(here, rows))
        return kinds

    def varying(self, logits: Instruction) -> Label:
        """Axes along which logits may differ where all scores are 0."""
        varying: set[str] = set()
        for draw in _DRAWS:
            evaluation = self._evaluation(0 * self._scores[draw], draw)
            value = self._value(logits, evaluation)
            varying |= evaluation.drawn_axes
            if value is not None:
                value = np.nan_to_num(value)
                varying.update(axis for place, axis in enumerate(self._axes) if np.ptp(value, axis=place).max() > 0)
        return tuple(axis for axis in self._axes if axis in varying)

    def products(self, instruction: Instruction) -> set[Instruction]:
        """Products, other than the scores, on which a value depends."""
        evaluation = self._evaluation(self._scores[0], 0)
        self._value(instruction, evaluation)
        return evaluation.leaf_products

    def gradient(
        self, instruction: Instruction, probabilities: Instruction, logits: Instruction, product: Instruction
    ) -> float | None:
        """The constant by which a value is that times the gradient of the scores, in rows that see a key; None if it
        is another value."""
        factors: list[float | None] = []
        for draw in _DRAWS:
            values = [self._value(each, self._at_scores[draw]) for each in (instruction, probabilities, logits)]
            value, probability, scores = values
            labels, drawn = self._leaves[draw].products.get(product, ((), np.zeros(())))
            if value is None or probability is None or scores is None or set(flat(labels)) != set(self._axes):
                return None
            gradient = by_axis(drawn, labels, self._axes, self._counts)
            factors.append(gradient_factor(value, probability, gradient, ~find_hidden(scores)))
        return _common(factors)

    def labels_of(self, product: Instruction) -> Labels:
        return self._leaves[0].products[product][0]


def _common(numbers: list[float | None]) -> float | None:
    """The number that all are."""
    first, second = numbers
    if first is None or second is None or abs(first - second) > 1e-6 * abs(first):
        return None
    return first


def probe(cone: Cone, readers: Readers, whole: WholeValues) -> Probed | str | None:
    """What a cone computes; why it is no attention that a kernel computes; None where it is none at all."""
    flow = readers.flow
    values = Probe(cone, readers, whole)
    read = [(dot, place, flow.source(dot.operands[place])) for dot, place in cone.ends]
    slopes = [values.slope(value) for _, _, value in read]
    first = next((value for (_, _, value), slope in zip(read, slopes, strict=True) if slope), None)
    if first is None:
        return next((problem for _, _, value in read if (problem := values.problem(value))), None)
    slope = next(each for each in slopes if each)
    logits = values.logits(first)
    if logits is None:
        return "no logits of its softmax are there"
    outputs = [(dot, place) for dot, place, value in read if values.are_equal(value, first)]
    probed = Probed(slope, logits, outputs, values.varying(logits))
    behind = values.products(first)
    others = [(dot, place, value) for dot, place, value in read if (dot, place) not in outputs]
    sums = [(each, flow.source(each.operands[0])) for each in cone.sums]
    for value in [value for _, _, value in others] + [value for _, value in sums]:
        products = values.products(value) - behind
        if len(products) != 1:
            return "more than scores and a gradient meet between its products"
        (product,) = products
        factor = values.gradient(value, first, logits, product)
        if factor is None:
            return "what is computed from the probabilities is not their gradient"
        if probed.gradient_product is None:
            probed.gradient_product = (product, values.labels_of(product))
        if flow.number(probed.gradient_product[0]) != flow.number(product):
            return "two gradients of the same probabilities"
        probed.gradients += [(dot, place, factor) for dot, place, each in others if each is value]
        probed.sums += [(each, factor) for each, source in sums if source is value]
    probed.hidden = values.hidden_kinds(first, logits)
    probed.hidden_gradients = {
        kind for value in (value for _, _, value in others) for kind in values.hidden_kinds(value, logits)
    }
    probed.gradients = list(dict.fromkeys(probed.gradients))
    probed.sums = list(dict.fromkeys(probed.sums))
    return probed


def _points(size: int) -> Array:
    """Ends, middle and their neighbours: under most masks, some rows see more than one key of them."""
    middle = size // 2
    chosen = (0, 1, 2, middle - 1, middle, middle + 1, size - 2, size - 1)
    return np.array(sorted({place for place in chosen if 0 <= place < size}))
