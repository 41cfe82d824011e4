"""Child processes: that they never outlive their parent, how they ended, what they do not print, what they load."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent's thread ends (Linux; elsewhere stdin's end does it).

    Call it first thing in a child; `parent_pid` closes the gap between fork and this call.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def exit_at_end_of(stream: BinaryIO) -> None:
    """End this process, without ceremony, once the other end of `stream` is closed."""

    def watch() -> None:
        while os.read(stream.fileno(), 4096):
            pass
        os._exit(0)

    threading.Thread(target=watch, name="stdin-watch", daemon=True).start()


@contextmanager
def imports_for_good() -> Iterator[None]:
    """What is imported inside stays as long as the process: the garbage collector never walks it, now or later."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def describe_exit(code: int) -> str:
    """How a child ended, of its return code: `SIGKILL`, `exit code 1`."""
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def silence_grpc() -> None:
    """gRPC, when it is loaded after this, prints nothing: what fails is an error of ours.

    Its handlers of fork() stay. They print a line for each fork() beside a running call, but without them a forked
    child that opens a session of its own dies of a segmentation fault. A value that the user has set is kept.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
