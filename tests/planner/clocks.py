"""Clocks to hand to a planner: what they show does not depend on how busy the machine is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from shardwright.planner.clock import Clock


@dataclass(slots=True)
class FrozenClock(Clock):
    """Shows the same, however long planning takes.

    shown_s: by default later than a deadline of nearly nothing, and earlier than the end of its grace.
    """

    shown_s: float = 0.1

    @property
    def elapsed_s(self) -> float:
        return self.shown_s


@dataclass(slots=True)
class LookCountingClock(Clock):
    """Shows 0 at first, and `late_s` after a number of looks at it.

    early_looks: that number.
    late_s: by default later than a deadline of a second, and earlier than the end of its grace.
    looks: all looks at this clock and at those that are renewed from it.
    """

    early_looks: int = 0
    late_s: float = 2.0
    looks: Iterator[int] = field(default_factory=itertools.count)

    @property
    def elapsed_s(self) -> float:
        return 0.0 if next(self.looks) < self.early_looks else self.late_s


def just_late() -> FrozenClock:
    """A deadline of a nanosecond has passed, and its grace has not."""
    return FrozenClock(deadline_s=1e-9)
