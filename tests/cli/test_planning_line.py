"""The line that shows how planning goes: on a terminal only."""

from __future__ import annotations

import io
import time
from contextlib import redirect_stderr

from shardwright.cli.progress import planning_progress
from shardwright.progress import PlanProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_the_last_report() -> None:
    terminal = Terminal()
    with redirect_stderr(terminal), planning_progress() as progress:
        assert progress is not None
        progress(PlanProgress(phase="search", detail="[data=8]", incumbent_s=0.002, lower_bound_s=0.001))
        time.sleep(0.6)
    assert "search  [data=8]  best step 2.00 ms  bound 1.00 ms  gap 50.0%" in terminal.getvalue()


def test_nobody_watches_a_pipe() -> None:
    with redirect_stderr(io.StringIO()), planning_progress() as progress:
        assert progress is None
