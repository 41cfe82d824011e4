"""Trip counts of loops, from XLA's annotations."""

from __future__ import annotations

import re

from benchmarks.planner.partitioned_text import CountingError, Instruction

_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


def trip_count(loop: Instruction) -> int:
    """Runs of a while's body. Raises CountingError without an annotation."""
    match = _KNOWN.search(loop.attributes)
    if match is None:
        raise CountingError(f"loop {loop.name}: its trips are not known")
    return int(match[1])
