"""Effect of a window attribute on one dimension: none, tiles without borders, or more."""

from __future__ import annotations

from enum import Enum, auto

from shardwright.hlo.attributes import Window
from shardwright.planner.rules.halo import Halo


class Span(Enum):
    """Arrangement of the windows along one dimension."""

    NONE = auto()  # one element wide: the dimension goes through
    TILES = auto()  # side by side, without overlap, padding or rest: blocks stay apart
    ALL = auto()  # one window over the whole dimension
    BORDERS = auto()  # anything else: a block needs elements of its neighbours


def span(window: Window | None, dim: int, size: int) -> Span:
    """Arrangement of the windows along dimension `dim`, of `size` elements; an absent window spans nothing."""
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


def window_halo(window: Window, dim: int, operand: int, size: int, result_size: int) -> Halo:
    """The borders read by windows along dimension `dim` beyond a block of their results.

    size / result_size: elements of the operand `operand` (a flat leaf) and of the result along it.
    """
    return Halo(
        operand=operand,
        size=size,
        result_size=result_size,
        stride=window.strides[dim],
        low=window.padding_low[dim],
        extent=(window.sizes[dim] - 1) * window.rhs_dilation[dim] + 1,
        dilation=window.lhs_dilation[dim],
    )


def contraction_halo(window: Window, dim: int, operand: int, size: int, taps: int, result_size: int) -> Halo:
    """The borders of an image combined with a block of the window's `taps`, over all `result_size` results.

    Used in the gradient of a kernel: a convolution with a whole image in its window.
    """
    return Halo(
        operand=operand,
        size=size,
        result_size=taps,
        stride=window.rhs_dilation[dim],
        low=window.padding_low[dim],
        extent=(result_size - 1) * window.strides[dim] + 1,
        dilation=window.lhs_dilation[dim],
    )
