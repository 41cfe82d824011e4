"""Reshards of many pairs of shardings at once.

Equal to `reshard`; a test compares both. A reduction depends on the array's layout, the reduced axes and the slicing
axes among them; the rest of the move depends on the layouts alone. Both are far fewer in number than pairs of
shardings: each is computed once and looked up per pair. Arrays are grouped likewise: a dimension divided evenly by the
devices matters in no other respect. One *kind* represents all arrays that agree in the other dimensions.
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
from shardwright.cost.tuning import MAX_KINDS
from shardwright.plans.shardings import Mesh

IntArray = NDArray[np.int64]
_Number = TypeVar("_Number", bound=np.signedinteger[Any])

#: Collectives in order: kind, atoms of its groups, payload in parts of the whole array's bytes, outermost dimension in
#: the data it reads and writes.
Moves = tuple[tuple[str, AtomOrder, float, OutermostDim | None, OutermostDim | None], ...]

#: Dimensions in elements, `even_size` for those divided by the devices.
Kind = tuple[int, ...]

_UNKNOWN = -1

#: Index of the empty order.
_NO_AXES = 0


class LayoutIds:
    """Layouts of arrays of `rank` dimensions on one mesh, partial sums aside: interned to small integers.

    moves: those of arrays of a kind, between layouts by their integers.
    """

    def __init__(self, mesh: Mesh, rank: int) -> None:
        self.mesh = mesh
        self.known: list[Dims] = []
        self.even_kind: Kind = (even_size(mesh),) * rank
        self.moves = lru_cache(maxsize=MAX_KINDS)(lambda kind: MoveTable(self, kind))
        self._numbers: dict[Dims, int] = {}
        self._real = reshard_cache_of(mesh).drop_unit_axes

    def number(self, dims: Dims) -> int:
        """The integer id of `dims`."""
        real = self._real(dims)
        layout_id = self._numbers.setdefault(real, len(self.known))
        if layout_id == len(self.known):
            self.known.append(real)
        return layout_id

    def kind(self, shape: tuple[int, ...]) -> Kind:
        """The representative of all arrays with the same moves as one of these dimensions."""
        devices = self.mesh.device_count
        return tuple(size if size % devices else even for size, even in zip(shape, self.even_kind, strict=True))


@lru_cache(maxsize=256)
def layout_ids_of(mesh: Mesh, rank: int) -> LayoutIds:
    """The cached layouts of one mesh."""
    return LayoutIds(mesh, rank)


class MoveTable:
    """Moves of arrays of one kind on one mesh, with every answer cached.

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
        #: [start, goal]: the moves between two layouts, and [start, goal, dimension]: the axes of their first slices.
        self._ways = np.empty((0, 0), np.int32)
        self._slices = np.empty((0, 0, rank), np.int16)
        #: Moves → their number in `_ways`; None: XLA's partitioner ends its process.
        self._lists: dict[Moves | None, int] = {}
        #: Axes in cutting order, and [such axes, reduced axes]: `axes_to_scatter`.
        self._orders: dict[tuple[str, ...], int] = {(): _NO_AXES}
        self._scattering: IntArray = np.empty((0, 0), np.int64)
        #: By layout, reduced axes, and those among them that split each dimension afterwards: the resulting layout and
        #: the index of the moves in `_lists`.
        self._reductions: dict[tuple[int, ...], tuple[int, int]] = {}
        self._is_even: list[bool] = []

    def are_even(self, layouts: IntArray) -> NDArray[np.bool_]:
        """Whether each of some layouts has equal shards."""
        all_dims = self._layouts.known
        self._is_even += [self._paths.is_even(self._shape, dims) for dims in all_dims[len(self._is_even) :]]
        return np.array(self._is_even, np.bool_)[layouts]

    def between(self, start: IntArray, goal: IntArray, over: IntArray) -> tuple[list[Moves | None], IntArray]:
        """The distinct moves, and the index of the move of each pair of layouts.

        over: per pair, the axes of the partial sum to reduce. A move of None: XLA's partitioner ends its process.
        """
        first = np.full(len(start), self._intern_moves(()))
        summed = np.flatnonzero(over & self._real)
        if len(summed):
            start = start.copy()
            start[summed], first[summed] = self._reduce(start[summed], goal[summed], over[summed] & self._real)
        second = self._moves_between(start, goal)
        size = len(self._lists)
        codes, places = np.unique(first * size + second, return_inverse=True)
        lists = list(self._lists)
        return [_concatenate(lists[code // size], lists[code % size]) for code in codes.tolist()], places

    def _reduce(self, start: IntArray, goal: IntArray, over: IntArray) -> tuple[IntArray, IntArray]:
        """The layouts of reduced sums, and the indices of the moves."""
        landing = self._scatter_axes(start, self._slice_axes(start, goal), over)
        rows = np.column_stack([start, over, landing]).tolist()
        reductions = np.array([self._reduction(tuple(row)) for row in rows], np.int64)
        return reductions[:, 0], reductions[:, 1]

    def _reduction(self, key: tuple[int, ...]) -> tuple[int, int]:
        reduction = self._reductions.get(key)
        if reduction is None:
            start, over, *landing = key
            orders = list(self._orders)
            dims, moves = self._paths.reduce_partial(
                8, self._shape, self._layouts.known[start], self._axes(over), tuple(orders[place] for place in landing)
            )
            reduction = self._reductions[key] = self._layouts.number(dims), self._intern_moves(self._relative(moves))
        return reduction

    def _slice_axes(self, start: IntArray, goal: IntArray) -> IntArray:
        """[pairs, dimensions]: indices into `_orders`."""
        table = self._slices = _grow_table(self._slices, len(self._layouts.known))
        if table.shape[2]:
            for a, b, dims, wanted in self._missing(table[..., 0], start, goal):
                sliced = self._paths.slice_axes(self._shape, dims, wanted)
                table[a, b] = [self._intern_axes(axes) for axes in sliced]
        return table[start, goal].astype(np.int64)

    def _scatter_axes(self, start: IntArray, cutting: IntArray, over: IntArray) -> IntArray:
        """[pairs, dimensions]: indices into `_orders` of the axes of a reduce-scatter (`ReshardCache.scatter_axes`)."""
        if len(self._scattering) < len(self._orders):
            sums = [self._axes(bits) for bits in range(1 << len(self._bit_of))]
            rows = [
                [self._intern_axes(axes_to_scatter(axes, sum_axes)) for sum_axes in sums] for axes in list(self._orders)
            ]
            self._scattering = np.array(rows, np.int64)
        scattered: IntArray = self._scattering[cutting, over[:, None]]
        if self._may_be_uneven:
            bits = np.array([self._bits(axes) for axes in self._orders], np.int64)
            is_all = np.bitwise_or.reduce(bits[scattered], axis=1) == over
            scattered[~is_all & ~self.are_even(start)] = _NO_AXES
        return scattered

    def _intern_axes(self, axes: tuple[str, ...]) -> int:
        return self._orders.setdefault(axes, len(self._orders))

    def _moves_between(self, start: IntArray, goal: IntArray) -> IntArray:
        table = self._ways = _grow_table(self._ways, len(self._layouts.known))
        for a, b, dims, wanted in self._missing(table, start, goal):
            try:
                table[a, b] = self._intern_moves(self._relative(self._paths.moves(8, self._shape, dims, wanted)))
            except DividesByZero:
                table[a, b] = self._intern_moves(None)
        return table[start, goal].astype(np.int64)

    def _missing(self, table: NDArray[_Number], start: IntArray, goal: IntArray) -> list[tuple[int, int, Dims, Dims]]:
        """Pairs of layouts without an entry in a table, each once."""
        is_missing = table[start, goal] == _UNKNOWN
        pairs = dict.fromkeys(zip(start[is_missing].tolist(), goal[is_missing].tolist(), strict=True))
        layouts = self._layouts.known
        return [(a, b, layouts[a], layouts[b]) for a, b in pairs]

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
    count = len(table)
    if count >= size:
        return table
    grown = np.full((2 * size, 2 * size, *table.shape[2:]), _UNKNOWN, table.dtype)
    grown[:count, :count] = table
    return grown
