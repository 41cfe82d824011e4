"""Sizes that change from call to call, rounded up to a few: each has a program, not every length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from shardwright.client.array_specs import array_spec
from shardwright.client.frontends.torch.tracing import TensorType
from shardwright.errors import ArgumentError, OptionError


@dataclass(frozen=True, slots=True)
class Bucket:
    """A dimension of an argument is filled up at its end to the next of some sizes.

    The step has to leave out what is filled in: by a mask that is an argument as well, or a target that the loss
    ignores (`fill=-100` of `cross_entropy`). Results have the sizes of the bucket.

    Args:
      argument: its name, as in `step.lower(…).argument_names`: `labels`, `batch['labels']`.
      dim: number of the dimension; -1: the last.
      sizes: ascending, in elements.
      fill: what is filled in.
    """

    argument: str
    dim: int
    sizes: Sequence[int]
    fill: float = 0

    def __post_init__(self) -> None:
        sizes = list(self.sizes)
        if not sizes or sizes != sorted(set(sizes)) or any(type(size) is not int or size < 1 for size in sizes):
            raise OptionError(
                f"the sizes of {self.argument} are {self.sizes!r}",
                where="buckets",
                remedy="list whole numbers of elements, ascending: (64, 128, 256)",
            )

    def pad(self, value: Any, kind: TensorType) -> tuple[Any, TensorType]:
        """A call's value and its type, filled up. Raises ArgumentError where it cannot be."""
        shape = list(kind.shape)
        if not -len(shape) <= self.dim < len(shape):
            raise ArgumentError(
                f"an argument of shape {shape} has no dimension {self.dim}",
                where=self.argument,
                remedy="give the bucket another dim",
            )
        size = shape[self.dim]
        target = next((each for each in self.sizes if each >= size), None)
        if target is None:
            raise ArgumentError(
                f"dimension {self.dim} has {size} elements, and the largest bucket {self.sizes[-1]}",
                where=self.argument,
                remedy=f"cut it, or add a bucket of {size} or more",
            )
        if target == size:
            return value, kind
        shape[self.dim] = target
        padded = TensorType(tuple(shape), kind.dtype)
        if isinstance(value, jax.ShapeDtypeStruct):
            return array_spec(padded.shape, value.dtype).aval, padded
        if not isinstance(value, np.ndarray):
            raise ArgumentError(
                f"a result of a step, of {size} elements in dimension {self.dim}, is not filled up to {target}",
                where=self.argument,
                remedy="pass its values, result.cpu(), or make it of a bucket's size",
            )
        widths = [(0, 0)] * len(shape)
        widths[self.dim] = 0, target - size
        return np.pad(value, widths, constant_values=self.fill), padded


def require_arguments(buckets: Sequence[Bucket], names: Sequence[str]) -> None:
    """Raises ArgumentError where a bucket is of no tensor of a training step's call."""
    for bucket in buckets:
        if bucket.argument not in names:
            raise ArgumentError(
                f"there is a bucket of {bucket.argument}, and the tensors of the call are {', '.join(names) or 'none'}",
                where="buckets",
                remedy="name one of them",
            )
