"""The moves of many pairs of shardings at once.

They are those of `reshard`; a test holds one against the other. Reducing hangs on how the array lies, over which axes
it is reduced and which of those it is sliced over; the way from there on the layouts alone. Both are far fewer than
pairs of shardings, so each is worked out once and pairs look them up. So are the arrays that differ: of a dimension
that the devices divide nothing matters but that, so that one *kind* stands for all arrays that agree in the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import prod
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.moves.partitioner import OutermostDim
from shardwright.cost.moves.reshard_cache import Dims, Move, axes_to_scatter, even_size, reshard_cache_of
from shardwright.cost.moves.retile import DividesByZero
from shardwright.cost.moves.tilings import AtomOrder
from shardwright.shardings import Mesh

IntArray = NDArray[np.int64]
_Number = TypeVar("_Number", bound=np.signedinteger[Any])

#: Collectives in order: kind, what its groups differ in, payload as a part of the whole array's bytes, what lies
#: outermost in what it reads and writes.
Moves = tuple[tuple[str, AtomOrder, float, OutermostDim | None, OutermostDim | None], ...]

#: Dimensions in elements, `even_size` for those that the devices divide.
Kind = tuple[int, ...]

_UNKNOWN = -1

#: The place of the order that cuts nothing.
_NO_AXES = 0

#: Kinds of one rank whose moves are remembered.
_MAX_KINDS = 32


class LayoutIds:
    """How arrays of `rank` dimensions lie on one mesh, sums aside: interned to small integers.

    moves: those of arrays of a kind, between layouts by their integers.
    """

    def __init__(self, mesh: Mesh, rank: int) -> None:
        self.mesh = mesh
        self.known: list[Dims] = []
        self.even_kind: Kind = (even_size(mesh),) * rank
        self.moves = lru_cache(maxsize=_MAX_KINDS)(lambda kind: MoveTable(self, kind))
        self._numbers: dict[Dims, int] = {}
        self._real = reshard_cache_of(mesh).drop_unit_axes

    def number(self, dims: Dims) -> int:
        """The integer that stands for `dims`."""
        real = self._real(dims)
        found = self._numbers.setdefault(real, len(self.known))
        if found == len(self.known):
            self.known.append(real)
        return found

    def kind(self, shape: tuple[int, ...]) -> Kind:
        """What stands for all arrays that take the same moves as one of these dimensions."""
        devices = self.mesh.device_count
        return tuple(size if size % devices else even for size, even in zip(shape, self.even_kind, strict=True))


@lru_cache(maxsize=256)
def layout_ids_of(mesh: Mesh, rank: int) -> LayoutIds:
    """What is remembered of one mesh."""
    return LayoutIds(mesh, rank)


class MoveTable:
    """Moves of arrays of one kind on one mesh, with every answer remembered.

    Sets of axes are bits, in mesh order.
    """

    def __init__(self, layouts: LayoutIds, kind: Kind) -> None:
        mesh, rank = layouts.mesh, len(kind)
        self._paths = reshard_cache_of(mesh)
        self._shape = kind
        self._may_be_uneven = kind != layouts.even_kind
        self._bit_of = {axis.name: 1 << i for i, axis in enumerate(mesh.axes)}
        self._real = self._bits(self._paths.sizes)
        self._layouts = layouts
        #: [have, want]: the way between two layouts, and [have, want, dimension]: the axes over which it slices first.
        self._ways = np.empty((0, 0), np.int32)
        self._slices = np.empty((0, 0, rank), np.int16)
        #: What is at the places that `_ways` has; None where XLA's partitioner ends its process.
        self._lists: dict[Moves | None, int] = {}
        #: Axes in the order in which they cut a dimension, and
        #: [such axes, axes that are reduced over]: `axes_to_scatter`.
        self._orders: dict[tuple[str, ...], int] = {(): _NO_AXES}
        self._scattering: IntArray = np.empty((0, 0), np.int64)
        #: By layout, axes that are reduced over and those of them that split each dimension then: the layout
        #: afterwards, and the place in `_lists` of the moves.
        self._reductions: dict[tuple[int, ...], tuple[int, int]] = {}
        self._is_even: list[bool] = []

    def are_even(self, layouts: IntArray) -> NDArray[np.bool_]:
        """Whether each of some layouts has equal shards."""
        known = self._layouts.known
        self._is_even += [self._paths.is_even(self._shape, dims) for dims in known[len(self._is_even) :]]
        return np.array(self._is_even, np.bool_)[layouts]

    def between(self, have: IntArray, want: IntArray, over: IntArray) -> tuple[list[Moves | None], IntArray]:
        """Different moves, and for each of some pairs of layouts which of them it takes.

        over: per pair, the axes over which the array is a partial sum that is to be reduced. None stands for what XLA's
        partitioner ends its process at.
        """
        first = np.full(len(have), self._intern_moves(()))
        summed = np.flatnonzero(over & self._real)
        if len(summed):
            have = have.copy()
            have[summed], first[summed] = self._reduce(have[summed], want[summed], over[summed] & self._real)
        second = self._moves_between(have, want)
        size = len(self._lists)
        codes, places = np.unique(first * size + second, return_inverse=True)
        lists = list(self._lists)
        return [_concatenate(lists[code // size], lists[code % size]) for code in codes.tolist()], places

    def _reduce(self, have: IntArray, want: IntArray, over: IntArray) -> tuple[IntArray, IntArray]:
        """The layouts of reduced sums, and the places of the moves."""
        landing = self._scatter_axes(have, self._slice_axes(have, want), over)
        rows = np.column_stack([have, over, landing]).tolist()
        found = np.array([self._reduction(tuple(row)) for row in rows], np.int64)
        return found[:, 0], found[:, 1]

    def _reduction(self, key: tuple[int, ...]) -> tuple[int, int]:
        found = self._reductions.get(key)
        if found is None:
            have, over, *landing = key
            orders = list(self._orders)
            lies, moves = self._paths.reduce_partial(
                8, self._shape, self._layouts.known[have], self._axes(over), tuple(orders[place] for place in landing)
            )
            found = self._reductions[key] = self._layouts.number(lies), self._intern_moves(self._relative(moves))
        return found

    def _slice_axes(self, have: IntArray, want: IntArray) -> IntArray:
        """[pairs, dimensions]: places in `_orders`."""
        table = self._slices = _grow_table(self._slices, len(self._layouts.known))
        if table.shape[2]:
            for a, b, lies, wanted in self._missing(table[..., 0], have, want):
                sliced = self._paths.slice_axes(self._shape, lies, wanted)
                table[a, b] = [self._intern_axes(axes) for axes in sliced]
        return table[have, want].astype(np.int64)

    def _scatter_axes(self, have: IntArray, cutting: IntArray, over: IntArray) -> IntArray:
        """[pairs, dimensions]: places in `_orders` of the axes of a reduce-scatter (`ReshardCache.scatter_axes`)."""
        if len(self._scattering) < len(self._orders):
            sums = [self._axes(bits) for bits in range(1 << len(self._bit_of))]
            rows = [[self._intern_axes(axes_to_scatter(axes, each)) for each in sums] for axes in list(self._orders)]
            self._scattering = np.array(rows, np.int64)
        found: IntArray = self._scattering[cutting, over[:, None]]
        if self._may_be_uneven:
            bits = np.array([self._bits(axes) for axes in self._orders], np.int64)
            is_all = np.bitwise_or.reduce(bits[found], axis=1) == over
            found[~is_all & ~self.are_even(have)] = _NO_AXES
        return found

    def _intern_axes(self, axes: tuple[str, ...]) -> int:
        return self._orders.setdefault(axes, len(self._orders))

    def _moves_between(self, have: IntArray, want: IntArray) -> IntArray:
        table = self._ways = _grow_table(self._ways, len(self._layouts.known))
        for a, b, lies, wanted in self._missing(table, have, want):
            try:
                table[a, b] = self._intern_moves(self._relative(self._paths.moves(8, self._shape, lies, wanted)))
            except DividesByZero:
                table[a, b] = self._intern_moves(None)
        return table[have, want].astype(np.int64)

    def _missing(self, table: NDArray[_Number], have: IntArray, want: IntArray) -> list[tuple[int, int, Dims, Dims]]:
        """Pairs of layouts, each once, that a table has no entry for."""
        is_missing = table[have, want] == _UNKNOWN
        pairs = dict.fromkeys(zip(have[is_missing].tolist(), want[is_missing].tolist(), strict=True))
        known = self._layouts.known
        return [(a, b, known[a], known[b]) for a, b in pairs]

    def _intern_moves(self, moves: Moves | None) -> int:
        return self._lists.setdefault(moves, len(self._lists))

    def _relative(self, moves: Sequence[Move]) -> Moves:
        whole = prod(self._shape)
        return tuple((move.kind, move.atoms, move.payload_bytes / whole, move.reads, move.writes) for move in moves)

    def _bits(self, axes: Iterable[str]) -> int:
        return sum(self._bit_of[axis] for axis in axes)

    def _axes(self, bits: int) -> tuple[str, ...]:
        return tuple(axis for axis, bit in self._bit_of.items() if bits & bit)


def _concatenate(first: Moves | None, second: Moves | None) -> Moves | None:
    return None if first is None or second is None else first + second


def _grow_table(table: NDArray[_Number], size: int) -> NDArray[_Number]:
    """A table with room for `size` layouts."""
    known = len(table)
    if known >= size:
        return table
    made = np.full((2 * size, 2 * size, *table.shape[2:]), _UNKNOWN, table.dtype)
    made[:known, :known] = table
    return made
