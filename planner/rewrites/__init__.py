"""Equal programs with better shardings or less memory: rewrites from HLO to HLO, before the search."""

from shardwright.planner.rewrites.dim_classes import Required
from shardwright.planner.rewrites.idle_views import drop_idle_views
from shardwright.planner.rewrites.remat import Rematerialized, forward_pass, rematerialize
from shardwright.planner.rewrites.split_dims import Rewritten, rewrite
from shardwright.planner.rewrites.variable_views import rewrite_for, with_views

__all__ = [
    "Rematerialized",
    "Required",
    "Rewritten",
    "drop_idle_views",
    "forward_pass",
    "rematerialize",
    "rewrite",
    "rewrite_for",
    "with_views",
]
