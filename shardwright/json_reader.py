"""Strict JSON reading: typed access by key, errors that name the path, unknown keys refused."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from shardwright.errors import PlanError

T = TypeVar("T")

#: The largest integer that a field holds: what protobuf, XLA and numpy hold in 64 bits.
LARGEST_INTEGER = 2**63 - 1

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_CONSTANT = re.compile(r"-?\b(?:NaN|Infinity)\b")
_SURROGATE = re.compile("[\ud800-\udfff]")
_LONG_NUMBER = re.compile(r"\d{1000,}")


class JsonProblem(ValueError):
    """Problem of a JSON text, and its place: line and column, from 1; (0, 0) if unknown."""

    def __init__(self, message: str, line: int = 0, column: int = 0) -> None:
        super().__init__(message)
        self.message = message
        self.line = line
        self.column = column

    def __str__(self) -> str:
        return f"line {self.line}, column {self.column}: {self.message}" if self.line else self.message


def load_json(text: str) -> Any:
    """The data of a JSON text under RFC 8259: without NaN and Infinity, each key of an object once.

    Raises JsonProblem.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise JsonProblem(error.msg, error.lineno, error.colno) from None
    except RecursionError:
        raise JsonProblem("nested too deeply") from None
    except _Constant as error:
        raise _locate_problem(f"{error} is no JSON number", text, _CONSTANT) from None
    except JsonProblem:
        raise
    except ValueError:  # Python reads no integer of more than some 4,300 digits
        raise _locate_problem("the number has too many digits", text, _LONG_NUMBER) from None


class _Constant(ValueError):
    """NaN, Infinity or -Infinity."""


def _refuse_constant(word: str) -> NoReturn:
    raise _Constant(word)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise JsonProblem(f"key {format_value(twice)} appears twice in one object")
    return data


def _locate_problem(message: str, text: str, pattern: re.Pattern[str]) -> JsonProblem:
    """The problem at the first match of a pattern outside strings."""
    match = pattern.search(_STRING.sub(lambda string: " " * len(string[0]), text))
    if match is None:
        return JsonProblem(message)
    line = text.count("\n", 0, match.start()) + 1
    return JsonProblem(message, line, match.start() - text.rfind("\n", 0, match.start()))


class ObjectReader:
    """One JSON object: typed access by key, errors that name the path, unknown keys refused."""

    def __init__(self, data: Any, path: str, *, refuse_unknown: bool) -> None:
        if not isinstance(data, dict):
            raise PlanError(f"expected an object, found {format_value(data)}", where=path)
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

    def names(self) -> list[str]:
        """Keys of an object with keys chosen by the program."""
        for key in self._data:
            if not _is_text(key):
                raise PlanError("expected a name of Unicode characters", where=f"{self._path}.{_key(key)}")
        return list(self._data)

    def wrong(self, key: str, expected: str, value: Any) -> PlanError:
        return PlanError(f"expected {expected}, found {format_value(value)}", where=f"{self._path}.{key}")

    def text(self, key: str) -> str:
        value = self.take(key)
        if not _is_text(value):
            raise self.wrong(key, "a string of Unicode characters", value)
        return str(value)

    def integer(self, key: str, *, least: int = 0, most: int = LARGEST_INTEGER) -> int:
        value = self.take(key)
        if type(value) is not int or not least <= value <= most:
            bounds = f"≥ {least}" if most == LARGEST_INTEGER else f"between {least} and {most}"
            raise self.wrong(key, f"an integer {bounds}", value)
        return value

    def boolean(self, key: str) -> bool:
        value = self.take(key)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false", value)
        return value

    def number(self, key: str) -> float:
        value = self.take(key)
        if not is_number(value) or value < 0:
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
            if not _is_text(item) or (among is not None and item not in among):
                raise self.wrong(key, "strings" if among is None else f"names among {', '.join(among)}", item)
        return tuple(value)

    def integers(self, key: str) -> tuple[int, ...]:
        value = self.items(key)
        if not all(is_count(item) for item in value):
            raise self.wrong(key, "a list of integers ≥ 0", value)
        return tuple(value)

    def entry(self, key: str, table: Sequence[T]) -> T:
        position = self.integer(key)
        if position >= len(table):
            raise self.wrong(key, f"a position below {len(table)}", position)
        return table[position]

    def object(self, key: str) -> ObjectReader:
        return ObjectReader(self.take(key), f"{self._path}.{key}", refuse_unknown=self._refuse_unknown)

    def objects(self, key: str, parse: Callable[[ObjectReader], T]) -> tuple[T, ...]:
        values = []
        for i, item in enumerate(self.items(key)):
            row = ObjectReader(item, f"{self._path}.{key}[{i}]", refuse_unknown=self._refuse_unknown)
            try:
                values.append(parse(row))
            except PlanError as error:  # from a value's own constructor: say where
                raise error if error.where else PlanError(error.message, where=row._path) from None
            row.finish()
        return tuple(values)

    def finish(self) -> None:
        unknown = sorted(set(self._data) - self._taken)
        if unknown and self._refuse_unknown:
            raise PlanError("the field is not known", where=f"{self._path}.{_key(unknown[0])}")


def is_count(value: Any) -> bool:
    """Whether it is an integer from 0 within 64 bits."""
    return type(value) is int and 0 <= value <= LARGEST_INTEGER


def is_number(value: Any) -> bool:
    """Whether it is a number within a float's range."""
    if type(value) is int:
        return abs(value) <= LARGEST_INTEGER
    return type(value) is float and math.isfinite(value)


def _key(key: str) -> str:
    """A key in a path's notation."""
    return key if key.isidentifier() else format_value(key)


def _is_text(value: Any) -> bool:
    """Whether it is a string UTF-8 can write: JSON's escapes spell halves of surrogate pairs, too."""
    return isinstance(value, str) and (value.isascii() or _SURROGATE.search(value) is None)


def format_value(value: Any) -> str:
    """A value in messages, in at most 60 characters."""
    if type(value) is int and abs(value) > LARGEST_INTEGER:
        return "an integer of more than 64 bits"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
