"""Reading JSON strictly: typed access by key, errors that name the path, keys that nobody knows refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from shardwright.errors import PlanError

T = TypeVar("T")


class Reader:
    """One JSON object: typed access by key, errors that name the path, unknown keys refused."""

    def __init__(self, data: Any, path: str, *, refuse_unknown: bool) -> None:
        if not isinstance(data, dict):
            raise PlanError(f"expected an object, found {shown(data)}", where=path)
        self._data = data
        self._path = path
        self._refuse_unknown = refuse_unknown
        self._taken: set[str] = set()

    def take(self, key: str) -> Any:
        self._taken.add(key)
        if key not in self._data:
            raise PlanError("the field is missing", where=f"{self._path}.{key}")
        return self._data[key]

    def has(self, key: str) -> bool:
        return key in self._data

    def wrong(self, key: str, expected: str, found: Any) -> PlanError:
        return PlanError(f"expected {expected}, found {shown(found)}", where=f"{self._path}.{key}")

    def text(self, key: str) -> str:
        value = self.take(key)
        if not isinstance(value, str):
            raise self.wrong(key, "a string", value)
        return value

    def integer(self, key: str, *, least: int = 0) -> int:
        value = self.take(key)
        if type(value) is not int or value < least:
            raise self.wrong(key, f"an integer ≥ {least}", value)
        return value

    def boolean(self, key: str) -> bool:
        value = self.take(key)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false", value)
        return value

    def number(self, key: str) -> float:
        value = self.take(key)
        if type(value) not in (int, float) or not (value >= 0 and math.isfinite(value)):
            raise self.wrong(key, "a finite number ≥ 0", value)
        return float(value)

    def items(self, key: str) -> list[Any]:
        value = self.take(key)
        if not isinstance(value, list):
            raise self.wrong(key, "a list", value)
        return value

    def texts(self, key: str, *, among: Sequence[str] | None = None) -> tuple[str, ...]:
        value = self.items(key)
        for item in value:
            if not isinstance(item, str) or (among is not None and item not in among):
                raise self.wrong(key, "strings" if among is None else f"names among {', '.join(among)}", item)
        return tuple(value)

    def integers(self, key: str) -> tuple[int, ...]:
        value = self.items(key)
        if any(type(item) is not int or item < 0 for item in value):
            raise self.wrong(key, "a list of integers ≥ 0", value)
        return tuple(value)

    def entry(self, key: str, table: Sequence[T]) -> T:
        position = self.integer(key)
        if position >= len(table):
            raise self.wrong(key, f"a position below {len(table)}", position)
        return table[position]

    def object(self, key: str) -> Reader:
        return Reader(self.take(key), f"{self._path}.{key}", refuse_unknown=self._refuse_unknown)

    def objects(self, key: str, read: Callable[[Reader], T]) -> tuple[T, ...]:
        found = []
        for i, item in enumerate(self.items(key)):
            row = Reader(item, f"{self._path}.{key}[{i}]", refuse_unknown=self._refuse_unknown)
            try:
                found.append(read(row))
            except PlanError as error:  # from a value's own constructor: say where
                raise error if error.where else PlanError(error.message, where=row._path) from None
            row.finish()
        return tuple(found)

    def finish(self) -> None:
        unknown = sorted(set(self._data) - self._taken)
        if unknown and self._refuse_unknown:
            raise PlanError("the field is not known", where=f"{self._path}.{unknown[0]}")


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
