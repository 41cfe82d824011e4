"""Manual regions: parts of a program that are written for one device (`shard_map`), and what stands at their border."""

from shardwright.regions.border import Border, border_of, read_border

__all__ = ["Border", "border_of", "read_border"]
