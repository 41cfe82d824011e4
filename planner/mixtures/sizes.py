"""Sizes of a mixture in blocks: rows sent and received, and the layout that they are multiplied in."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd, sqrt

from shardwright.cost import HardwareProfile
from shardwright.kernels.ragged import SIDE
from shardwright.planner.mixtures.blocks import Blocks
from shardwright.planner.mixtures.tuning import MAX_TILE_WASTE
from shardwright.planner.tuning import TILE_FLOPS_PER_BYTE


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """With R replicas, E blocks of experts in each, and all groups, g = groups / E of them a block's own:

    m: pairs of a block. C: rows that a block sends another at most. t: rows of a tile.
    """

    R: int
    E: int
    m: int
    C: int
    groups: int
    t: int

    @property
    def g(self) -> int:
        return self.groups // self.E

    @property
    def T(self) -> int:
        """Tiles of a block."""
        return -(-self.E * self.C // self.t) + self.g

    @property
    def M(self) -> int:
        """Rows of a block in order: those received, in whole blocks of the kernel."""
        return -(-self.E * self.C // SIDE) * SIDE

    @property
    def in_whole_blocks(self) -> Sizes:
        """The same with room for as many rows more as make those received whole blocks of the kernel."""
        step = SIDE // gcd(self.E, SIDE)
        return replace(self, C=-(-self.C // step) * step)


def sizes_of(rows: int, groups: int, blocks: Blocks, profile: HardwareProfile | None, element_type: str) -> Sizes:
    """Sizes of a mixture. element_type: of its rows, as multiplied."""
    capacity = blocks.capacity(rows)
    own = groups // blocks.experts
    received = blocks.experts * capacity
    ratio = TILE_FLOPS_PER_BYTE
    if profile is not None:
        ratio = profile.matmul_flops_per_s(element_type) / profile.memory_bandwidth_bytes_per_s
    best = min(sqrt(3 * ratio * received / own), MAX_TILE_WASTE * received / own)
    tile = 1
    while 2 * tile <= best:
        tile *= 2
    return Sizes(
        R=blocks.replicas, E=blocks.experts, m=rows // blocks.count, C=capacity, groups=groups, t=min(tile, received)
    )
