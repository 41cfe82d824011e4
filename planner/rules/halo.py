"""Halos: borders a shard needs from its neighbours in windows, slices and padding along a split dimension.

Each shard of the result reads an interval of the operand. When it reaches beyond the shard's own block, XLA's
partitioner sends the missing border from the neighbour by a collective-permute ("halo exchange": GSPMD,
https://arxiv.org/abs/2105.04663, section 4.3). All devices send equal amounts: the maximum any of them needs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Halo:
    """Dependence of one split dimension of a result on that of an operand.

    Element r of the result reads the positions `stride * r - low` to `stride * r - low + extent - 1`; element e of the
    operand is at position `e * dilation`; positions without an element hold padding.

    operand: the flat operand leaf of the exchanged borders.
    size / result_size: elements of the split dimension in the operand and in the result.
    stride / low / extent / dilation: see above.
    mirrored: the result is the operand back to front: shards change places, the other fields are ignored.
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
        """Elements of the operand's dimension sent by each collective-permute, on `parts` devices.

        Every device sends that many rows (slices of one element along the dimension) of its shard. Empty when no block
        needs a border. None when a shard needs more than its direct neighbours hold, or the parts are uneven: XLA then
        does something else, and the factor may not be given to that many devices.
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
        if max(below, above) > 2 * self.size_with_halo(parts):  # XLA cuts unread elements out of so long a border
            if parts > 2:
                return None
            below, above = min(below, reads[1][1] + 1 - reads[1][0]), min(above, reads[0][1] + 1 - reads[0][0])
        return tuple(elements for elements in (below, above) if elements > 0)

    def size_with_halo(self, parts: int) -> int:
        """Elements of the operand's dimension on a device including its borders.

        The next dimension's borders grow by the same ratio. Defined when `permutes` is not None.
        """
        if self.mirrored:
            return self.size // parts
        positions = self.stride * (self.result_size // parts - 1) + self.extent
        return -(-positions // self.dilation)

    def _reads(self, part: int, count: int) -> tuple[int, int]:
        """First and last element of the operand read by results `part * count`, … (including padding)."""
        first = self.stride * part * count - self.low
        last = self.stride * ((part + 1) * count - 1) - self.low + self.extent - 1
        return -(-first // self.dilation), last // self.dilation


def exchange_bytes(halos: Iterable[tuple[Halo, int]], shard_bytes: int) -> list[int]:
    """Bytes sent by each device in each collective-permute of one operand's borders.

    halos: those of the chosen factors that name the operand, in the order of its dimensions, each with its factor's
        number of parts.
    shard_bytes: the operand's block on one device.
    """
    sent = []
    for halo, parts in halos:
        shard = halo.size // parts
        sent += [shard_bytes * elements // shard for elements in halo.permutes(parts) or ()]
        shard_bytes = shard_bytes * halo.size_with_halo(parts) // shard
    return sent
