"""How a value relates to the micro-batches of a step: the micro-batch index as a mesh axis that is walked in time.

What a mesh axis would split, contract or replicate, time does too, but nothing can be resharded: a micro-batch sees its
own part and what is the same for all. So every array leaf of a program has one of four kinds.
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

    outer: the dimension is `[outer, n]`, row-major, and n is what is cut: `[T, B]` reshaped to `[T * B]` and cut
        along B is `Along(0, outer=T)`.
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
    """What each micro-batch takes for a value of the whole batch, made of its own terms alone: only where inexact
    splitting is asked for, and never what a value is, only how it is read."""


Kind = Whole | Along | Term | Done | Own

WHOLE, SUM, DONE, OWN = Whole(), Term(), Done(), Own()


def join_kinds(a: Kind, b: Kind) -> Kind:
    """What a value is that may be either (carried by a loop, made by one of two branches).

    A whole value can be cut, and can be a term: all of it in the first micro-batch, zeros in the others.
    """
    if a == b or b == WHOLE:
        return a
    return b if a == WHOLE else DONE


def local_shape(shape: ArrayShape, kind: Kind, parts: int) -> ArrayShape:
    """The shape of one micro-batch's value of `parts`, where `shape` is the whole one."""
    if not isinstance(kind, Along):
        return shape
    dimensions = list(shape.dimensions)
    dimensions[kind.dim] //= parts
    return ArrayShape(shape.element_type, tuple(dimensions), (), shape.layout)
