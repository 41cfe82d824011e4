"""PS and PSLoadBalancing: parameter servers, as their sharded equivalent.

A server that owns a variable receives every device's gradient, updates, and sends the variable to all. When every
device owns an equal part of it, each sends and receives the same bytes, no link is the bottleneck, and memory and
update are shared out: ZeRO-1 (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", 2020).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwright.builders.base import Synchronous, largest_even_dim
from shardwright.builders.variables import Variable
from shardwright.clusters.cluster import Cluster
from shardwright.plans.variable_strategy import VariableStrategy


class PS(Synchronous):
    """Parameter servers, as ZeRO-1: every device keeps the variables, and updates its part of each.

    A variable that the devices do not split evenly in any dimension is all-reduced.

    local_proxy_variable: False: devices keep their part of the variable only, and gather it where they use it (FSDP).
    sync, staleness: True and 0; see `Synchronous`.
    """

    def __init__(self, local_proxy_variable: bool = True, *, sync: bool = True, staleness: int = 0) -> None:
        super().__init__(sync=sync, staleness=staleness)
        self.local_proxy_variable = local_proxy_variable

    def build(self, variables: Sequence[Variable], cluster: Cluster) -> Mapping[str, VariableStrategy]:
        return {
            variable.name: VariableStrategy(
                split=(split := largest_even_dim(variable, cluster.device_count)),
                local_copy=split is not None and self.local_proxy_variable,
            )
            for variable in variables
        }

    def notes(self, strategies: Mapping[str, VariableStrategy]) -> Sequence[str]:
        split = sum(strategy.split is not None for strategy in strategies.values())
        what = "their optimizer state (ZeRO-1)" if self.local_proxy_variable else "them and their state (FSDP)"
        whole = len(strategies) - split
        left = f"; {whole} that they do not divide are all-reduced" if whole else ""
        note = (
            f"{self.name}: no device is the server of a variable: of {split} variables all devices share "
            f"{what}, the bytes of parameter servers without a busiest one{left}"
        )
        return [note]


class PSLoadBalancing(PS):
    """The same: with every variable shared out evenly, all loads are equal."""
