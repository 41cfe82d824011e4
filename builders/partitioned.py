"""Variables in parts: along their first dimension, evenly or not, or along one drawn at random."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from shardwright.builders.base import Builder, Synchronous, first_even_dim
from shardwright.builders.variables import Variable
from shardwright.clusters.cluster import Cluster
from shardwright.plans.variable_strategy import VariableStrategy


class PartitionedPS(Synchronous):
    """Every variable in equal parts over all devices, along its first dimension that they divide.

    A variable without one is all-reduced.

    local_proxy_variable: True: each device keeps all of the variable, and updates its part (ZeRO-1); False: it keeps
        its part, and gathers the variable where it is used (FSDP).
    sync, staleness: True and 0; see `Synchronous`.
    """

    def __init__(self, local_proxy_variable: bool = False, *, sync: bool = True, staleness: int = 0) -> None:
        super().__init__(sync=sync, staleness=staleness)
        self.local_proxy_variable = local_proxy_variable

    def build(self, variables: Sequence[Variable], cluster: Cluster) -> Mapping[str, VariableStrategy]:
        splits = {variable.name: self._dim(variable, cluster.device_count) for variable in variables}
        return {
            name: VariableStrategy(split=dim, local_copy=dim is not None and self.local_proxy_variable)
            for name, dim in splits.items()
        }

    def notes(self, strategies: Mapping[str, VariableStrategy]) -> Sequence[str]:
        split = sum(strategy.split is not None for strategy in strategies.values())
        what = "the optimizer state (ZeRO-1)" if self.local_proxy_variable else "variables and optimizer state (FSDP)"
        return [f"{self.name}: of {split} of {len(strategies)} variables, all devices share {what}"]

    def _dim(self, variable: Variable, devices: int) -> int | None:
        return first_even_dim(variable, devices)


class UnevenPartitionedPS(PartitionedPS):
    """Every variable in parts along its first dimension of more than one element, whether the devices divide it or not.

    An uneven one is stored padded.
    """

    def _dim(self, variable: Variable, devices: int) -> int | None:
        return next((dim for dim, size in enumerate(variable.shape) if size > 1), None)


class PartitionedAR(Builder):
    """Every variable in equal parts along its first dimension that the devices divide; no device keeps all of it.

    AutoDist all-reduces the parts, so that their sums can overlap. Here each device keeps one part, and the sums are
    reduce-scatters: half the bytes, and less memory.

    bucket: as of `AllReduce`.
    """

    def __init__(self, bucket: int | str | None = None) -> None:
        self.bucket = bucket

    def build(self, variables: Sequence[Variable], cluster: Cluster) -> Mapping[str, VariableStrategy]:
        return {
            variable.name: VariableStrategy(split=self._dim(variable, cluster.device_count)) for variable in variables
        }

    def notes(self, strategies: Mapping[str, VariableStrategy]) -> Sequence[str]:
        split = sum(strategy.split is not None for strategy in strategies.values())
        note = (
            f"{self.name}: each device keeps one part of {split} of {len(strategies)} variables; gradients of those "
            "are reduce-scattered instead of all-reduced in parts"
        )
        return [note]

    def _dim(self, variable: Variable, devices: int) -> int | None:
        return first_even_dim(variable, devices)


class RandomAxisPartitionAR(PartitionedAR):
    """The same along a dimension drawn from those that the devices divide; of a sparse variable along its rows.

    seed: of the draw; equal seeds and names draw equal dimensions. bucket: as of `AllReduce`.
    """

    def __init__(self, seed: int = 0, bucket: int | str | None = None) -> None:
        super().__init__(bucket)
        self.seed = seed

    def _dim(self, variable: Variable, devices: int) -> int | None:
        dims = variable.even_dims(devices)
        if not dims or (variable.is_sparse and dims[0] == 0):
            return first_even_dim(variable, devices)
        return random.Random(f"{self.seed} {variable.name}").choice(dims)
