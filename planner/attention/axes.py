"""Axes of an attention: what each dimension of an array runs over.

A dimension is labelled by the axes that it merges, the slowest first; one of size 1 by none; one that is not known yet
by None. Axes come from the dimensions of the scores' product, cut where a reshape cuts them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

#: Of one dimension, and of an array.
Label = tuple[str, ...]
Labels = tuple[Label | None, ...]


class CutAxisError(Exception):
    """A reshape cuts an axis: the outer and the inner size."""

    def __init__(self, axis: str, sizes: tuple[int, int]) -> None:
        super().__init__(axis)
        self.axis, self.sizes = axis, sizes


class NoLabelsError(Exception):
    """The dimensions of an array cannot be told from those of another."""


def flat(labels: Sequence[Label | None]) -> Label:
    """All axes of an array, in order."""
    return tuple(axis for label in labels for axis in label or ())


def reshape_labels(labels: Labels, source: Sequence[int], target: Sequence[int], sizes: Mapping[str, int]) -> Labels:
    """The labels after a reshape from dimensions `source` to `target`."""
    result: list[Label | None] = []
    for inputs, outputs in _groups(source, target):
        inner = [labels[i] for i in inputs if source[i] != 1]
        dims = [target[i] for i in outputs]
        result += _regroup(inner, dims, sizes)
    return tuple(result)


def _regroup(inner: list[Label | None], dims: list[int], sizes: Mapping[str, int]) -> list[Label | None]:
    if len(inner) == 1 and sum(size != 1 for size in dims) == 1:
        return [() if size == 1 else inner[0] for size in dims]
    if any(label is None for label in inner):
        return [() if size == 1 else None for size in dims]
    axes = list(flat(inner))
    result: list[Label | None] = []
    for size in dims:
        label: list[str] = []
        rest = size
        while rest > 1:
            if not axes:
                raise NoLabelsError
            axis = axes.pop(0)
            if rest % sizes[axis]:
                if sizes[axis] % rest:
                    raise NoLabelsError
                raise CutAxisError(axis, (rest, sizes[axis] // rest))
            rest //= sizes[axis]
            label.append(axis)
        result.append(tuple(label))
    return result


def _groups(source: Sequence[int], target: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Smallest runs of dimensions with equal numbers of elements."""
    i = j = 0
    while i < len(source) or j < len(target):
        inputs: list[int] = []
        outputs: list[int] = []
        left = right = 1
        while True:
            if left <= right and i < len(source) and (left < right or not inputs):
                left *= source[i]
                inputs.append(i)
                i += 1
            elif j < len(target) and (right < left or not outputs):
                right *= target[j]
                outputs.append(j)
                j += 1
            else:
                break
            if left == right and inputs and outputs and left > 1:
                break
        if left != right:
            raise NoLabelsError
        yield inputs, outputs


def permuted(labels: Labels, order: Sequence[int]) -> Labels:
    return tuple(labels[dim] for dim in order)


def unpermuted(labels: Labels, order: Sequence[int]) -> Labels:
    """The labels before a transpose."""
    result: list[Label | None] = [None] * len(labels)
    for to, dim in enumerate(order):
        result[dim] = labels[to]
    return tuple(result)


def size_of(label: Label, sizes: Mapping[str, int]) -> int:
    return prod(sizes[axis] for axis in label)


def merge(first: Labels, second: Labels) -> Labels:
    """Labels of one array that are known by two ways."""
    if any(a is not None and b is not None and a != b for a, b in zip(first, second, strict=True)):
        raise NoLabelsError
    return tuple(b if a is None else a for a, b in zip(first, second, strict=True))
