"""The server's log: lines to standard error from a thread of its own: a reader who stops reading stops nothing else.

A pipe that nobody reads is full after 64 KiB, and whoever writes to it then stands still. Here that is a thread with
nothing else to do; the lines that do not fit behind it are dropped, and counted. The last lines are kept in memory, for
the master's `ReadLogs` (`log_store.py`).
"""

from __future__ import annotations

import io
import logging
import os
import queue
import sys
import threading
import time
from dataclasses import replace
from typing import TextIO, cast

from shardwright.log_lines import ChildFormatter, LogFormat, LogLine, level_number, line_of, log_to_parent
from shardwright.server.log_store import RecentLines
from shardwright.server.tuning import LAST_WORDS_POLL_S, LINE_BYTES, TEXT_CHARACTERS, WAITING_LINES

_log = logging.getLogger("shardwright.server")


class LogWriter(logging.Handler):
    """Writes records, and whole lines, to a descriptor; never waits for its reader.

    dropped: lines that nobody will read. process, node: whose log it is. recent: the last lines.
    """

    def __init__(
        self,
        descriptor: int = 2,
        waiting_lines: int = WAITING_LINES,
        *,
        log_format: LogFormat = "text",
        process: str = "",
        node: int | None = None,
    ) -> None:
        super().__init__()
        self.dropped = 0
        self.process = process
        self.node = node
        self.recent = RecentLines()
        self._format = log_format
        self._descriptor = descriptor
        self._lines: queue.Queue[bytes] = queue.Queue(waiting_lines)
        self._told = 0  # dropped lines that the log mentions
        threading.Thread(target=self._write_lines, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if isinstance(self.formatter, ChildFormatter):
                self._put_text(self.format(record))
            else:
                self._put_line(line_of(record, self.process, self.node))
        except Exception as error:  # a record with wrong arguments
            self.put(f"a record of {record.name} cannot be written: {error}")

    def put(self, text: str, level: str = "info") -> None:
        """Write a line that is no record: what was printed."""
        if self._format == "text":
            self._put_text(text)
        if not text.strip():
            return
        line = self._own_line(text, level)
        if self._format == "json":
            self._put_line(line)
        else:
            self.recent.append(line)

    def _own_line(self, text: str, level: str) -> LogLine:
        return LogLine(
            time_s=time.time(), level=level, process=self.process, node=self.node, pid=os.getpid(), message=text
        )

    def _put_line(self, line: LogLine) -> None:
        line = _shorten(line, TEXT_CHARACTERS)
        self.recent.append(line)
        self._put_text(self._rendered(line))

    def _rendered(self, line: LogLine) -> str:
        if self._format == "json":
            return _to_short_json(line)
        whose = "" if line.process in (self.process, "daemon") else f"{line.process}: "
        return f"{time.strftime('%H:%M:%S', time.localtime(line.time_s))} {whose}{line.text}"

    def _put_text(self, text: str) -> None:
        try:
            self._lines.put_nowait(text.encode(errors="replace")[:LINE_BYTES] + b"\n")
        except queue.Full:
            self.dropped += 1

    def wait_until_written(self, timeout_s: float) -> None:
        """Return when all lines are written, or nobody reads them within the time."""
        until_s = time.monotonic() + timeout_s
        while self._lines.unfinished_tasks and time.monotonic() < until_s:
            time.sleep(LAST_WORDS_POLL_S)

    def _write_lines(self) -> None:
        while True:
            line = self._lines.get()
            self._write(line)
            lost = self.dropped - self._told
            if lost:
                self._told += lost
                text = f"{lost} lines of the log were dropped: nobody read them in time"
                if self._format == "json":
                    text = self._own_line(text, "warning").to_json()
                self._write(text.encode() + b"\n")
            self._lines.task_done()

    def _write(self, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError:
            self.dropped += 1  # the reader is gone


def _shorten(line: LogLine, most: int) -> LogLine:
    """The beginning of a long message, the end of a long traceback and output."""
    if max(len(line.message), len(line.traceback), len(line.output)) <= most:
        return line
    return replace(line, message=line.message[:most], traceback=line.traceback[-most:], output=line.output[-most:])


def _to_short_json(line: LogLine) -> str:
    """No longer than a line may be: JSON that is cut is none."""
    text, most = line.to_json(), TEXT_CHARACTERS
    while len(text) > LINE_BYTES:
        most //= 2
        text = _shorten(line, most).to_json()
    return text


class _Lines(io.TextIOBase):
    """In the place of `sys.stderr`: what is printed there becomes lines of the log."""

    def __init__(self, writer: LogWriter) -> None:
        self._writer = writer
        self._begun = ""

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            self._writer.put(line, "error")
        return len(text)

    def fileno(self) -> int:
        return 2


def log_to_standard_error(
    level: str, log_format: LogFormat = "text", *, process: str = "", node: int | None = None
) -> LogWriter:
    """Have all records of this process, and what it prints to `sys.stderr`, written by a `LogWriter`."""
    writer = LogWriter(log_format=log_format, process=process, node=node)
    logging.basicConfig(handlers=[writer], level=logging.WARNING)
    logging.getLogger("shardwright").setLevel(level.upper())
    sys.stderr = cast(TextIO, _Lines(writer))
    sys.excepthook = lambda kind, error, trace: _log.critical("%s", error, exc_info=(kind, error, trace))
    threading.excepthook = _log_dead_thread
    return writer


def _log_dead_thread(failure: threading.ExceptHookArgs) -> None:
    error = failure.exc_value
    if error is not None and not isinstance(error, SystemExit):
        name = failure.thread.name if failure.thread is not None else "?"
        _log.error("the thread %s ended: %s", name, error, exc_info=error)


def log_as_child(process: str, node: int | None, level: str) -> LogWriter:
    """Have the records of this child read by its parent (`ChildOutput`); never waits for it."""
    writer = LogWriter()
    log_to_parent(process, node, writer)
    logging.getLogger("shardwright").setLevel(level_number(level))
    return writer
