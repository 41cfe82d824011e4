"""Seconds of computing and resharding on one mesh, memoized.

The search asks for the same few thousand prices millions of times. Shardings are therefore interned to small integers,
and resharding prices come as matrices between lists of them. The collectives of a reshard depend on the array only
through its uneven dimensions (`many_moves` defines the kinds of arrays). Many pairs of shardings share the same
collectives: these are interned too, under the name *moves*, and priced once per array size. The formulas are those of
`shardwright.cost`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np
import numpy.ma  # by np.unique, when it is first called: a tenth of a second of the first plan
from numpy.typing import NDArray

from shardwright.clusters.cluster import Cluster
from shardwright.cost import (
    HardwareProfile,
    Topology,
    collective_time_s,
    compute_time_s,
    group_time_s,
    latency_share,
    reshard_time_s,
)
from shardwright.cost.compute import Traffic
from shardwright.cost.moves.move_table import Kind, LayoutIds, Moves, layout_ids_of
from shardwright.cost.moves.relayout import ANY_ORDER, MoveEnds, access_of, relayout_s
from shardwright.cost.moves.tilings import AtomOrder
from shardwright.cost.peak.memory import shard_bytes
from shardwright.hlo import ArrayShape, Instruction
from shardwright.plans.shardings import Mesh, TensorSharding

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

_UNKNOWN = -1
_NO_TABLE: IntArray = np.empty((0, 0), np.int64)
_NUMBER_OF_IMPOSSIBLE = 1
_IMPOSSIBLE: Moves = (("impossible", (), 0.0, None, None),)

#: Payloads of moves: `Moves` without the outermost dimensions.
Sent = tuple[tuple[str, AtomOrder, float], ...]
_IMPOSSIBLE_SENT: Sent = (("impossible", (), 0.0),)

#: Seconds of the first two lists of moves: none, and the impossible one.
_FREE_AND_IMPOSSIBLE = np.array([0.0, np.inf])


class Prices:
    """Prices of one mesh of one cluster.

    Interns shardings: `identify` gives an integer, `shardings[integer]` the sharding.
    """

    def __init__(self, mesh: Mesh, cluster: Cluster, profile: HardwareProfile) -> None:
        self.mesh = mesh
        self.profile = profile
        self.topology = Topology.of(cluster, profile)
        self.shardings: list[TensorSharding] = []
        self._ids: dict[TensorSharding, int] = {}
        self._bit_of = {axis.name: 1 << i for i, axis in enumerate(mesh.axes)}
        #: By the sharding's integer, sets of axes as bits: the axes that split it, and those of its partial sum.
        self._split = _Column()
        self._unreduced = _Column()
        self._layouts: dict[int, LayoutIds] = {}  # by rank
        self._layout = _Column()  # sums aside, as `LayoutIds` counts them
        self._place = _Column()  # among shardings of the same rank
        self._counts: Counter[int] = Counter()  # of shardings, by rank
        #: Per kind of arrays, by the places of source and target: the number of the moves.
        self._tables: dict[Kind, IntArray] = {}
        self._even: dict[tuple[tuple[int, ...], bytes], bool] = {}
        self._numbers: dict[Moves, int] = {(): 0, _IMPOSSIBLE: _NUMBER_OF_IMPOSSIBLE}
        self._lists: list[Moves] = list(self._numbers)
        #: What they send, interned too, and by the number of the moves.
        self._places: dict[Sent, int] = {(): 0, _IMPOSSIBLE_SENT: _NUMBER_OF_IMPOSSIBLE}
        self._collectives: list[Sent] = list(self._places)
        self._sent = _Column()
        for place in self._places.values():
            self._sent.append(place)
        self._priced: dict[tuple[int, int], FloatArray] = {}
        self._matrices: dict[tuple[str, tuple[int, ...], bool, bytes, bytes, float, int], FloatArray] = {}
        self._launching: dict[tuple[int, float], tuple[FloatArray, FloatArray]] = {}
        self.has_transposes = profile.compiler.runs("turns_moved")
        #: Seconds of bringing elements into another order, by the number of the moves; NaN: unknown.
        self._transposed: dict[tuple[str, tuple[int, ...], MoveEnds], FloatArray] = {}
        self._turning: dict[tuple[str, tuple[int, ...], bytes, bytes, float, MoveEnds], FloatArray | None] = {}
        self._sums: dict[tuple[int, int], tuple[FloatArray, FloatArray, FloatArray]] = {}
        self._stored: dict[tuple[str, tuple[int, ...]], FloatArray] = {}  # by the sharding's integer; NaN: unknown

    def identify(self, sharding: TensorSharding) -> int:
        """The interned integer of `sharding`."""
        number = self._ids.get(sharding)
        if number is None:
            number = self._ids[sharding] = len(self.shardings)
            self.shardings.append(sharding)
            self._split.append(sum(self._bit_of[axis] for axis in sharding.axes))
            self._unreduced.append(sum(self._bit_of[axis] for axis in sharding.unreduced))
            rank = len(sharding.dims)
            self._layout.append(self._layouts_of(rank).number(sharding.dims))
            self._place.append(self._counts[rank])
            self._counts[rank] += 1
        return number

    def summands(self, ids: IntArray) -> IntArray:
        """Number of partial sums in an array, per sharding; 1: a whole value."""
        return self._product(self._unreduced[ids])

    def summands_unscattered(self, sources: IntArray, targets: IntArray) -> IntArray:
        """Number of partial sums after reduction to the target sharding, scattered ones aside: sources × targets."""
        partial = self._unreduced[sources][:, None]
        scattered = partial & ~self._unreduced[targets][None, :] & self._split[targets][None, :]
        return self._product(partial & ~scattered)

    def bytes_per_device(self, shape: ArrayShape, ids: IntArray) -> FloatArray:
        """Bytes of one device's shard of an array in its own memory, per sharding of it."""
        if shape.is_on_host:
            return np.zeros(len(ids))
        key = shape.element_type, shape.dimensions
        stored_bytes = self._stored.get(key)
        if stored_bytes is None or len(stored_bytes) < len(self.shardings):
            grown = np.full(len(self.shardings), np.nan)
            if stored_bytes is not None:
                grown[: len(stored_bytes)] = stored_bytes
            stored_bytes = self._stored[key] = grown
        bytes_per_device: FloatArray = stored_bytes[ids]
        if np.isnan(bytes_per_device).any():
            for i in set(ids[np.isnan(bytes_per_device)].tolist()):
                stored_bytes[i] = shard_bytes(shape.element_type, shape.dimensions, self.shardings[i], self.mesh)
            bytes_per_device = stored_bytes[ids]
        return bytes_per_device

    def _product(self, axes: IntArray) -> IntArray:
        """The product of the sizes of sets of axes."""
        sizes = np.ones(axes.shape, np.int64)
        for axis in self.mesh.axes:
            sizes *= np.where(axes & self._bit_of[axis.name], axis.size, 1)
        return sizes

    def compute_s(
        self,
        instruction: Instruction,
        operands: Sequence[TensorSharding],
        results: Sequence[TensorSharding],
        *,
        ends_kernel: bool,
        traffic: Traffic | None = None,
    ) -> float:
        """Seconds of one execution; one sharding per array leaf of the operands and of the result.

        ends_kernel, traffic: see `cost.compute_time_s`.
        """
        inputs = [leaf for operand in instruction.operands for leaf in operand.shape.leaves]
        return compute_time_s(
            instruction,
            [s.shard_shape(leaf.dimensions, self.mesh) for leaf, s in zip(inputs, operands, strict=True)],
            [
                s.shard_shape(leaf.dimensions, self.mesh)
                for leaf, s in zip(instruction.shape.leaves, results, strict=True)
            ],
            self.profile,
            ends_kernel=ends_kernel,
            traffic=traffic,
        )

    def arrival_s(self, shape: ArrayShape, sharding: TensorSharding) -> float:
        """Seconds until one device has its shard of an array that comes from outside the cluster."""
        shard = ArrayShape(shape.element_type, sharding.shard_shape(shape.dimensions, self.mesh))
        return shard.size_bytes / self.topology.inter_node.bandwidth_bytes_per_s

    def write_s(self, shape: ArrayShape, shardings: Sequence[TensorSharding]) -> FloatArray:
        """Seconds of writing one device's shard of an array, per sharding of it."""
        bandwidth = self.profile.memory_bandwidth_bytes_per_s
        sizes = [
            ArrayShape(shape.element_type, sharding.shard_shape(shape.dimensions, self.mesh)).size_bytes
            for sharding in shardings
        ]
        return np.array(sizes, np.float64) / bandwidth

    def collective_s(self, kind: str, axes: tuple[str, ...], payload_bytes: int) -> float:
        """Seconds of one collective along `axes`."""
        return collective_time_s(kind, payload_bytes, axes, self.mesh, self.topology)

    def reshard_s(self, shape: ArrayShape, source: TensorSharding, target: TensorSharding) -> float:
        """Seconds to reshard an array from `source` (possibly partial) to `target`."""
        if source == target:
            return 0.0
        if not can_reshard(source, target):
            return np.inf
        seconds = reshard_time_s(shape.element_type, shape.dimensions, source, target, self.mesh, self.topology)
        return np.inf if shape.is_on_host and seconds > 0 else seconds

    def reshard_matrix(
        self, shape: ArrayShape, sources: IntArray, targets: IntArray, count: float, combinable_bytes: int = 0
    ) -> FloatArray:
        """Seconds of `count` moves from each of `sources` (rows) to each of `targets` (columns), by their integers.

        Infinity: the target is a partial sum over an axis that splits the source, or collectives would move an array on
        the host. combinable_bytes: total bytes a
        compiler may combine with a move (see `latency_share`).
        """
        kind = shape.element_type, shape.dimensions, shape.is_on_host
        key = (*kind, sources.tobytes(), targets.tobytes(), count, combinable_bytes)
        matrix = self._matrices.get(key)
        if matrix is None:
            moves = self._moves_between(shape, sources, targets)
            matrix = times(self._seconds(shape, combinable_bytes)[self._sent[moves]], count)
            if shape.is_on_host:  # collectives are between devices' memories
                matrix = np.where(matrix > 0, np.inf, matrix)
            self._matrices[key] = matrix
        return matrix

    def with_launch(self, matrix: FloatArray, count: float) -> FloatArray:
        """`count` moves of a value written for them alone, each with one more launch; equal matrices give the same
        one."""
        entry = self._launching.get((id(matrix), count))
        if entry is None:
            moved = np.where(matrix > 0, matrix + count * self.profile.launch_s, matrix)
            entry = self._launching[id(matrix), count] = matrix, moved  # with the matrix: its number stays its own
        return entry[1]

    def transpose_s(self, shape: ArrayShape, source: TensorSharding, target: TensorSharding, ends: MoveEnds) -> float:
        """Seconds of the transposes inside a reshard from one sharding to another."""
        if not self.has_transposes or source == target or ends == ANY_ORDER:
            return 0.0
        have, want = (np.array([self.identify(sharding)]) for sharding in (source, target))
        return float(self._transpose_seconds(shape, have, want, ends)[0, 0])

    def with_transposes(
        self, matrix: FloatArray, shape: ArrayShape, sources: IntArray, targets: IntArray, count: float, ends: MoveEnds
    ) -> FloatArray:
        """A matrix of moves (`reshard_matrix`) plus `count` times their transposes; equal matrices give the same
        one."""
        if not self.has_transposes or ends == ANY_ORDER:
            return matrix
        key = (shape.element_type, shape.dimensions, sources.tobytes(), targets.tobytes(), count, ends)
        if key not in self._turning:
            turned = self._transpose_seconds(shape, sources, targets, ends)
            self._turning[key] = count * turned if turned.any() else None
        turned_s = self._turning[key]
        if turned_s is None:
            return matrix
        entry = self._sums.get((id(matrix), id(turned_s)))
        if entry is None:  # with both matrices: their numbers stay their own
            entry = self._sums[id(matrix), id(turned_s)] = matrix, turned_s, matrix + turned_s
        return entry[2]

    def _transpose_seconds(self, shape: ArrayShape, sources: IntArray, targets: IntArray, ends: MoveEnds) -> FloatArray:
        """Seconds of transposes, once, and of writing values without other consumers."""
        numbers = self._moves_between(shape, sources, targets)
        key = shape.element_type, shape.dimensions, ends
        table = self._transposed.get(key)
        if table is None or len(table) < len(self._numbers):
            grown = np.full(2 * len(self._numbers), np.nan)
            if table is not None:
                grown[: len(table)] = table
            table = self._transposed[key] = grown
        seconds: FloatArray = table[numbers]
        if np.isnan(seconds).any():
            for number in np.unique(numbers[np.isnan(seconds)]).tolist():
                table[number] = self._relayout_s(self._lists[number], shape, ends)
            seconds = table[numbers]
        if not ends.is_fused:
            return seconds
        stored = self.bytes_per_device(shape, sources)[:, None] + self.bytes_per_device(shape, targets)[None, :]
        is_moved = (numbers > _NUMBER_OF_IMPOSSIBLE) & (self._unreduced[sources] == 0)[:, None]
        return seconds + np.where(is_moved, stored / self.profile.memory_bandwidth_bytes_per_s, 0.0)

    def _relayout_s(self, moves: Moves, shape: ArrayShape, ends: MoveEnds) -> float:
        """Seconds of a move's transpose kernels, mostly none."""
        is_in_order = all(reads is None and writes is None for *_, reads, writes in moves)
        if is_in_order and (ends.waits or all(kind != "all-reduce" for kind, *_ in moves)):
            return 0.0
        accesses = [
            access_of(kind, round(part * shape.size_bytes), atoms, reads, writes)
            for kind, atoms, part, reads, writes in moves
        ]
        return relayout_s(accesses, shape.dimensions, ends, self.profile)

    def _layouts_of(self, rank: int) -> LayoutIds:
        """The interned layouts of a rank; `_layout` holds their numbers."""
        layouts = self._layouts.get(rank)
        if layouts is None:
            layouts = self._layouts[rank] = layout_ids_of(self.mesh, rank)
        return layouts

    def _moves_between(self, shape: ArrayShape, sources: IntArray, targets: IntArray) -> IntArray:
        """The number of the moves between each pair."""
        layouts = self._layouts_of(shape.rank)
        is_even = self._is_even(shape, sources) and self._is_even(shape, targets)
        kind = layouts.even_kind if is_even else layouts.kind(shape.dimensions)
        table = self._table(kind)
        places = np.ix_(self._place[sources], self._place[targets])
        numbers = table[places]
        if (numbers == _UNKNOWN).any():
            self._learn(table, kind, np.unique(sources), np.unique(targets))
            numbers = table[places]
        return numbers

    def _learn(self, table: IntArray, kind: Kind, sources: IntArray, targets: IntArray) -> None:
        """Fill a table's unknown entries: the number of the moves between each pair."""
        rows, columns = np.nonzero(table[np.ix_(self._place[sources], self._place[targets])] == _UNKNOWN)
        have, want = sources[rows], targets[columns]
        moves = self._layouts_of(len(kind)).moves(kind)
        is_possible = (self._split[have] & self._unreduced[want]) == 0
        # A sum of uneven shards does not stay partial over some axes: its producer reduces it over all.
        keeps_sum = (have != want) & (self._unreduced[have] != 0) & (self._unreduced[want] != 0)
        is_possible &= ~keeps_sum | moves.are_even(self._layout[have])
        table[self._place[have[~is_possible]], self._place[want[~is_possible]]] = _NUMBER_OF_IMPOSSIBLE
        have, want = have[is_possible], want[is_possible]
        if len(have):
            over = self._unreduced[have] & ~self._unreduced[want]
            lists, places = moves.between(self._layout[have], self._layout[want], over)
            numbers = np.array([self._number_of(moves) for moves in lists], np.int64)
            table[self._place[have], self._place[want]] = numbers[places]

    def is_made_partial(self, sources: IntArray, targets: IntArray) -> NDArray[np.bool_]:
        """Whether a value whole along an axis would become a partial sum over it, per pair."""
        is_partial: NDArray[np.bool_] = (~self._unreduced[sources][:, None] & self._unreduced[targets]) != 0
        return is_partial

    def is_gathered(self, sources: IntArray, targets: IntArray, axes: Collection[str]) -> NDArray[np.bool_]:
        """Whether a value split over one of the axes would no longer be, per pair."""
        kept = sum(self._bit_of[axis] for axis in axes)
        is_lost: NDArray[np.bool_] = (self._split[sources][:, None] & ~self._split[targets] & kept) != 0
        return is_lost

    def _table(self, kind: Kind) -> IntArray:
        """The table of a kind of arrays, with room for every sharding of their rank interned by now."""
        size = self._counts[len(kind)]
        table = self._tables.get(kind, _NO_TABLE)
        if table.shape[0] < size:
            grown = np.full((2 * size, 2 * size), _UNKNOWN, np.int64)  # twice: shardings come one by one
            grown[: table.shape[0], : table.shape[0]] = table
            table = self._tables[kind] = grown
        return table

    def _is_even(self, shape: ArrayShape, ids: IntArray) -> bool:
        key = (shape.dimensions, ids.tobytes())
        is_even = self._even.get(key)
        if is_even is None:
            even = (self.shardings[i].is_even(shape.dimensions, self.mesh) for i in set(ids.tolist()))
            is_even = self._even[key] = all(even)
        return is_even

    def _number_of(self, moves: Moves | None) -> int:
        """The interned integer of moves; None: an impossible reshard."""
        if moves is None:
            return _NUMBER_OF_IMPOSSIBLE
        sent = tuple((kind, atoms, part) for kind, atoms, part, _, _ in moves)
        if not self.has_transposes:
            moves = tuple((*move, None, None) for move in sent)
        number = self._numbers.setdefault(moves, len(self._numbers))
        if number == len(self._lists):
            self._lists.append(moves)
            place = self._places.setdefault(sent, len(self._places))
            if place == len(self._collectives):
                self._collectives.append(sent)
            self._sent.append(place)
        return number

    def _seconds(self, shape: ArrayShape, combinable_bytes: int) -> FloatArray:
        """Seconds of every known list of moves for an array of this size."""
        key = shape.size_bytes, combinable_bytes
        seconds = self._priced.get(key, _FREE_AND_IMPOSSIBLE)
        if len(seconds) < len(self._collectives):
            fresh = [self._price(moves, *key) for moves in self._collectives[len(seconds) :]]
            seconds = self._priced[key] = np.concatenate([seconds, fresh])
        return seconds

    def _price(self, moves: Sent, size_bytes: int, combinable_bytes: int) -> float:
        total_s = 0.0
        for kind, atoms, part in moves:
            payload_bytes = round(part * size_bytes)
            share = latency_share(kind, payload_bytes, atoms, self.topology, combinable_bytes)
            total_s += group_time_s(kind, payload_bytes, atoms, self.mesh, self.topology, share)
        return total_s


class _Column:
    """A number for each sharding, looked up for many at once."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._known: IntArray = np.empty(0, np.int64)

    def append(self, number: int) -> None:
        self._numbers.append(number)

    def __getitem__(self, ids: IntArray) -> IntArray:
        if len(self._known) < len(self._numbers):
            self._known = np.array(self._numbers, np.int64)
        return self._known[ids]


def can_reshard(source: TensorSharding, target: TensorSharding) -> bool:
    """Whether an array can be resharded from `source` to `target`.

    A whole value may become a partial sum (one device keeps it, the others take zeros); a split one may not.
    """
    return not set(target.unreduced).intersection(source.axes)


def times(seconds: FloatArray, count: float) -> FloatArray:
    """`seconds`, `count` times; infinity stays infinity, even at a count of 0."""
    return np.where(np.isinf(seconds), np.inf, count * np.where(np.isinf(seconds), 0.0, seconds))
