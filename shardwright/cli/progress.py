"""What the planner is doing now, on standard error: one changing line on a terminal, silence elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwright.planner import PlanProgress


@contextmanager
def planning_progress() -> Iterator[Callable[[PlanProgress], None] | None]:
    """A callback for `planner.plan(progress=…)`, or None where nobody watches."""
    if not sys.stderr.isatty():
        yield None
        return

    from rich.console import Console

    with Console(stderr=True).status("planning") as status:
        yield lambda event: status.update(_line(event))


def _line(event: PlanProgress) -> str:
    parts = [f"{event.elapsed_s:.1f} s", event.phase, event.detail]
    if event.incumbent_s:
        parts.append(f"best step {event.incumbent_s * 1e3:.3f} ms")
    if event.lower_bound_s:
        parts.append(f"bound {event.lower_bound_s * 1e3:.3f} ms")
    return "  ".join(part for part in parts if part)
