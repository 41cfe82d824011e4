"""What a shard needs of its neighbours: windows, slices and padding along a dimension that is split.

Each shard of the result reads an interval of the operand. Where that reaches beyond
the shard's own block, XLA's partitioner sends the missing border from the neighbour
with a collective-permute ("halo exchange": GSPMD, https://arxiv.org/abs/2105.04663,
section 4.3): all devices send equally much, the most that any of them needs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Halo:
    """How the elements of one split dimension of a result depend on those of an operand.

    Element r of the result reads the positions `stride * r - low` to `stride * r - low + extent - 1`;
    element e of the operand is at position `e * dilation`; positions without an element hold padding.

    operand: the flat operand leaf whose borders travel.
    size / result_size: elements of the split dimension in the operand and in the result.
    mirrored: the result is the operand back to front: shards change places, nothing else matters.
    """

    operand: int
    size: int
    result_size: int
    stride: int = 1
    low: int = 0
    extent: int = 1
    dilation: int = 1
    mirrored: bool = False

    def permutes(self, parts: int) -> tuple[int, ...] | None:
        """Elements of the operand's dimension that each collective-permute carries, on `parts` devices.

        Every device sends that many rows (slices of one element along the dimension) of its shard. Empty
        where blocks stay apart; None where a shard needs more than its direct neighbours hold, or where the
        parts are uneven: XLA then does something else, so the factor may not be given to so many devices.
        """
        if parts == 1:
            return ()
        if self.size % parts or self.result_size % parts:
            return None
        shard = self.size // parts
        if self.mirrored:
            return (shard,)
        reads = [self._reads(part, self.result_size // parts) for part in range(parts)]
        below = max(part * shard - first for part, (first, _) in enumerate(reads) if part > 0)
        above = max(last + 1 - (part + 1) * shard for part, (_, last) in enumerate(reads) if part < parts - 1)
        if max(below, above) > shard:
            return None
        if max(below, above) > 2 * self.size_with_halo(parts):  # XLA cuts what is not read out of so long a border
            if parts > 2:
                return None
            below, above = min(below, reads[1][1] + 1 - reads[1][0]), min(above, reads[0][1] + 1 - reads[0][0])
        return tuple(elements for elements in (below, above) if elements > 0)

    def size_with_halo(self, parts: int) -> int:
        """Elements of the operand's dimension that a device holds once it has the borders it reads.

        The next dimension's borders are as much wider. Defined where `permutes` is not None.
        """
        if self.mirrored:
            return self.size // parts
        positions = self.stride * (self.result_size // parts - 1) + self.extent
        return -(-positions // self.dilation)

    def _reads(self, part: int, count: int) -> tuple[int, int]:
        """First and last element of the operand that results `part * count`, … read (padding not cut off)."""
        first = self.stride * part * count - self.low
        last = self.stride * ((part + 1) * count - 1) - self.low + self.extent - 1
        return -(-first // self.dilation), last // self.dilation


def exchange_bytes(halos: Iterable[tuple[Halo, int]], shard_bytes: int) -> list[int]:
    """Bytes that each device sends in each collective-permute for one operand's borders.

    halos: those of the taken factors that name the operand, in the order of its dimensions, each with the
        number of parts its factor is split into. shard_bytes: the operand's block on one device.
    """
    sent = []
    for halo, parts in halos:
        shard = halo.size // parts
        sent += [shard_bytes * elements // shard for elements in halo.permutes(parts) or ()]
        shard_bytes = shard_bytes * halo.size_with_halo(parts) // shard
    return sent
