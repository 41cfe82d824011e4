"""Objects of the standard library, and of classes that hold only values, as plain parts, and again from them.

A class is named by module and name, and looked up among what the receiver has imported: nothing is imported, and no
function of the class is called. A data class gets its fields as they were, without `__init__` and `__post_init__`.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import enum
import pathlib
import sys
from collections.abc import Callable
from typing import Any


def take_apart(value: Any) -> tuple[str, Any] | None:
    """The kind of a value, and its parts; None for other kinds."""
    kind = type(value)
    if kind is collections.OrderedDict:
        return "ordered", list(value.items())
    if kind is argparse.Namespace:
        return "namespace", dict(vars(value))
    if isinstance(value, pathlib.PurePath):
        return ("path" if isinstance(value, pathlib.Path) else "pure_path"), str(value)
    if kind in _DATES:
        return kind.__name__, value.isoformat()
    if kind is datetime.timedelta:
        return "timedelta", [value.days, value.seconds, value.microseconds]
    if not _is_found(kind):
        return None
    if isinstance(value, enum.Enum):
        is_member = kind.__members__.get(value.name) is value  # several flags at once are none
        return ("enum", [*_name(kind), value.name]) if is_member else None
    if isinstance(value, tuple) and _is_named_tuple(kind):
        return "named_tuple", [*_name(kind), list(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
        return "data_class", [*_name(kind), fields]
    return None


_DATES = (datetime.datetime, datetime.date, datetime.time)


def _name(kind: type) -> tuple[str, str]:
    return kind.__module__, kind.__qualname__


def _is_found(kind: type) -> bool:
    """Whether a class is found by its name: not one of a function's own."""
    try:
        return _find_class(*_name(kind)) is kind
    except (TypeError, ValueError):
        return False


def _is_named_tuple(kind: type) -> bool:
    fields = getattr(kind, "_fields", None)
    return kind.__bases__ == (tuple,) and isinstance(fields, tuple) and all(isinstance(name, str) for name in fields)


def put_together(kind: str, parts: Any) -> Any:
    """The value of its parts. Raises ValueError, TypeError and LookupError for parts of no such value."""
    return _MAKERS[kind](parts)


def _find_class(module: str, name: str) -> type:
    """A class by its name, of a module that is imported here: looked up in dicts alone, so that nothing runs."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = None if found is None else vars(found).get(part)
    if not isinstance(found, type):
        raise ValueError(f"there is no class {module}.{name} here: import its module at every rank")
    return found


def _make_enum(parts: list[Any]) -> Any:
    module, name, member = parts
    found = _find_class(module, name)
    if not issubclass(found, enum.Enum):
        raise ValueError(f"{module}.{name} is no enum")
    return found.__members__[member]


def _make_named_tuple(parts: list[Any]) -> Any:
    module, name, items = parts
    found: Any = _find_class(module, name)
    if not issubclass(found, tuple) or not _is_named_tuple(found) or len(found._fields) != len(items):
        raise ValueError(f"{module}.{name} is no named tuple of {len(items)} fields")
    return tuple.__new__(found, items)


def _make_data_class(parts: list[Any]) -> Any:
    module, name, fields = parts
    found: Any = _find_class(module, name)
    names = [field.name for field in dataclasses.fields(found)]  # a TypeError where it is no data class
    if names != [field for field, _ in fields]:
        raise ValueError(f"{module}.{name} is no data class of these fields")
    value: Any = object.__new__(found)
    for field, item in fields:
        object.__setattr__(value, field, item)
    return value


_MAKERS: dict[str, Callable[[Any], Any]] = {
    "ordered": lambda parts: collections.OrderedDict((key, item) for key, item in parts),
    "namespace": lambda parts: argparse.Namespace(**parts),
    "path": pathlib.Path,
    "pure_path": pathlib.PurePath,
    "datetime": datetime.datetime.fromisoformat,
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "timedelta": lambda parts: datetime.timedelta(*parts),
    "enum": _make_enum,
    "named_tuple": _make_named_tuple,
    "data_class": _make_data_class,
}

#: The kinds that are made here.
KINDS = _MAKERS.keys()
