"""What a person sees while a program is prepared: a line at once, and after two seconds what goes on.

On a terminal that is one changing line with a clock that runs, elsewhere a line now and then.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TextIO

from shardwright.progress import PlanProgress, StageTimes
from shardwright.tuning import EVERY_S, SHOW_AFTER_S
from shardwright.units import format_seconds

if TYPE_CHECKING:
    from rich.text import Text

#: Set to `off`, it silences them.
VARIABLE = "SHARDWRIGHT_PROGRESS"


def is_silenced() -> bool:
    """Whether the environment wants no lines, or there is nowhere to write them."""
    return os.environ.get(VARIABLE, "").lower() in ("off", "0", "false", "no") or sys.stderr is None


class ProgressLines:
    """Lines of one preparation on standard error, from `begin` (or `with`) to its end; called with each report of it.

    name: of what is prepared. first: the line at once; empty: none. after_s: until what goes on is shown, by default
    two seconds. summary: whether a preparation that took longer than two seconds ends with a line.
    """

    def __init__(self, name: str, *, first: str = "", after_s: float | None = None, summary: bool = True) -> None:
        self._name = name
        self._first = first
        self._after_s = SHOW_AFTER_S if after_s is None else after_s
        self._summary = summary
        self._report = PlanProgress(phase="lower")
        self._incumbent_s = 0.0
        self._began_s = 0.0
        self._times = StageTimes()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        self._began_s = time.monotonic()
        self._times = StageTimes()
        if is_silenced():
            return
        if self._first:
            _write(sys.stderr, f"{self._name}: {self._first}")
        self._thread = threading.Thread(target=self._show, args=(sys.stderr,), name="progress", daemon=True)
        self._thread.start()

    def end(self, *, is_ready: bool = True) -> None:
        """is_ready: whether it ends well; errors have words of their own."""
        self._ended.set()
        if self._thread is None:
            return
        self._thread.join()
        elapsed_s = time.monotonic() - self._began_s
        if self._summary and is_ready and elapsed_s > SHOW_AFTER_S:
            step = f", {format_seconds(self._incumbent_s)} a step predicted" if self._incumbent_s else ""
            _write(sys.stderr, f"{self._name}: ready after {format_seconds(elapsed_s)} ({self._times}){step}")

    def __enter__(self) -> ProgressLines:
        self.begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.end(is_ready=kind is None)

    def __call__(self, report: PlanProgress) -> None:
        self._incumbent_s = report.incumbent_s or self._incumbent_s
        self._times.enter(report.phase)
        self._report = report

    def __str__(self) -> str:
        """The last report, at this moment."""
        return str(replace(self._report, elapsed_s=time.monotonic() - self._began_s))

    def __rich__(self) -> Text:
        from rich.text import Text

        return Text(f"{self._name}: {self}", no_wrap=True, overflow="ellipsis")

    def _show(self, stream: TextIO) -> None:
        if self._ended.wait(self._after_s):
            return
        is_terminal = stream.isatty()
        with _live(self) if is_terminal else nullcontext():
            while not is_terminal:
                _write(stream, f"{self._name}: {self}")
                if self._ended.wait(EVERY_S):
                    return
            self._ended.wait()


def _live(lines: ProgressLines) -> Any:
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True, force_jupyter=False)
    return Live(lines, console=console, refresh_per_second=4, transient=True, redirect_stdout=False)


def _write(stream: TextIO, line: str) -> None:
    with suppress(OSError, ValueError):  # whoever read it has gone
        print(line, file=stream, flush=True)
