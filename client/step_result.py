"""The future outcome of a numbered step."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from shardwright.errors import ShardwrightError
from shardwright.proto.v1 import master_pb2

if TYPE_CHECKING:
    from shardwright.client.arrays import RemoteArray
    from shardwright.client.transfer import Upload


class StepResult:
    """The future outcome of one step: its error or its small results, once `wait` returns."""

    __slots__ = (
        "_done",
        "_interrupted",
        "error",
        "finished_s",
        "handles",
        "is_followed",
        "is_repeated",
        "is_seen",
        "lines_said",
        "name",
        "not_finite",
        "number",
        "output_ids",
        "run_s",
        "traces",
        "uploads",
        "values",
    )

    def __init__(
        self,
        number: int,
        name: str,
        *,
        is_followed: bool = False,
        is_repeated: bool = False,
        output_ids: tuple[int, ...] = (),
        interrupted: Callable[[], None] = lambda: None,
    ) -> None:
        self._interrupted = interrupted  # called when Ctrl-C ends a wait
        self.number = number  # another one where the step is sent again after a loss
        self.name = name
        self.is_repeated = is_repeated  # whether it is run again after a loss
        self.output_ids = output_ids  # ids of its outputs
        self.uploads: Sequence[Upload] = ()  # arguments that can be written again, until it is answered
        self.is_followed = is_followed  # whether somebody waits for it and tells of its error
        self.error: ShardwrightError | None = None
        self.is_seen = False  # whether the error was raised somewhere
        self.values: dict[int, np.ndarray] = {}
        self.handles: dict[int, weakref.ref[RemoteArray]] = {}  # by the first id of each; ids ascend with the results
        self.run_s = 0.0
        self.finished_s = 0.0  # when its answer came, by the monotonic clock
        self.traces: tuple[master_pb2.StageTrace, ...] = ()  # where the request asked for them
        self.not_finite: tuple[master_pb2.NotFinite, ...] = ()  # likewise
        self.lines_said: Callable[[], None] | None = None  # waits for what it and those before say by `jax.debug`
        self._done = threading.Event()

    def wait(self) -> None:
        """Returns when the step has run; raises the step's error. Ctrl-C cancels what runs."""
        self.wait_for_outcome()
        if self.error is not None:
            self.is_seen = True
            raise self.error

    def wait_for_outcome(self) -> None:
        """Returns when the step has run, or failed. Ctrl-C cancels what runs."""
        try:
            self._done.wait()
        except KeyboardInterrupt:
            self.is_seen = True  # whoever ended the wait is not told once more
            self._interrupted()
            raise

    def wait_for_lines(self) -> None:
        """Returns when all that `jax.debug` says up to this step is said."""
        if self.lines_said is not None:
            self.lines_said()
            self.lines_said = None

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def finish(self, error: ShardwrightError | None) -> None:
        """It has run, or failed; a step that runs again after a loss may fail later."""
        self.error = self.error or error
        self.uploads = ()
        self.finished_s = time.monotonic()
        self._done.set()
