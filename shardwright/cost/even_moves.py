"""The moves of arrays that every axis divides, for many pairs of shardings at once.

They are those of `reshard`, which does not ask for an array's size then; a test holds one against the other. Reducing
hangs on how the array lies, over which axes it is reduced and which of those it is sliced over; the way from there on
the layouts alone. Both are far fewer than pairs of shardings, so each is worked out once and pairs look them up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.partitioner import DividesByZero
from shardwright.cost.paths import Dims, Move, even_size, paths_on, scattering
from shardwright.cost.tilings import Order
from shardwright.plans import Mesh

IntArray = NDArray[np.int64]

#: Collectives in order: kind, what its groups differ in, payload as a part of the whole array's bytes.
Moves = tuple[tuple[str, Order, float], ...]

_UNKNOWN = -1


class EvenMoves:
    """Moves of arrays of `rank` dimensions on one mesh, with every answer remembered.

    Layouts (how an array lies, sums aside) are interned to small integers. Sets of axes are bits, in mesh order.
    """

    def __init__(self, mesh: Mesh, rank: int) -> None:
        self._paths = paths_on(mesh)
        self._shape = (even_size(mesh),) * rank
        self._bit_of = {axis.name: 1 << i for i, axis in enumerate(mesh.axes)}
        self._real = self._bits(self._paths.sizes)
        self._layouts: dict[Dims, int] = {}
        self._dims: list[Dims] = []  # of each layout
        #: [have, want]: the way between two layouts, and [have, want, dimension]: the axes over which it slices first.
        self._ways: IntArray = np.empty((0, 0), np.int64)
        self._slices: IntArray = np.empty((0, 0, rank), np.int64)
        #: What is at the places that `_ways` has; None where XLA's partitioner ends its process.
        self._lists: dict[Moves | None, int] = {}
        #: Axes in the order in which they cut a dimension, and [such axes, axes that are reduced over]: `scattering`.
        self._orders: dict[tuple[str, ...], int] = {}
        self._scattering: IntArray = np.empty((0, 0), np.int64)
        #: By layout, axes that are reduced over and those of them that split each dimension then: the layout
        #: afterwards, and the place in `_lists` of the moves.
        self._reductions: dict[tuple[int, ...], tuple[int, int]] = {}

    def layout(self, dims: Dims) -> int:
        """The integer that stands for `dims`."""
        real = self._paths.real(dims)
        found = self._layouts.setdefault(real, len(self._dims))
        if found == len(self._dims):
            self._dims.append(real)
        return found

    def between(self, have: IntArray, want: IntArray, over: IntArray) -> tuple[list[Moves | None], IntArray]:
        """Different moves, and for each of some pairs of layouts which of them it takes.

        over: per pair, the axes over which the array is a partial sum that is to be reduced. None stands for what XLA's
        partitioner ends its process at.
        """
        first = np.full(len(have), self._place(()))
        summed = np.flatnonzero(over & self._real)
        if len(summed):
            have = have.copy()
            have[summed], first[summed] = self._reduced(have[summed], want[summed], over[summed] & self._real)
        second = self._way(have, want)
        size = len(self._lists)
        codes, places = np.unique(first * size + second, return_inverse=True)
        lists = list(self._lists)
        return [_joined(lists[code // size], lists[code % size]) for code in codes.tolist()], places

    def _reduced(self, have: IntArray, want: IntArray, over: IntArray) -> tuple[IntArray, IntArray]:
        """The layouts of reduced sums, and the places of the moves."""
        landing = self._landing(self._sliced_over(have, want), over)
        rows = np.column_stack([have, over, landing]).tolist()
        found = np.array([self._reduction(tuple(row)) for row in rows], np.int64)
        return found[:, 0], found[:, 1]

    def _reduction(self, key: tuple[int, ...]) -> tuple[int, int]:
        found = self._reductions.get(key)
        if found is None:
            have, over, *landing = key
            orders = list(self._orders)
            lies, moves = self._paths.reduced(
                8, self._shape, self._dims[have], self._axes(over), tuple(orders[place] for place in landing)
            )
            found = self._reductions[key] = self.layout(lies), self._place(self._relative(moves))
        return found

    def _sliced_over(self, have: IntArray, want: IntArray) -> IntArray:
        """[pairs, dimensions]: places in `_orders`."""
        table = self._slices = _grown(self._slices, len(self._dims))
        if table.shape[2]:
            for a, b, lies, wanted in self._missing(table[..., 0], have, want):
                sliced = self._paths.sliced_over(self._shape, lies, wanted)
                table[a, b] = [self._order(axes) for axes in sliced]
        found: IntArray = table[have, want]
        return found

    def _landing(self, cutting: IntArray, over: IntArray) -> IntArray:
        """[pairs, dimensions]: places in `_orders` of the axes that a sum is scattered over."""
        if len(self._scattering) < len(self._orders):
            sums = [self._axes(bits) for bits in range(1 << len(self._bit_of))]
            rows = [[self._order(scattering(axes, each)) for each in sums] for axes in list(self._orders)]
            self._scattering = np.array(rows, np.int64)
        found: IntArray = self._scattering[cutting, over[:, None]]
        return found

    def _order(self, axes: tuple[str, ...]) -> int:
        return self._orders.setdefault(axes, len(self._orders))

    def _way(self, have: IntArray, want: IntArray) -> IntArray:
        table = self._ways = _grown(self._ways, len(self._dims))
        for a, b, lies, wanted in self._missing(table, have, want):
            try:
                table[a, b] = self._place(self._relative(self._paths.moves(8, self._shape, lies, wanted)))
            except DividesByZero:
                table[a, b] = self._place(None)
        found: IntArray = table[have, want]
        return found

    def _missing(self, table: IntArray, have: IntArray, want: IntArray) -> list[tuple[int, int, Dims, Dims]]:
        """Pairs of layouts, each once, that a table has no entry for."""
        is_missing = table[have, want] == _UNKNOWN
        pairs = dict.fromkeys(zip(have[is_missing].tolist(), want[is_missing].tolist(), strict=True))
        return [(a, b, self._dims[a], self._dims[b]) for a, b in pairs]

    def _place(self, moves: Moves | None) -> int:
        return self._lists.setdefault(moves, len(self._lists))

    def _relative(self, moves: Sequence[Move]) -> Moves:
        whole = self._shape[0] ** len(self._shape) if self._shape else 1
        return tuple((move.kind, move.atoms, move.payload_bytes / whole) for move in moves)

    def _bits(self, axes: Iterable[str]) -> int:
        return sum(self._bit_of[axis] for axis in axes)

    def _axes(self, bits: int) -> tuple[str, ...]:
        return tuple(axis for axis, bit in self._bit_of.items() if bits & bit)


@lru_cache(maxsize=256)
def even_moves(mesh: Mesh, rank: int) -> EvenMoves:
    """What is remembered of one mesh."""
    return EvenMoves(mesh, rank)


def _joined(first: Moves | None, second: Moves | None) -> Moves | None:
    return None if first is None or second is None else first + second


def _grown(table: IntArray, size: int) -> IntArray:
    """A table with room for `size` layouts."""
    known = len(table)
    if known >= size:
        return table
    made = np.full((2 * size, 2 * size, *table.shape[2:]), _UNKNOWN, np.int64)
    made[:known, :known] = table
    return made
