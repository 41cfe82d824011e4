"""Equal programs that shard better: rewrites from HLO to HLO, before the search."""

from shardwright.planner.rewrites.classes import Required
from shardwright.planner.rewrites.split_dims import Rewritten, rewrite
from shardwright.planner.rewrites.variables import rewrite_for, with_views

__all__ = ["Required", "Rewritten", "rewrite", "rewrite_for", "with_views"]
