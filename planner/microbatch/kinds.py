"""Relation of a value to the micro-batches of a step: the micro-batch index as a mesh axis in time.

Time splits, contracts or replicates a value like a mesh axis, but without resharding: a micro-batch has its own part
and the values common to all. Every array leaf of a program has one of four kinds.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.hlo import ArrayShape


@dataclass(frozen=True, slots=True)
class Whole:
    """The same for every micro-batch, and there before the first."""


@dataclass(frozen=True, slots=True)
class Along:
    """Micro-batch i of M has block i of M equal, contiguous blocks of dimension `dim`.

    outer: the dimension is `[outer, n]`, row-major, and n is cut: `[T, B]` reshaped to `[T * B]` and cut along B is
        `Along(0, outer=T)`.
    """

    dim: int
    outer: int = 1


@dataclass(frozen=True, slots=True)
class Term:
    """Each micro-batch has a term of the same shape; `reduction` over all of them is the value."""

    reduction: str = "add"


@dataclass(frozen=True, slots=True)
class Done:
    """Made once, after the last micro-batch, of finished terms and collected parts."""


@dataclass(frozen=True, slots=True)
class Own:
    """A micro-batch's own value in place of the whole batch's, made of its own terms.

    Only for inexact splitting; never a value's kind, only the way it is read.
    """


Kind = Whole | Along | Term | Done | Own

WHOLE, SUM, DONE, OWN = Whole(), Term(), Done(), Own()


def join_kinds(a: Kind, b: Kind) -> Kind:
    """The join of two kinds: carried by a loop, or made by one of two branches.

    A whole value can be cut. It can also be a term: all of it in the first micro-batch, zeros in the others.
    """
    if a == b or b == WHOLE:
        return a
    return b if a == WHOLE else DONE


def local_shape(shape: ArrayShape, kind: Kind, parts: int) -> ArrayShape:
    """The shape of one micro-batch's value of `parts`; `shape`: the whole one."""
    if not isinstance(kind, Along):
        return shape
    dimensions = list(shape.dimensions)
    dimensions[kind.dim] //= parts
    return ArrayShape(shape.element_type, tuple(dimensions), (), shape.layout)
