"""Files that people name: read whole, unless they are too large or do not end.

A pipe of the shell (`<(vault read …)`) is as good as a file; a FIFO that nobody writes and a device without an end are
not.
"""

from __future__ import annotations

import errno
import os
import select
import stat
import time

from shardwright.tuning import INPUT_CHUNK_BYTES, INPUT_POLL_S, MOST_BYTES, WAIT_S


def read_input(path: str | os.PathLike[str], *, most_bytes: int = MOST_BYTES, wait_s: float = WAIT_S) -> bytes:
    """The contents of a file, pipe or device.

    most_bytes: what it may have; a device at most `MOST_BYTES`. wait_s: what a pipe or device may take to end. Raises
    OSError whose `strerror` says what is wrong, also where it is larger, or does not end in time.
    """
    return read_descriptor(open_input(path), path, most_bytes=most_bytes, wait_s=wait_s)


def open_input(path: str | os.PathLike[str]) -> int:
    """A descriptor to read from. Raises OSError."""
    # Without waiting: a FIFO without a writer would hold this up for ever.
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def read_descriptor(
    descriptor: int, path: str | os.PathLike[str], *, most_bytes: int = MOST_BYTES, wait_s: float = WAIT_S
) -> bytes:
    """What `open_input` opened, as `read_input` reads it; closes it."""
    with open(descriptor, "rb", buffering=0) as file:
        facts = os.fstat(descriptor)
        if stat.S_ISREG(facts.st_mode) or stat.S_ISDIR(facts.st_mode):
            data = b"" if facts.st_size > most_bytes else file.read()
        else:
            most_bytes = min(most_bytes, MOST_BYTES) if stat.S_ISCHR(facts.st_mode) else most_bytes
            data = _read_stream(descriptor, path, most_bytes, wait_s)
    if max(facts.st_size, len(data)) > most_bytes:
        raise OSError(errno.EFBIG, f"more than {most_bytes >> 20} MiB", os.fspath(path))
    return data


def read_input_text(path: str | os.PathLike[str], *, most_bytes: int = MOST_BYTES, wait_s: float = WAIT_S) -> str:
    """`read_input` as UTF-8 text, lines ended by newlines. Raises OSError or UnicodeDecodeError."""
    text = read_input(path, most_bytes=most_bytes, wait_s=wait_s).decode("utf-8")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _read_stream(descriptor: int, path: str | os.PathLike[str], most_bytes: int, wait_s: float) -> bytes:
    """Everything until its end, or more than `most_bytes`."""
    deadline_s = time.monotonic() + wait_s
    data = bytearray()
    while len(data) <= most_bytes:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or not select.select([descriptor], [], [], left_s)[0]:
            raise OSError(errno.ETIMEDOUT, f"it does not end within {wait_s:g} s", os.fspath(path))
        chunk = os.read(descriptor, INPUT_CHUNK_BYTES)
        if chunk:
            data += chunk
        elif data or not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            break
        else:
            time.sleep(INPUT_POLL_S)  # no writer yet
    return bytes(data)
