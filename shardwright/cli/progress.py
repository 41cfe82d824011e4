"""The planner's current activity on standard error: one changing line on a terminal, silence elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shardwright.progress import PlanProgress
from shardwright.progress_lines import ProgressLines


@contextmanager
def planning_progress() -> Iterator[Callable[[PlanProgress], None] | None]:
    """A callback of `planner.plan(progress=…)`, or None without a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    with ProgressLines("planning", after_s=0.0, summary=False) as lines:
        yield lines
