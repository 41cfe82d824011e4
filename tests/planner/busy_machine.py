"""A machine that is busy with other work while a solver runs."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

#: Seconds that others take at once.
PAUSE_S = 2.5


@contextmanager
def others_have_the_machine() -> Iterator[None]:
    """This thread, the main one, soon waits for longer than two seconds, without any work of its own: a signal finds it
    in the solver's next callback."""

    def wait(number: int, frame: FrameType | None) -> None:
        time.sleep(PAUSE_S)

    before = signal.signal(signal.SIGALRM, wait)
    signal.setitimer(signal.ITIMER_REAL, 1e-3)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
