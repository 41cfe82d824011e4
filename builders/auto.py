"""Auto: the planner's search, beside the builders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwright.builders.all_reduce import AllReduce
from shardwright.builders.base import Builder
from shardwright.builders.parallax import Parallax
from shardwright.builders.partitioned import PartitionedAR, PartitionedPS, UnevenPartitionedPS
from shardwright.builders.sharded_optimizer import PS
from shardwright.builders.variables import Variable
from shardwright.clusters.cluster import Cluster
from shardwright.errors import OptionError
from shardwright.plans.variable_strategy import VariableStrategy


class Auto(Builder):
    """The fastest plan by prediction: of the search over all layouts, and of the builders, each planned once.

    The search alone is `force=None`; it hardly ever loses to a builder. Auto compares all of them.

    builders: the compared ones; default: all of this package's but the random one. bucket: see `AllReduce`; of the
        search and of builders without one.
    """

    def __init__(self, builders: Sequence[Builder] | None = None, bucket: int | str | None = None) -> None:
        self.bucket = bucket
        self.builders = _all_builders() if builders is None else tuple(builders)
        for builder in self.builders:
            if not isinstance(builder, Builder) or isinstance(builder, Auto):
                raise OptionError(
                    f"{builder!r} is no builder to compare", where="Auto(builders=)", remedy="e.g. [PS()]"
                )

    def build(self, variables: Sequence[Variable], cluster: Cluster) -> Mapping[str, VariableStrategy]:
        raise OptionError("Auto chooses a plan, not strategies", where="Auto", remedy="pass it as force=")


def _all_builders() -> tuple[Builder, ...]:
    proxies = (PS(), PartitionedPS(local_proxy_variable=True), PartitionedPS(local_proxy_variable=False))
    return (AllReduce(), *proxies, UnevenPartitionedPS(), PartitionedAR(), Parallax())
