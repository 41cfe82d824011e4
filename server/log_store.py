"""The last lines of logs, in bounded memory: of one process, and on the master of all nodes.

Every server process keeps its own lines, and those of its children. A worker's daemon sends its lines to the master,
and all that it keeps when the connection is another one; the master drops what it has already. So one place has the
last lines of all nodes, also of executors that died and of nodes that are gone.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from shardwright.log_lines import LogLine, level_number
from shardwright.server.tuning import (
    LEAST_NODE_BYTES,
    LINE_OVERHEAD_BYTES,
    MOST_NODE_BYTES,
    RECENT_BYTES,
    RECENT_LINES,
    STORE_BYTES,
)


def size_of(line: LogLine) -> int:
    """Bytes that a line takes in memory, about."""
    return LINE_OVERHEAD_BYTES + len(line.message) + len(line.traceback) + len(line.output)


class _Ring:
    """Numbered lines, the oldest dropped past a number of bytes."""

    def __init__(self, most_bytes: int, most_lines: int) -> None:
        self._most_bytes, self._most_lines = most_bytes, most_lines
        self._lines: deque[tuple[int, LogLine]] = deque()
        self._bytes = 0
        self.last_dropped = 0

    def append(self, number: int, line: LogLine) -> None:
        self._lines.append((number, line))
        self._bytes += size_of(line)
        while self._lines and (self._bytes > self._most_bytes or len(self._lines) > self._most_lines):
            self.last_dropped, dropped = self._lines.popleft()
            self._bytes -= size_of(dropped)

    def after(self, number: int) -> list[tuple[int, LogLine]]:
        """Lines with a later number, oldest first."""
        lines = []
        for entry in reversed(self._lines):
            if entry[0] <= number:
                break
            lines.append(entry)
        return lines[::-1]


class RecentLines:
    """The last lines of this process' log, numbered from 1. Thread-safe."""

    def __init__(self, most_bytes: int = RECENT_BYTES, most_lines: int = RECENT_LINES) -> None:
        self._lock = threading.Lock()
        self._ring = _Ring(most_bytes, most_lines)
        self._last = 0

    def append(self, line: LogLine) -> None:
        with self._lock:
            self._last += 1
            self._ring.append(self._last, line)

    def after(self, number: int, most: int) -> tuple[int, list[LogLine]]:
        """(number of the first, lines): at most so many with a later number; (0, []) where there is none."""
        with self._lock:
            if self._last <= number:
                return 0, []
            entries = self._ring.after(number)[:most]
        return (entries[0][0], [line for _, line in entries]) if entries else (0, [])


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """Which lines: of one node, of the session whose id begins so, of a level at least."""

    node: int | None = None
    session: str = ""
    level: str = "debug"

    def takes(self, line: LogLine) -> bool:
        if self.node is not None and line.node != self.node:
            return False
        shown = self.session[: len(line.session)]
        if self.session and not (line.session and line.session.startswith(shown)):
            return False
        return level_number(line.level) >= level_number(self.level)


class LogStore:
    """The master's: lines of every node, in the order of their arrival. Used from the event loop's thread.

    own: the master's own lines, and those of its children, which are collected whenever somebody looks.
    """

    def __init__(self, nodes: Iterable[int], own: RecentLines, *, own_node: int = 0) -> None:
        names = {*nodes, own_node}
        each = min(max(STORE_BYTES // len(names), LEAST_NODE_BYTES), MOST_NODE_BYTES)
        self._rings = {node: _Ring(each, each) for node in names}
        self._own, self._own_node, self._own_taken = own, own_node, 0
        self._taken: dict[int, tuple[str, int]] = {}  # by node: origin of its lines, number of the last one
        self.last = 0

    def add(self, node: int, origin: str, first_number: int, lines: Iterable[LogLine]) -> None:
        """Lines that a node's daemon sent; those that came before are left out."""
        if node not in self._rings:
            return
        known, taken = self._taken.get(node, ("", 0))
        taken = taken if known == origin else 0
        for number, line in enumerate(lines, first_number):
            if number > taken:
                self._append(node, line)
                taken = number
        self._taken[node] = origin, taken

    def after(self, number: int, query: Query) -> tuple[list[LogLine], bool]:
        """Lines that arrived after the one of this number, in the order of their times; whether others are gone."""
        self._collect_own()
        if self.last <= number:
            return [], False
        rings = [ring for node, ring in self._rings.items() if query.node in (None, node)]
        lines = [line for ring in rings for _, line in ring.after(number) if query.takes(line)]
        return sorted(lines, key=lambda line: line.time_s), any(ring.last_dropped > number for ring in rings)

    def _collect_own(self) -> None:
        while True:
            first, lines = self._own.after(self._own_taken, RECENT_LINES)
            if not lines:
                return
            self._own_taken = first + len(lines) - 1
            for line in lines:
                self._append(self._own_node, line)

    def _append(self, node: int, line: LogLine) -> None:
        self.last += 1
        self._rings[node].append(self.last, line)
