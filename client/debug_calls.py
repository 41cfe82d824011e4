"""What `jax.debug.print` and `jax.debug.callback` in a step say, as values: which results of its program they read, and
how often, in the order in which one device would have come by them.

A function has a level: its calls, and those of loops and branches in it, each a level of its own. The arrays of a level
are results of the function: those that its calls read, and for each inner level a run of arrays, which hold all trips
of a loop along their first dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from shardwright.client.array_specs import ArraySpec

#: The step whose calls are made by this thread.
_step_number: ContextVar[int | None] = ContextVar("shardwright_debug_step", default=None)


def debug_step() -> int | None:
    """Number of the step whose `jax.debug.callback` runs, as in errors and in lines of `jax.debug.print`; None outside
    of one.
    """
    return _step_number.get()


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """What a call reads: an array of its level, or a constant.

    number: the array's, −1 of a constant. entries: (dimension, index) of the entry that is meant, one after the other.
    """

    number: int = -1
    constant: Any = None
    entries: tuple[tuple[int, int], ...] = ()

    def value(self, arrays: Sequence[np.ndarray]) -> Any:
        """A scalar of numpy where it has no dimensions, which prints as JAX's arrays do; the words of a PRNG key."""
        if self.number < 0:
            return self.constant
        value = np.asarray(arrays[self.number])
        for dimension, index in self.entries:
            value = value[(slice(None),) * dimension + (index,)]
        return value[()]


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugCall:
    """One call. say: is called with what comes before a printed line, and with the operands. where: its source line."""

    say: Callable[[str, Sequence[Any]], None]
    operands: tuple[Operand, ...]
    where: str

    def list_calls(self, arrays: Sequence[np.ndarray]) -> Iterator[tuple[DebugCall, list[Any]]]:
        yield self, [operand.value(arrays) for operand in self.operands]


class Entry(Protocol):
    """Something of a level."""

    def list_calls(self, arrays: Sequence[np.ndarray]) -> Iterator[tuple[DebugCall, list[Any]]]:
        """The calls that were made, in order, with their operands; arrays: the level's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Of a function. types: of its arrays."""

    entries: tuple[Entry, ...] = ()
    types: tuple[ArraySpec, ...] = ()

    def list_calls(self, arrays: Sequence[np.ndarray]) -> Iterator[tuple[DebugCall, list[Any]]]:
        for entry in self.entries:
            yield from entry.list_calls(arrays)

    def of_trip(self, arrays: Sequence[np.ndarray], trip: int) -> Iterator[tuple[DebugCall, list[Any]]]:
        """The calls of one trip; arrays: of all trips."""
        return self.list_calls([array[trip] for array in arrays])


NO_CALLS = Level()


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    """A function that runs once, where it is called. start: number of its first array in the level around it."""

    start: int
    level: Level

    def list_calls(self, arrays: Sequence[np.ndarray]) -> Iterator[tuple[DebugCall, list[Any]]]:
        return self.level.list_calls(arrays[self.start :])


@dataclass(frozen=True, slots=True, kw_only=True)
class Trips:
    """A loop of so many trips, the first of which has the last entries where it is reversed."""

    start: int
    level: Level
    length: int
    is_reversed: bool

    def list_calls(self, arrays: Sequence[np.ndarray]) -> Iterator[tuple[DebugCall, list[Any]]]:
        own = arrays[self.start : self.start + len(self.level.types)]
        for trip in reversed(range(self.length)) if self.is_reversed else range(self.length):
            yield from self.level.of_trip(own, trip)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenTrips:
    """A loop whose number of trips the program does not say: the array `start` counts them.

    before: what runs once, ahead of the first trip. kept: for so many trips there is room; of more, the last place
    holds the last one. gap: says how many are left out.
    """

    start: int
    before: Level
    level: Level
    kept: int
    gap: DebugCall

    def list_calls(self, arrays: Sequence[np.ndarray]) -> Iterator[tuple[DebugCall, list[Any]]]:
        first = self.start + 1
        second = first + len(self.before.types)
        yield from self.before.list_calls(arrays[first:second])
        count = int(arrays[self.start])
        own = arrays[second : second + len(self.level.types)]
        for trip in range(min(count, self.kept)):
            if trip == self.kept - 1 < count - 1:
                yield self.gap, [count - self.kept]
            yield from self.level.of_trip(own, trip)


@dataclass(frozen=True, slots=True, kw_only=True)
class Branches:
    """One of several functions: the array `start` says which; all have their arrays, one after the other."""

    start: int
    levels: tuple[Level, ...]

    def list_calls(self, arrays: Sequence[np.ndarray]) -> Iterator[tuple[DebugCall, list[Any]]]:
        choice = min(max(int(arrays[self.start]), 0), len(self.levels) - 1)
        start = self.start + 1 + sum(len(level.types) for level in self.levels[:choice])
        return self.levels[choice].list_calls(arrays[start:])


def make_calls(level: Level, arrays: Sequence[np.ndarray], number: int) -> Iterator[tuple[DebugCall, BaseException]]:
    """Makes the calls of step `number`; gives those that raised, with what they raised."""
    token = _step_number.set(number)
    try:
        for call, values in level.list_calls(arrays):
            try:
                call.say(f"step {number}: ", values)
            except BaseException as error:  # a `sys.exit()` too: it would end the thread that others wait for
                yield call, error
    finally:
        _step_number.reset(token)
