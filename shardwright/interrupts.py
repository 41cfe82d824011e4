"""Ctrl-C as a wish: the first one asks for an early end, the second one breaks off."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass(slots=True)
class Interrupt:
    """came: whether there was a first Ctrl-C."""

    came: bool = False


@contextmanager
def first_interrupt(act: Callable[[], None]) -> Iterator[Interrupt]:
    """Within, the first Ctrl-C calls `act` and this thread goes on; the second one raises KeyboardInterrupt.

    In other threads than the main one, and where a program has its own way with SIGINT, all stays as it is.
    """
    interrupt = Interrupt()
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield interrupt
        return

    def take(number: int, frame: FrameType | None) -> None:
        if interrupt.came:
            signal.default_int_handler(number, frame)
        interrupt.came = True
        act()

    signal.signal(signal.SIGINT, take)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
