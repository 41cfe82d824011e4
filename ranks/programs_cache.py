"""What is compiled for the ranks of one generation: dropped when it ends, since programs keep its connections open."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar
from weakref import WeakSet


class ProgramHolder:
    """Holds compiled programs."""

    def __init__(self) -> None:
        _holders.add(self)

    def drop(self) -> None:
        """Let go of all programs."""
        raise NotImplementedError


_F = TypeVar("_F")

_holders: WeakSet[ProgramHolder] = WeakSet()
_cache_clears: list[Callable[[], None]] = []


def of_one_generation(cached: _F) -> _F:
    """A function under `functools.cache` whose results are programs."""
    _cache_clears.append(cached.cache_clear)  # type: ignore[attr-defined]
    return cached


def clear() -> None:
    """Let go of the programs of a generation."""
    for cache_clear in _cache_clears:
        cache_clear()
    for holder in list(_holders):
        holder.drop()
