"""Lower bounds on resharding prices for arrays of many dimensions.

On three axes an array of four dimensions (attention) has hundreds of layouts. Following XLA's partitioner for every
pair of them takes longer than the rest of a bound; so do lengths not divisible by the axes, each with moves of its
own. For these arrays the bound counts the bytes a device must receive, for all pairs at once:

- Axes of a reduced sum: a reduce-scatter over axes of the target, at the cheapest set of them; an all-reduce of the
  remainder over the others.
- Then the missing part of the target's shard, on the device that misses least, over the fastest link to a holder.

No collective takes fewer bytes than its members receive: every price here is at most the partitioner's
(`tests/planner/costs/test_relaxed_prices.py` compares all pairs on several meshes).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from copy import copy
from math import prod

import numpy as np
from numpy.typing import NDArray

from shardwright.clusters.cluster import Cluster
from shardwright.cost import HardwareProfile, collective_time_s
from shardwright.cost.moves.device_groups import device_groups
from shardwright.cost.moves.relayout import MoveEnds
from shardwright.hlo import ArrayShape
from shardwright.planner.costs.prices import FloatArray, IntArray, Prices, times
from shardwright.planner.tuning import EXACT_RANK
from shardwright.plans.shardings import Mesh, MeshAxis, has_rotated_axes

#: Payloads between which a collective's time is a straight line: far more than latencies matter for.
_LARGE = (1 << 40, 1 << 41)

#: What differences of large numbers may be off by.
_ROUNDING = 1e-12

#: Part of an even shard that some padded one has at least, however few the last one has.
_MIN_ELEMENTS = 0.5

#: The axes of a set, in the order in which they split a dimension.
_InOrder = Callable[[int], list[MeshAxis]]

#: Roles of an axis in an array, besides the number of the dimension it splits.
_SUM, _IDLE = -1, -2


class RelaxedPrices(Prices):
    """Prices of one mesh; most of them are lower bounds.

    even_rank: highest rank with exact prices of moves between even shards.
    uneven_rank: the same for moves from or to uneven shards.
    """

    def __init__(
        self,
        mesh: Mesh,
        cluster: Cluster,
        profile: HardwareProfile,
        *,
        even_rank: int = EXACT_RANK,
        uneven_rank: int = 0,
    ) -> None:
        super().__init__(mesh, cluster, profile)
        self.even_rank = even_rank
        self.uneven_rank = uneven_rank
        self._least: dict[Hashable, FloatArray] = {}
        self._counted: dict[Hashable, FloatArray] = {}
        self._even_of: dict[tuple[tuple[int, ...], bytes], NDArray[np.bool_]] = {}
        self._lines = _LinearBounds(self)
        self._combined_lines = _LinearBounds(self, with_latency=False) if self.topology.combiner_limits else self._lines

    def with_exact_rank(self, rank: int) -> RelaxedPrices:
        """The same interned shardings, with exact moves up to this rank."""
        prices = copy(self)
        prices.even_rank, prices.uneven_rank, prices._least, prices._counted = rank, rank, {}, {}
        return prices

    def reshard_matrix(
        self, shape: ArrayShape, sources: IntArray, targets: IntArray, count: float, combinable_bytes: int = 0
    ) -> FloatArray:
        """Lower bound on the seconds of `count` moves from `sources` (rows) to `targets` (columns)."""
        even_sources, even_targets = self._even_ids(shape, sources), self._even_ids(shape, targets)
        is_even = bool(even_sources.all() and even_targets.all())
        is_exact = shape.rank <= self.even_rank
        if shape.rank <= self.uneven_rank or (is_exact and is_even):
            return super().reshard_matrix(shape, sources, targets, count, combinable_bytes)
        what = shape.rank if is_even and not is_exact else shape.dimensions
        lines = self._combined_lines if combinable_bytes else self._lines
        key = (what, shape.size_bytes, combinable_bytes, is_even, *map(bytes, (sources, targets)))
        seconds = self._least.get(key)
        if seconds is None:
            seconds = self._min_seconds(shape, sources, targets, lines, is_even=is_even)
            if is_exact:  # as many moves as arrays have that every axis divides: they are followed for those anyway
                pairs = np.ix_(even_sources, even_targets)
                evenly = sources[even_sources], targets[even_targets]
                seconds[pairs] = super().reshard_matrix(shape, *evenly, 1.0, combinable_bytes)
            self._least[key] = seconds
        counted = self._counted.get((key, count))
        if counted is None:
            counted = self._counted[key, count] = times(seconds, count)
        return counted

    def with_transposes(
        self, matrix: FloatArray, shape: ArrayShape, sources: IntArray, targets: IntArray, count: float, ends: MoveEnds
    ) -> FloatArray:
        """`Prices.with_transposes` for exact moves; the matrix unchanged for others."""
        is_even = bool(self._even_ids(shape, sources).all() and self._even_ids(shape, targets).all())
        if shape.rank <= self.uneven_rank or (shape.rank <= self.even_rank and is_even):
            return super().with_transposes(matrix, shape, sources, targets, count, ends)
        return matrix

    def _even_ids(self, shape: ArrayShape, ids: IntArray) -> NDArray[np.bool_]:
        """Whether each sharding splits an array into equal shards."""
        key = (shape.dimensions, ids.tobytes())
        is_even = self._even_of.get(key)
        if is_even is None:
            even = [self.shardings[i].is_even(shape.dimensions, self.mesh) for i in ids.tolist()]
            is_even = self._even_of[key] = np.array(even, np.bool_)
        return is_even

    def _min_seconds(
        self, shape: ArrayShape, sources: IntArray, targets: IntArray, lines: _LinearBounds, *, is_even: bool
    ) -> FloatArray:
        have, want = self._roles(sources)[:, None, :], self._roles(targets)[None, :, :]
        summed, split, unreduced, wanted = _bits(have == _SUM), _bits(have >= 0), _bits(want == _SUM), _bits(want >= 0)
        reduced = summed & ~unreduced
        split_by = [(_bits(have == dim), _bits(want == dim)) for dim in range(shape.rank)]
        landing = reduced & wanted
        for size, (before, after) in zip(shape.dimensions, split_by, strict=True):  # padding is never scattered
            is_padded = (lines.parts[before] != lines.parts[after]) & (size % lines.parts[after] != 0)
            landing = np.where(is_padded, 0, landing)
        size_bytes = max(0, shape.size_bytes - 2 * self.mesh.device_count)  # prices round to bytes, more than once
        out_of_order = self._rotation_flags(sources)[:, None], self._rotation_flags(targets)[None, :]
        seconds = lines.min_reduce_s(size_bytes)[split, reduced, landing]
        overlap = np.ones(seconds.shape)
        for before, after in split_by:
            overlap *= lines.overlap[*out_of_order, before, after & ~landing]
        missing = size_bytes / lines.parts[wanted] * (1 - overlap)
        if not is_even:  # shards on other devices may be the last ones, with much padding
            missing = np.where(overlap > 0, missing, self._min_elements(shape) * missing)
        seconds = seconds + np.where(overlap < 1, lines.min_receive_s(missing, split | landing), 0.0)
        return np.where(split & unreduced != 0, np.inf, seconds)

    def _min_elements(self, shape: ArrayShape) -> float:
        """Lower bound on the last shard's size, relative to an even shard."""
        sizes = self._lines.parts
        last = [size - (parts - 1) * -(-size // parts) for size in shape.dimensions for parts in sizes.tolist()]
        even = [size / parts for size in shape.dimensions for parts in sizes.tolist()]
        least: float = min(a / b for a, b in zip(last, even, strict=True))
        return max(_MIN_ELEMENTS, least)

    def _rotation_flags(self, ids: IntArray) -> IntArray:
        """[shardings]: 1 for axes out of mesh order (`axis_order`)."""
        return np.array([int(has_rotated_axes(self.shardings[number], self.mesh)) for number in ids.tolist()], np.int64)

    def _roles(self, ids: IntArray) -> IntArray:
        """[shardings, axes]: the dimension each axis splits; else `_SUM` or `_IDLE`."""
        numbers = {axis.name: i for i, axis in enumerate(self.mesh.axes)}
        roles = np.full((len(ids), len(numbers)), _IDLE)
        for row, number in enumerate(ids.tolist()):
            sharding = self.shardings[number]
            for dim, axes in enumerate((*sharding.dims, sharding.unreduced)):
                for axis in axes:
                    roles[row, numbers[axis]] = dim if dim < len(sharding.dims) else _SUM
        return roles


class _LinearBounds:
    """Linear lower bounds on the seconds of collectives over sets of mesh axes.

    Sets of axes are bits.

    parts: devices per set.
    overlap: fraction of a device's new shard that every device holds, for a dimension split by one set before and
        another one after; indexed first by each side's rotation (`axis_order`).
    with_latency: False for bytes a compiler combines with many others: their latency vanishes.
    """

    def __init__(self, prices: Prices, *, with_latency: bool = True) -> None:
        self._prices = prices
        self._with_latency = with_latency
        self._sets = 1 << len(prices.mesh.axes)
        self.parts = np.array([prod(axis.size for axis in self._axes(bits)) for bits in range(self._sets)])
        orders = [self._axes, self._rotate_axes]
        self.overlap = np.array([[self._overlaps(before, after) for after in orders] for before in orders])
        self._scatter = np.array([self._by_steps(bits) for bits in range(self._sets)])
        self._sum = np.array([self._line("all-reduce", bits) for bits in range(self._sets)])
        self._fastest = np.array([self._fastest_link(bits) for bits in range(self._sets)])

    def min_reduce_s(self, size_bytes: int) -> FloatArray:
        """[axes that split it, axes to reduce over, axes to scatter over at most]: lower bound on the seconds of a
        reduction.
        """
        split, reduced, landing = np.indices((self._sets,) * 3)
        held = size_bytes / self.parts[split]
        best: FloatArray = np.full(held.shape, np.inf)
        for bits in range(self._sets):
            rest = self._sum[reduced & ~bits]
            scatter = self._scatter[bits]
            seconds: FloatArray = scatter[0] + rest[..., 0] + held * (scatter[1] + rest[..., 1] / self.parts[bits])
            np.minimum(best, seconds, out=best, where=bits & ~landing == 0)
        return best

    def min_receive_s(self, missing: FloatArray, over: IntArray) -> FloatArray:
        """Lower bound on the seconds to receive `missing` bytes from devices that differ along the axes `over`."""
        seconds: FloatArray = self._fastest[over, 0] + missing * self._fastest[over, 1]
        return seconds

    def _axes(self, bits: int) -> list[MeshAxis]:
        return [axis for i, axis in enumerate(self._prices.mesh.axes) if bits >> i & 1]

    def _rotate_axes(self, bits: int) -> list[MeshAxis]:
        axes = self._axes(bits)
        return axes[1:] + axes[:1] if bits & 1 else axes

    def _overlaps(self, before: _InOrder, after: _InOrder) -> list[list[float]]:
        """[sets before, sets after]: one set divides the other's parts only with the same beginning."""
        return [[self._overlap(before(a), after(b), a & ~b) for b in range(self._sets)] for a in range(self._sets)]

    def _overlap(self, before: list[MeshAxis], after: list[MeshAxis], dropped_axes: int) -> float:
        if after[: len(before)] == before:
            return 1.0
        return float(1.0 / self.parts[dropped_axes]) if before[: len(after)] == after else 0.0

    def _by_steps(self, bits: int) -> tuple[float, float]:
        """Linear bound below a reduce-scatter over these axes, in one or several steps."""
        latency_s, per_byte = self._line("reduce-scatter", bits)
        for part in range(1, bits):
            if part & ~bits == 0:
                first, then = self._line("reduce-scatter", part), self._by_steps(bits & ~part)
                latency_s = min(latency_s, first[0] + then[0])
                per_byte = min(per_byte, first[1] + then[1] / float(self.parts[part]))
        return latency_s, per_byte

    def _line(self, kind: str, bits: int) -> tuple[float, float]:
        """Seconds of an empty payload, and seconds per byte."""
        if not bits:
            return 0.0, 0.0
        names = tuple(axis.name for axis in self._axes(bits))
        mesh, topology = self._prices.mesh, self._prices.topology
        first, second = (collective_time_s(kind, size, names, mesh, topology) for size in _LARGE)
        per_byte = (second - first) / (_LARGE[1] - _LARGE[0])
        latency_s = first - per_byte * _LARGE[0] * (1 + _ROUNDING)
        return max(0.0, latency_s) if self._with_latency else 0.0, per_byte

    def _fastest_link(self, bits: int) -> tuple[float, float]:
        """Latency and seconds per byte of the fastest link between devices that differ along these axes."""
        topology = self._prices.topology
        inside, between = topology.intra_node, topology.inter_node
        nodes = [node for node, count in enumerate(topology.devices_per_node) for _ in range(count)]
        groups = device_groups(tuple(axis.name for axis in self._axes(bits)), self._prices.mesh)
        is_inside = any(len({nodes[device] for device in group}) < len(group) for group in groups)
        bandwidth = inside.bandwidth_bytes_per_s
        if not is_inside:
            bandwidth = min(bandwidth, between.bandwidth_bytes_per_s)
        latency_s = (inside if is_inside else between).latency_s if self._with_latency else 0.0
        return latency_s, 1 / (bandwidth * topology.efficiency)


def _bits(membership: np.ndarray) -> IntArray:
    """Sets of axes as bits; the last dimension runs over axes."""
    bits: IntArray = (membership << np.arange(membership.shape[-1])).sum(axis=-1)
    return bits
