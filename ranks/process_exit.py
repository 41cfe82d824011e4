"""A rank that fails ends at once, with its exit code.

Else it would wait, in the destructors of jaxlib, for ranks that wait for it in a collective, and no launcher would
learn of the failure. An uncaught exception or a `sys.exit` with an error is a failure. Then exit handlers that were
registered before `init` do not run; those of later run first. A rank that has finished still waits for the others,
because they would lose it.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn


class _Exit:
    """How the process ends. code: the exit code of a failure, 0 of none. before_end: called where there is none."""

    code = 0
    installed = False
    before_end: Callable[[], None] = staticmethod(lambda: None)


def leave_at_once_on_failure(before_end: Callable[[], None] = lambda: None) -> None:
    """Install it, once a process, around the hooks that are there. before_end: called at an end without a failure."""
    _Exit.before_end = staticmethod(before_end)
    if _Exit.installed:
        return
    _Exit.installed = True
    excepthook, exit_process = sys.excepthook, sys.exit

    def note_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        _Exit.code = 130 if issubclass(kind, KeyboardInterrupt) else 1
        return excepthook(kind, error, trace)

    def note_exit(status: Any = None, /) -> NoReturn:
        is_number = isinstance(status, int)
        _Exit.code = status & 0xFF if is_number else int(status is not None)
        exit_process(status)

    sys.excepthook, sys.exit = note_exception, note_exit
    atexit.register(_leave)


def has_failed() -> bool:
    """Whether the process ends by an error."""
    return _Exit.code != 0


def _leave() -> None:
    if _Exit.code == 0:
        _Exit.before_end()
        return
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(_Exit.code)
