"""What a step's first calls say while they trace, plan, compile and load."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shardwright.client.connection import SessionInfo
from shardwright.progress import BestSoFar, PlanProgress
from shardwright.progress_lines import ProgressLines


class Announcement:
    """Lines for a person, from `begin` to the end of `with`, one preparation after the other; called with each report.

    listener: the user's own; there are no lines then.
    """

    def __init__(self, name: str, info: SessionInfo, listener: Callable[[PlanProgress], None] | None) -> None:
        self._name = name
        self._first = f"preparing for {info.device_count} {info.platform} device{'s' * (info.device_count > 1)}"
        self._listener = listener
        self._lines: ProgressLines | None = None
        self._report: Callable[[PlanProgress], None] | None = None

    def begin(self, phase: str = "") -> None:
        """The first line, where none is under way. phase: what goes on from now, where no report of it will come."""
        if self._report is None and self._listener is not None:
            self._report = BestSoFar(self._listener)
        elif self._report is None:
            self._lines = ProgressLines(self._name, first=self._first)
            self._lines.begin()
            self._report = BestSoFar(self._lines)
        if phase and self._lines is not None:
            self._lines(PlanProgress(phase=phase))

    def end(self, *, is_ready: bool) -> None:
        lines, self._lines, self._report = self._lines, None, None
        if lines is not None:
            lines.end(is_ready=is_ready)

    @contextmanager
    def end_on_errors(self) -> Iterator[None]:
        """No line goes on after an error of the block, wherever in the preparation it came."""
        try:
            yield
        except BaseException:
            self.end(is_ready=False)
            raise

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.end(is_ready=kind is None)

    def __call__(self, report: PlanProgress) -> None:
        listener = self._report or self._listener
        if listener is not None:
            listener(report)
