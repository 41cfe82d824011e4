"""The server's log: lines to standard error from a thread of its own: a reader who stops reading stops nothing else.

A pipe that nobody reads is full after 64 KiB, and whoever writes to it then stands still. Here that is a thread with
nothing else to do; the lines that do not fit behind it are dropped, and counted.
"""

from __future__ import annotations

import io
import logging
import os
import queue
import sys
import threading
import time
from typing import TextIO, cast

#: Lines that may wait for their reader.
WAITING_LINES = 10_000
#: What is kept of one line.
_LINE_BYTES = 16_000


class LogWriter(logging.Handler):
    """Writes records, and whole lines, to a descriptor; never waits for its reader.

    dropped: lines that nobody will read.
    """

    def __init__(self, descriptor: int = 2, waiting_lines: int = WAITING_LINES) -> None:
        super().__init__()
        self.dropped = 0
        self._descriptor = descriptor
        self._lines: queue.Queue[bytes] = queue.Queue(waiting_lines)
        self._told = 0  # dropped lines that the log mentions
        threading.Thread(target=self._write_lines, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.put(self.format(record))
        except Exception as error:  # a record with wrong arguments
            self.put(f"a record of {record.name} cannot be written: {error}")

    def put(self, line: str) -> None:
        try:
            self._lines.put_nowait(line.encode(errors="replace")[:_LINE_BYTES] + b"\n")
        except queue.Full:
            self.dropped += 1

    def wait_until_written(self, timeout_s: float) -> None:
        """Return when all lines are written, or nobody reads them within the time."""
        until_s = time.monotonic() + timeout_s
        while self._lines.unfinished_tasks and time.monotonic() < until_s:
            time.sleep(0.005)

    def _write_lines(self) -> None:
        while True:
            line = self._lines.get()
            self._write(line)
            lost = self.dropped - self._told
            if lost:
                self._told += lost
                self._write(f"{lost} lines of the log were dropped: nobody read them in time\n".encode())
            self._lines.task_done()

    def _write(self, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError:
            self.dropped += 1  # the reader is gone


class _Lines(io.TextIOBase):
    """In the place of `sys.stderr`: what is printed there becomes lines of the log."""

    def __init__(self, writer: LogWriter) -> None:
        self._writer = writer
        self._begun = ""

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            self._writer.put(line)
        return len(text)

    def fileno(self) -> int:
        return 2


def log_to_standard_error(level: str) -> LogWriter:
    """Have all records of this process, and what it prints to `sys.stderr`, written by a `LogWriter`."""
    writer = LogWriter()
    writer.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    logging.basicConfig(handlers=[writer], level=logging.WARNING)
    logging.getLogger("shardwright").setLevel(level.upper())
    sys.stderr = cast(TextIO, _Lines(writer))
    return writer
