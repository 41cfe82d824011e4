"""Strategy builders: a strategy for every variable of a step, from its shape, its optimizer slots and the cluster.

Public as `shardwright.strategies`, after the strategy builders of AutoDist (Zhang et al., "AutoSync: Learning to
Synchronize for Data-Parallel Distributed Deep Learning", 2020). A builder gives each variable a `VariableStrategy`. The
strategies become pins of arguments (`force=`, `rest="data"`) and an entry of the plan's document.

Reading order: reads (data flow from a variable to the loss) → variables → base (a builder) → the builders, a file a
kind → choices (from a builder to options of plans) → staleness.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwright.builders.all_reduce import AllReduce
    from shardwright.builders.auto import Auto
    from shardwright.builders.base import Builder
    from shardwright.builders.given import Given, load
    from shardwright.builders.parallax import Parallax
    from shardwright.builders.partitioned import (
        PartitionedAR,
        PartitionedPS,
        RandomAxisPartitionAR,
        UnevenPartitionedPS,
    )
    from shardwright.builders.sharded_optimizer import PS, PSLoadBalancing
    from shardwright.builders.staleness import stale
    from shardwright.builders.variables import Variable
    from shardwright.plans.variable_strategy import VariableStrategy

#: Public name → its module.
_LAZY = {
    "AllReduce": "shardwright.builders.all_reduce",
    "Auto": "shardwright.builders.auto",
    "Builder": "shardwright.builders.base",
    "Given": "shardwright.builders.given",
    "PS": "shardwright.builders.sharded_optimizer",
    "PSLoadBalancing": "shardwright.builders.sharded_optimizer",
    "Parallax": "shardwright.builders.parallax",
    "PartitionedAR": "shardwright.builders.partitioned",
    "PartitionedPS": "shardwright.builders.partitioned",
    "RandomAxisPartitionAR": "shardwright.builders.partitioned",
    "UnevenPartitionedPS": "shardwright.builders.partitioned",
    "Variable": "shardwright.builders.variables",
    "VariableStrategy": "shardwright.plans.variable_strategy",
    "load": "shardwright.builders.given",
    "stale": "shardwright.builders.staleness",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        from shardwright.spelling import did_you_mean

        hint = did_you_mean(name, _LAZY)
        raise AttributeError(f"module 'shardwright.strategies' has no attribute {name!r}{hint and f'; {hint}'}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


__all__ = [
    "PS",
    "AllReduce",
    "Auto",
    "Builder",
    "Given",
    "PSLoadBalancing",
    "Parallax",
    "PartitionedAR",
    "PartitionedPS",
    "RandomAxisPartitionAR",
    "UnevenPartitionedPS",
    "Variable",
    "VariableStrategy",
    "load",
    "stale",
]
