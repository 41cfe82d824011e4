"""Progress of a training run: live on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.status import Status

#: Seconds between two lines where the output is not a terminal.
_LINE_INTERVAL_S = 5.0
#: Steps over which the speed is averaged.
_WINDOW = 20


class _PhaseHandler(logging.Handler):
    """Shows what Shardwright logs while it plans and compiles: `train_step: search data=8 (0.1 s)`."""

    def __init__(self, status: Status | None) -> None:
        super().__init__(logging.INFO)
        self._status = status
        self._last = ""

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if self._status is not None:
            self._status.update(message)
        phase = message.partition(" (")[0]
        if phase != self._last and (self._status is None or "ready after" in phase):
            print(f"  {phase}", flush=True)
        self._last = phase


@contextmanager
def preparation_shown() -> Iterator[None]:
    """Shows the phases of planning and compiling that happen inside."""
    logger = logging.getLogger("shardwright")
    status = Console().status("lowering") if sys.stdout.isatty() else None
    handler = _PhaseHandler(status)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        if status is not None:
            status.start()
        yield
    finally:
        if status is not None:
            status.stop()
        logger.removeHandler(handler)
        logger.setLevel(level)


class TrainingProgress:
    """Shows step, loss, tokens a second and the estimated time left."""

    def __init__(self, steps: int, tokens_per_step: int) -> None:
        """Starts the clock: create it when the first step runs."""
        self._steps = steps
        self._tokens_per_step = tokens_per_step
        self._times_s: deque[float] = deque([time.monotonic()], maxlen=_WINDOW + 1)
        self._last_line_s = 0.0
        self._bar: Progress | None = None
        if sys.stdout.isatty():
            columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[figures]}"))
            self._bar = Progress(*columns, console=Console())
            self._task = self._bar.add_task("training", total=steps, figures="")

    def __enter__(self) -> TrainingProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int, loss: float) -> None:
        """`done` steps are finished, the last one with `loss`."""
        now_s = time.monotonic()
        self._times_s.append(now_s)
        seconds_per_step = (now_s - self._times_s[0]) / (len(self._times_s) - 1)
        left_s = (self._steps - done) * seconds_per_step
        speed = self._tokens_per_step / seconds_per_step
        figures = f"loss {loss:.3f}  {speed:,.0f} tokens/s  {left_s // 60:.0f}:{left_s % 60:02.0f} left"
        if self._bar is not None:
            self._bar.update(self._task, completed=done, figures=figures)
        elif done in (1, self._steps) or now_s - self._last_line_s >= _LINE_INTERVAL_S:
            self._last_line_s = now_s
            print(f"step {done:>4}/{self._steps}  {figures}", flush=True)
