"""Seconds of computing and resharding on one mesh, with every answer remembered.

The search asks for the same few thousand prices millions of times: shardings are
interned to small integers, and resharding prices come as matrices between lists
of them. The formulas are `shardwright.cost`'s; nothing is priced here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shardwright.cluster import Cluster
from shardwright.cost import HardwareProfile, Topology, compute_time_s, reshard_time_s
from shardwright.hlo import ArrayShape, Instruction
from shardwright.plans import Mesh, TensorSharding

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


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
        self._matrices: dict[tuple[str, tuple[int, ...], bytes, bytes, float], FloatArray] = {}
        self._pairs: dict[tuple[str, tuple[int, ...]], dict[tuple[int, int], float]] = {}

    def identify(self, sharding: TensorSharding) -> int:
        """The integer that stands for `sharding`."""
        number = self._ids.get(sharding)
        if number is None:
            number = self._ids[sharding] = len(self.shardings)
            self.shardings.append(sharding)
        return number

    def compute_s(
        self, instruction: Instruction, operands: Sequence[TensorSharding], results: Sequence[TensorSharding]
    ) -> float:
        """Seconds of one execution; one sharding per array leaf of the operands and of the result."""
        inputs = [leaf for operand in instruction.operands for leaf in operand.shape.leaves]
        return compute_time_s(
            instruction,
            [s.shard_shape(leaf.dimensions, self.mesh) for leaf, s in zip(inputs, operands, strict=True)],
            [
                s.shard_shape(leaf.dimensions, self.mesh)
                for leaf, s in zip(instruction.shape.leaves, results, strict=True)
            ],
            self.profile,
        )

    def arrival_s(self, shape: ArrayShape, sharding: TensorSharding) -> float:
        """Seconds until one device has its shard of an array that comes from outside the cluster."""
        shard = ArrayShape(shape.element_type, sharding.shard_shape(shape.dimensions, self.mesh))
        return shard.size_bytes / self.topology.inter_node.bandwidth_bytes_per_s

    def reshard_s(self, shape: ArrayShape, source: TensorSharding, target: TensorSharding) -> float:
        """Seconds to bring an array from `source` (which may be partial) to `target`."""
        if source == target:
            return 0.0
        if not set(target.unreduced) <= set(source.unreduced):
            return np.inf
        return reshard_time_s(shape.element_type, shape.dimensions, source, target, self.mesh, self.topology)

    def reshard_matrix(self, shape: ArrayShape, sources: IntArray, targets: IntArray, times: float) -> FloatArray:
        """Seconds of `times` moves from each of `sources` (rows) to each of `targets` (columns), by their integers.

        Infinity where the target is a partial sum and the source is not one over the same axes.
        """
        key = (shape.element_type, shape.dimensions, sources.tobytes(), targets.tobytes(), times)
        matrix = self._matrices.get(key)
        if matrix is None:
            rows, row_of = np.unique(sources, return_inverse=True)
            columns, column_of = np.unique(targets, return_inverse=True)
            distinct = np.array([[self._pair_s(shape, i, j) for j in columns.tolist()] for i in rows.tolist()]).reshape(
                len(rows), len(columns)
            )
            matrix = self._matrices[key] = _times(distinct, times)[np.ix_(row_of, column_of)]
        return matrix

    def _pair_s(self, shape: ArrayShape, source: int, target: int) -> float:
        pairs = self._pairs.setdefault((shape.element_type, shape.dimensions), {})
        found = pairs.get((source, target))
        if found is None:
            found = self.reshard_s(shape, self.shardings[source], self.shardings[target])
            pairs[source, target] = found
        return found


def _times(seconds: FloatArray, times: float) -> FloatArray:
    """`seconds` repeated; what is impossible stays so even if it is never done."""
    return np.where(np.isinf(seconds), np.inf, times * np.where(np.isinf(seconds), 0.0, seconds))
