"""Lines of the servers' logs: who says what about which session, step, plan and call; as JSON, and for people.

Children (executors, planners, compilers) write theirs to standard error as JSON behind a mark; their parents read them
there, and whatever else a child prints, and hand them to the log of their own process.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, BinaryIO, Literal

from shardwright.tuning import LAST_LINES, RAW_LINE_BYTES

LEVELS = ("debug", "info", "warning", "error", "critical")
LogFormat = Literal["text", "json"]

#: Control characters, but for ends of lines and tabs, as people read them.
_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}

#: Digits of the ids of sessions and plans: they tell them apart; a session's whole id opens it.
SESSION_DIGITS, PLAN_DIGITS = 8, 12

#: What a line of a child's standard error begins with, if the child wrote it as a line of its log; others are XLA's.
CHILD_MARK = "\x01shardwright "


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """time_s: since the epoch. node: None where it is unknown. Zeros and empty texts: none.

    traceback: of the error, if there is one. output: what a process printed last, before it ended.
    """

    time_s: float
    level: str
    process: str
    message: str
    node: int | None = None
    pid: int = 0
    session: str = ""
    step: int = 0
    plan: str = ""
    call: str = ""
    traceback: str = ""
    output: str = ""

    @classmethod
    def from_json(cls, text: str) -> LogLine:
        """Raises ValueError, KeyError or TypeError on what `to_json` does not write."""
        values = json.loads(text)
        if values["level"] not in LEVELS:
            raise ValueError(f"{values['level']!r} is no level")
        time_s = datetime.fromisoformat(values.pop("time")).timestamp()
        return cls(time_s=time_s, **values)

    def to_json(self) -> str:
        """One line: time (RFC 3339, UTC), level, process, node, what else there is, message."""
        values = asdict(self)
        time = datetime.fromtimestamp(values.pop("time_s"), UTC).isoformat(timespec="milliseconds")
        message, long = values.pop("message"), {name: values.pop(name) for name in ("traceback", "output")}
        known = {name: value for name, value in values.items() if value or (name == "node" and value is not None)}
        ends = {name: text for name, text in long.items() if text}
        return json.dumps({"time": time.replace("+00:00", "Z"), **known, "message": message, **ends})

    @property
    def text(self) -> str:
        """For people: the message, then traceback and output, all but the first line indented.

        What would move a terminal's cursor is written out: programs and clients choose some of the words.
        """
        lines = [line for text in (self.message, self.traceback, self.output) if text for line in text.split("\n")]
        return "\n  ".join(lines).translate(_ESCAPES)


def level_number(level: str) -> int:
    """Logging's number of a level by name."""
    return int(getattr(logging, level.upper()))


# ---- what a line is about ------------------------------------------------------
_about: ContextVar[Mapping[str, Any]] = ContextVar("log_about", default=MappingProxyType({}))


@contextmanager
def about(**values: Any) -> Iterator[None]:
    """Within, lines of the log say so: `session`, `step`, `plan`, `call`; also `process` and `node`.

    It holds in tasks and `asyncio.to_thread` calls begun within, not in other threads.
    """
    token = _about.set({**_about.get(), **values})
    try:
        yield
    finally:
        _about.reset(token)


def current() -> dict[str, Any]:
    """What lines are about here, to hand it on to another process."""
    return {name: value for name, value in _about.get().items() if name not in ("process", "node")}


def fields(**values: Any) -> dict[str, Any]:
    """The `extra` of a logging call whose line is about this."""
    return {"log_fields": values}


def line_of(record: logging.LogRecord, process: str, node: int | None) -> LogLine:
    """The line of a record that this process, `process` of `node`, logs; or the one that a child wrote."""
    line: LogLine | None = getattr(record, "log_line", None)
    if line is not None:
        return replace(line, node=node) if line.node is None else line
    values = {"process": process, "node": node, **_about.get(), **getattr(record, "log_fields", {})}
    return LogLine(
        time_s=record.created,
        level=record.levelname.lower(),
        process=values["process"],
        node=values["node"],
        pid=os.getpid(),
        session=str(values.get("session", ""))[:SESSION_DIGITS],
        step=values.get("step", 0),
        plan=str(values.get("plan", ""))[:PLAN_DIGITS],
        call=values.get("call", ""),
        message=record.getMessage(),
        traceback="".join(traceback.format_exception(*record.exc_info)).rstrip() if record.exc_info else "",
        output=values.get("output", ""),
    )


# ---- a child's side ------------------------------------------------------------
class ChildFormatter(logging.Formatter):
    """Lines that `ChildOutput` reads at the other end of standard error."""

    def __init__(self, process: str, node: int | None = None) -> None:
        super().__init__()
        self._process = process
        self._node = node

    def format(self, record: logging.LogRecord) -> str:
        return CHILD_MARK + line_of(record, self._process, self._node).to_json()


def log_to_parent(process: str, node: int | None = None, handler: logging.Handler | None = None) -> None:
    """Have this child's records, of our own loggers, read by its parent. handler: writes to standard error."""
    handler = handler or logging.StreamHandler(sys.stderr)
    handler.setFormatter(ChildFormatter(process, node))
    logger = logging.getLogger("shardwright")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


# ---- its parent's side ---------------------------------------------------------
class ChildOutput:
    """What a child writes to standard error: lines of its log go on to `logger`, others at level debug.

    Feed it lines as they come.
    """

    def __init__(self, logger: logging.Logger, process: str, node: int | None = None) -> None:
        self._logger = logger
        self._process = process
        self._node = node
        self._last: deque[str] = deque(maxlen=LAST_LINES)

    def take(self, text: str) -> None:
        """Take in one line, without its end."""
        line = self._marked_line(text)
        if line is not None:
            if level_number(line.level) >= logging.WARNING:
                self._last.append(line.message)
            self._logger.log(level_number(line.level), "%s", line.message, extra={"log_line": line})
            return
        self._last.append(text)
        if self._logger.isEnabledFor(logging.DEBUG):
            about_it = {"process": self._process} | ({} if self._node is None else {"node": self._node})
            self._logger.debug("%s", text, extra=fields(**about_it))

    def _marked_line(self, text: str) -> LogLine | None:
        if not text.startswith(CHILD_MARK):
            return None
        try:
            return LogLine.from_json(text.removeprefix(CHILD_MARK))
        except (ValueError, KeyError, TypeError):  # cut, or not ours
            return None

    @property
    def last_lines(self) -> list[str]:
        """What it wrote last, oldest first; without news of no weight."""
        return [line for line in self._last if line.strip()]


class ChildOutputReader:
    """A thread that reads a child's standard error to its end, and closes it. take: gets the lines."""

    def __init__(self, stream: BinaryIO, take: Callable[[str], None]) -> None:
        self._stream = stream
        self._take = take
        self._thread = threading.Thread(target=self._read, name="child-output", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait until all is read that an ended child has written."""
        self._thread.join(timeout_s)

    def _read(self) -> None:
        cutter = LineCutter()
        with self._stream:
            while chunk := os.read(self._stream.fileno(), 1 << 16):
                for line in cutter.feed(chunk):
                    self._take(line)
        for line in cutter.rest():
            self._take(line)


class LineCutter:
    """Cuts chunks of bytes into lines; what is not a line of a log is cut to its beginning."""

    def __init__(self) -> None:
        self._begun = b""

    def feed(self, chunk: bytes) -> list[str]:
        """Lines that end in this chunk."""
        *ended, rest = chunk.split(b"\n")
        lines = []
        for part in ended:
            lines.append(_decode(self._begun + part))
            self._begun = b""
        begun = self._begun + rest
        self._begun = begun[: _limit_of(begun)]
        return lines

    def rest(self) -> list[str]:
        """The last line, if it has no end."""
        begun, self._begun = self._begun, b""
        return [_decode(begun)] if begun else []


def _limit_of(beginning: bytes) -> int:
    return 1 << 20 if beginning.startswith(CHILD_MARK.encode()) else RAW_LINE_BYTES


def _decode(data: bytes) -> str:
    return data[: _limit_of(data)].decode(errors="replace").rstrip()
