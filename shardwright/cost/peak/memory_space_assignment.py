"""Memory on the chip that holds values which are read soon: those take none of a device's main memory.

After XLA's MemorySpaceAssignment (xla/service/memory_space_assignment), of which only the simplest part is followed:
what lives shortest is placed first, whole, as long as there is room; what lives for long is brought back for its
readers, and lies in main memory meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

#: Kernels that such a value lives for at most; fitted with benchmarks/check_memory.py.
_MAX_KERNELS = 8


def select_off_chip(lifetimes: Iterable[tuple[int, int, int]], chip_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Those of some (bytes, first, last position) that do not lie on the chip."""
    taken: dict[int, int] = {}
    for size, start, end in sorted(lifetimes, key=lambda each: (each[2] - each[1], each)):
        positions = range(start, end + 1)
        if len(positions) > _MAX_KERNELS + 1 or any(taken.get(each, 0) + size > chip_bytes for each in positions):
            yield size, start, end
            continue
        for each in positions:
            taken[each] = taken.get(each, 0) + size
