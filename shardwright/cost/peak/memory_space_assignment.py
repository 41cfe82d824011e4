"""Values in on-chip memory: they occupy no main memory of a device.

After XLA's MemorySpaceAssignment (xla/service/memory_space_assignment), in its simplest part: shortest lifetimes are
placed first, whole, within the available room. A long-lived value is prefetched before its readers and is in main
memory meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shardwright.cost.tuning import MAX_KERNELS


def select_off_chip(lifetimes: Iterable[tuple[int, int, int]], chip_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Those of some (bytes, first, last position) outside the chip's memory."""
    used_bytes: dict[int, int] = {}
    for size, start, end in sorted(lifetimes, key=lambda lifetime: (lifetime[2] - lifetime[1], lifetime)):
        positions = range(start, end + 1)
        if len(positions) > MAX_KERNELS + 1 or any(
            used_bytes.get(position, 0) + size > chip_bytes for position in positions
        ):
            yield size, start, end
            continue
        for position in positions:
            used_bytes[position] = used_bytes.get(position, 0) + size
