"""Names of JAX that are replaced while a program is traced, for the thread that traces it.

Modules are everybody's: a replacement asks first whether this thread has anything to say (a `ContextVar`), and is the
original otherwise. The originals are put back when the last thread is done.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

#: (what holds it, its name or key, original → replacement).
Place = tuple[Any, Any, Callable[[Any], Any]]


class ReplacedNames:
    """Attributes of modules and classes, and values of dictionaries, replaced while anybody needs that.

    places: where; asked for when the first thread comes.
    """

    def __init__(self, places: Callable[[], Sequence[Place]]) -> None:
        self._places = places
        self._lock = threading.Lock()
        self._originals: list[tuple[Any, Any, Any]] = []
        self._users = 0

    @contextmanager
    def replaced(self) -> Iterator[None]:
        self._enter()
        try:
            yield
        finally:
            self._leave()

    def _enter(self) -> None:
        with self._lock:
            if not self._users:
                for holder, name, replace in self._places():
                    original = _get(holder, name)
                    _set(holder, name, replace(original))
                    self._originals.append((holder, name, original))
            self._users += 1

    def _leave(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                for holder, name, original in reversed(self._originals):
                    _set(holder, name, original)
                self._originals.clear()


def _get(holder: Any, name: Any) -> Any:
    return holder[name] if isinstance(holder, dict) else getattr(holder, name)


def _set(holder: Any, name: Any, value: Any) -> None:
    if isinstance(holder, dict):
        holder[name] = value
    else:
        setattr(holder, name, value)
