"""PS and PSLoadBalancing: parameter servers, as their sharded equivalent.

A variable's server receives every device's gradient, updates, and sends the variable to all. With an equal part on each
device all send and receive the same bytes, no link is the bottleneck, and memory and update are divided: ZeRO-1
(Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwright.builders.base import Synchronous, largest_even_dim
from shardwright.builders.variables import Variable
from shardwright.clusters.cluster import Cluster
from shardwright.plans.variable_strategy import VariableStrategy


class PS(Synchronous):
    """Parameter servers by ZeRO-1: every device keeps the variables, and updates its part of each.

    A variable without an even dimension is all-reduced.

    local_proxy_variable: False: devices keep only their part of a variable, and gather it at each use (FSDP).
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
        remainder = f"; {whole} that they do not divide are all-reduced" if whole else ""
        note = (
            f"{self.name}: no device is the server of a variable: of {split} variables all devices share "
            f"{what}, the bytes of parameter servers without a busiest one{remainder}"
        )
        return [note]


class PSLoadBalancing(PS):
    """The same as PS: with every variable split evenly, all loads are equal."""
