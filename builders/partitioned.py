"""Sharded variables: along their first dimension, evenly or not, or along a random one."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from shardwright.builders.base import Builder, Synchronous, first_even_dim
from shardwright.builders.variables import Variable
from shardwright.clusters.cluster import Cluster
from shardwright.plans.variable_strategy import VariableStrategy


class PartitionedPS(Synchronous):
    """Every variable split evenly over all devices, along its first even dimension.

    A variable without an even dimension is all-reduced.

    local_proxy_variable: True: each device keeps all of the variable, and updates its part (ZeRO-1); False: it keeps
        its part, and gathers the variable at each use (FSDP).
    sync, staleness: True and 0; see `Synchronous`.
    """

    def __init__(self, local_proxy_variable: bool = False, *, sync: bool = True, staleness: int = 0) -> None:
        super().__init__(sync=sync, staleness=staleness)
        self.local_proxy_variable = local_proxy_variable

    def build(self, variables: Sequence[Variable], cluster: Cluster) -> Mapping[str, VariableStrategy]:
        splits = {variable.name: self._choose_dim(variable, cluster.device_count) for variable in variables}
        return {
            name: VariableStrategy(split=dim, local_copy=dim is not None and self.local_proxy_variable)
            for name, dim in splits.items()
        }

    def notes(self, strategies: Mapping[str, VariableStrategy]) -> Sequence[str]:
        split = sum(strategy.split is not None for strategy in strategies.values())
        what = "the optimizer state (ZeRO-1)" if self.local_proxy_variable else "variables and optimizer state (FSDP)"
        return [f"{self.name}: of {split} of {len(strategies)} variables, all devices share {what}"]

    def _choose_dim(self, variable: Variable, devices: int) -> int | None:
        return first_even_dim(variable, devices)


class UnevenPartitionedPS(PartitionedPS):
    """Every variable split along its first dimension of more than one element, evenly or not.

    An uneven one is stored padded.
    """

    def _choose_dim(self, variable: Variable, devices: int) -> int | None:
        return next((dim for dim, size in enumerate(variable.shape) if size > 1), None)


class PartitionedAR(Builder):
    """Every variable split evenly along its first even dimension; no device keeps all of it.

    AutoDist all-reduces the parts, to overlap their sums. Here each device keeps one part, and the sums are
    reduce-scatters: half the bytes, and less memory.

    bucket: see `AllReduce`.
    """

    def __init__(self, bucket: int | str | None = None) -> None:
        self.bucket = bucket

    def build(self, variables: Sequence[Variable], cluster: Cluster) -> Mapping[str, VariableStrategy]:
        return {
            variable.name: VariableStrategy(split=self._choose_dim(variable, cluster.device_count))
            for variable in variables
        }

    def notes(self, strategies: Mapping[str, VariableStrategy]) -> Sequence[str]:
        split = sum(strategy.split is not None for strategy in strategies.values())
        note = (
            f"{self.name}: each device keeps one part of {split} of {len(strategies)} variables; gradients of those "
            "are reduce-scattered instead of all-reduced in parts"
        )
        return [note]

    def _choose_dim(self, variable: Variable, devices: int) -> int | None:
        return first_even_dim(variable, devices)


class RandomAxisPartitionAR(PartitionedAR):
    """The same along a random even dimension; of a sparse variable along its rows.

    seed: of the draw; equal seeds and names draw equal dimensions. bucket: see `AllReduce`.
    """

    def __init__(self, seed: int = 0, bucket: int | str | None = None) -> None:
        super().__init__(bucket)
        self.seed = seed

    def _choose_dim(self, variable: Variable, devices: int) -> int | None:
        dims = variable.even_dims(devices)
        if not dims or (variable.is_sparse and dims[0] == 0):
            return first_even_dim(variable, devices)
        return random.Random(f"{self.seed} {variable.name}").choice(dims)
