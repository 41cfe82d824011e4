"""Equal programs that shard better: rewrites from HLO to HLO, before the search."""

from shardwright.planner.rewrites.split_dims import Rewritten, rewrite

__all__ = ["Rewritten", "rewrite"]
