"""The current collective of this rank: its call, its start, and the number of those begun.

`stall` finds missing ranks by it, `lifeline` a rank stuck in a collective of lost ones. Collectives run one at a time,
on any thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """A collective under way at this rank. ranks: its members. count: its number among theirs, from 1.

    call: its text, once known. since_s: of `time.monotonic`.
    """

    ranks: tuple[int, ...]
    count: int
    call: str
    since_s: float


#: The call of a collective that has not been named yet, and of a rank that takes part in any.
UNNAMED, JOINED = "a collective", "join"


def name_call(call: str) -> str:
    """A call's name, whether it begins or is under way."""
    return call.removeprefix("start of ")


class Watch:
    """The collectives of one process, in one generation.

    stall: who keeps the present collective waiting, once that is known: "rank 2 has not called barrier …".
    """

    def __init__(self) -> None:
        self.stall = ""
        self._counts: dict[tuple[int, ...], int] = {}
        self._calls: dict[tuple[int, ...], str] = {}
        self._position: Position | None = None
        self._pending: tuple[Position, Callable[[], bool]] | None = None
        self._depth = 0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def collective(self, ranks: tuple[int, ...], call: str = UNNAMED) -> Iterator[None]:
        """This rank is in a collective of these ranks while the block runs; one within another is a part of it."""
        with self._lock:
            self._depth += 1
            if self._depth == 1:
                count = self._counts[ranks] = self._counts.get(ranks, 0) + 1
                self._calls[ranks] = name_call(call)
                self._position = Position(ranks=ranks, count=count, call=call, since_s=time.monotonic())
                self.stall = ""
        try:
            yield
        finally:
            with self._lock:
                self._depth -= 1
                ended, self._position = (self._position, None) if self._depth == 0 else (None, self._position)
            if ended is not None and _Process.on_collective is not None:
                _Process.on_collective(ended, time.monotonic())

    def describe(self, call: str) -> None:
        """Name the current collective."""
        with self._lock:
            here = self._position
            if here is not None:
                self._calls[here.ranks] = call
                self._position = Position(ranks=here.ranks, count=here.count, call=call, since_s=here.since_s)

    def leave_pending(self, ranks: tuple[int, ...], call: str, result: Any) -> None:
        """Note a started program. Its collectives run until `result`, an array, is ready."""
        here = Position(ranks=ranks, count=self._counts.get(ranks, 0), call=call, since_s=time.monotonic())
        self._pending = here, lambda: _is_ready(result)
        if _Process.on_program is not None:
            _Process.on_program(here, result)

    def position(self) -> Position | None:
        """The current collective of this rank, or None."""
        pending = self._pending
        if pending is not None:
            here, is_ready = pending
            if not is_ready():
                return here
            self._pending = None
        return self._position

    def begun(self) -> dict[tuple[int, ...], tuple[int, str]]:
        """The number of collectives begun with each set of ranks, and the call of the latest."""
        with self._lock:
            return {ranks: (count, self._calls[ranks]) for ranks, count in self._counts.items()}


def _is_ready(result: Any) -> bool:
    try:
        return bool(result.is_ready())
    except RuntimeError:  # its buffer was donated: the next program has taken it over
        return True


class _Process:
    watch = Watch()
    on_collective: Callable[[Position, float], None] | None = None
    on_program: Callable[[Position, Any], None] | None = None


def current() -> Watch:
    """The watch of this generation."""
    return _Process.watch


def reset() -> None:
    """A new generation begins: nothing has been called yet."""
    _Process.watch = Watch()


def observe(
    on_collective: Callable[[Position, float], None] | None, on_program: Callable[[Position, Any], None] | None
) -> None:
    """Call back with each ended collective and its time, and with each started program."""
    _Process.on_collective, _Process.on_program = on_collective, on_program
