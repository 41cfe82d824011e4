"""Progress of a training run: live on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

#: Seconds between two lines where the output is not a terminal.
_LINE_INTERVAL_S = 5.0
#: Steps over which the speed is averaged.
_WINDOW = 20
#: Steps that may run before an older loss is read: reading each at once would wait for it.
_STEPS_AHEAD = 2


class TrainingProgress:
    """Shows the preparation of the first step, then step, loss, speed and the estimated time left.

    with TrainingProgress(steps, examples_per_step, "tokens") as progress:
        for batch in …:
            …, loss = step(…, batch)
            progress.step(loss)
    """

    def __init__(self, steps: int, examples_per_step: int, unit: str) -> None:
        self._steps = steps
        self._examples_per_step = examples_per_step
        self._unit = unit
        self._losses: deque[Any] = deque()
        self._read = 0
        self._has_begun = False
        self._times_s: deque[float] = deque(maxlen=_WINDOW + 1)
        self._last_line_s = 0.0
        self._preparation = _Preparation()
        self._bar: Progress | None = None

    def __enter__(self) -> TrainingProgress:
        self._preparation.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            while error is None and self._losses:
                self._read_loss()
        finally:
            self._preparation.stop()
            if self._bar is not None:
                self._bar.stop()

    def go_on_after(self, step: int) -> None:
        """Start behind the last step of a saved run."""
        self._read = step

    def step(self, loss: Any) -> None:
        """Count a started step; `loss` may still be in flight."""
        if not self._has_begun:
            self._has_begun = True
            self._start_training()
        self._losses.append(loss)
        if len(self._losses) > _STEPS_AHEAD:
            self._read_loss()

    def _start_training(self) -> None:
        self._preparation.stop()
        if sys.stdout.isatty():
            columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[figures]}"))
            self._bar = Progress(*columns, console=Console())
            self._task = self._bar.add_task("training", total=self._steps, figures="")
            self._bar.start()

    def _read_loss(self) -> None:
        loss = float(self._losses.popleft())
        self._read += 1
        now_s = time.monotonic()
        self._times_s.append(now_s)
        figures = f"loss {loss:.3f}{self._speed()}"
        if self._bar is not None:
            self._bar.update(self._task, completed=self._read, figures=figures)
        elif len(self._times_s) == 1 or self._read == self._steps or now_s - self._last_line_s >= _LINE_INTERVAL_S:
            self._last_line_s = now_s
            print(f"step {self._read:>4}/{self._steps}  {figures}", flush=True)

    def _speed(self) -> str:
        """Speed and time left; empty for the first steps.

        Neither of two kinds of losses tells the speed: the last ones arrive together, and the first one may include a
        wait for the parameters.
        """
        if len(self._times_s) <= 2 * _STEPS_AHEAD + 1:
            return ""
        seconds_per_step = (self._times_s[-1] - self._times_s[0]) / (len(self._times_s) - 1)
        left_s = round((self._steps - self._read) * seconds_per_step)
        speed = self._examples_per_step / seconds_per_step
        return f"  {speed:,.0f} {self._unit}/s  {left_s // 60}:{left_s % 60:02} left"


class _Preparation(logging.Handler):
    """Shows Shardwright's log of planning and compiling: `train_step: search data=8 (0.1 s)`."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._logger = logging.getLogger("shardwright")
        self._level = self._logger.level
        self._status = Console().status("lowering") if sys.stdout.isatty() else None
        self._last = ""

    def start(self) -> None:
        self._logger.addHandler(self)
        self._logger.setLevel(logging.INFO)
        if self._status is not None:
            self._status.start()

    def stop(self) -> None:
        if self._status is not None:
            self._status.stop()
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level)

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if self._status is not None:
            self._status.update(escape(message))
        phase = message.partition(" (")[0]
        if phase != self._last and (self._status is None or "ready after" in phase):
            print(f"  {phase}", flush=True)
        self._last = phase
