"""What a window attribute does to one dimension: nothing, tiles without borders, or more."""

from __future__ import annotations

from enum import Enum, auto

from shardwright.hlo.attributes import Window


class Span(Enum):
    """How the windows along one dimension lie."""

    NONE = auto()  # one element wide: the dimension goes through
    TILES = auto()  # side by side, without overlap, padding or rest: blocks stay apart
    ALL = auto()  # one window over the whole dimension
    BORDERS = auto()  # anything else: a block needs elements of its neighbours


def span(window: Window | None, dim: int, size: int) -> Span:
    """How the windows along dimension `dim`, of `size` elements, lie; an absent window spans nothing."""
    if window is None:
        return Span.NONE
    wide, stride = window.sizes[dim], window.strides[dim]
    padded = window.padding_low[dim] or window.padding_high[dim]
    dilated = window.lhs_dilation[dim] != 1 or window.rhs_dilation[dim] != 1
    if padded or dilated or window.reversal[dim]:
        return Span.BORDERS
    if wide == stride == 1:
        return Span.NONE
    if wide == size:
        return Span.ALL
    return Span.TILES if wide == stride and size % wide == 0 else Span.BORDERS
