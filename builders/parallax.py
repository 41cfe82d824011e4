"""Parallax: embedding tables split by rows, everything else all-reduced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwright.builders.base import Builder
from shardwright.builders.variables import Variable
from shardwright.clusters.cluster import Cluster
from shardwright.plans.variable_strategy import VariableStrategy


class Parallax(Builder):
    """Sparse variables split by rows over all devices, dense ones whole and all-reduced.

    Kim et al., "Parallax: Sparsity-aware Data Parallel Training of Deep Neural Networks" (2019): of a table only the
    batch's rows are exchanged. An uneven number of rows is stored padded.

    bucket: see `AllReduce`.
    """

    def __init__(self, bucket: int | str | None = None) -> None:
        self.bucket = bucket

    def build(self, variables: Sequence[Variable], cluster: Cluster) -> Mapping[str, VariableStrategy]:
        return {variable.name: VariableStrategy(split=0 if variable.is_sparse else None) for variable in variables}

    def notes(self, strategies: Mapping[str, VariableStrategy]) -> Sequence[str]:
        tables = [name for name, strategy in strategies.items() if strategy.split is not None]
        if not tables:
            return ["Parallax: no variable is read by lookups alone: all are all-reduced"]
        return [f"Parallax: {', '.join(tables)} in parts by rows, the other variables all-reduced"]
