"""Objects of the standard library, enums, named tuples and data classes between ranks, without running their code."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import enum
import pathlib
from typing import Any, NamedTuple

import pytest

from shardwright.errors import CollectiveError, ObjectTypeError
from shardwright.object_codec import dumps, loads


class Color(enum.Enum):
    RED = "r"


class Level(enum.IntEnum):
    LOW = 1


class Flags(enum.Flag):
    A = 1
    B = 2


class Point(NamedTuple):
    x: int
    y: Any


@dataclasses.dataclass(frozen=True)
class Settings:
    rate: float
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        RUN.append("post_init")


@dataclasses.dataclass(slots=True)
class Nested:
    inner: Settings
    when: datetime.date


RUN: list[str] = []


@pytest.mark.parametrize(
    "value",
    [
        collections.OrderedDict([("b", 1), ("a", [2])]),
        argparse.Namespace(lr=0.1, layers=[1, 2]),
        pathlib.Path("a/b"),
        pathlib.PurePosixPath("a"),
        datetime.datetime(2020, 1, 2, 3, 4, 5, 6, tzinfo=datetime.UTC),
        datetime.date(2020, 1, 2),
        datetime.time(3, 4),
        datetime.timedelta(days=-1, microseconds=3),
        Color.RED,
        Level.LOW,
        Flags.A,
        Point(1, {"a": (2,)}),
        Nested(Settings(0.5, ("a",)), datetime.date(2020, 1, 2)),
        {"deep": [Point(Color.RED, Settings(1.0))]},
    ],
    ids=repr,
)
def test_a_value_arrives_as_it_was_and_runs_nothing(value: Any) -> None:
    message = dumps(value)
    RUN.clear()
    found = loads(message)
    assert found == value
    assert type(found) is type(value)
    assert RUN == []


def test_what_is_no_plain_value_is_refused_by_its_path() -> None:
    with pytest.raises(ObjectTypeError) as caught:
        dumps({"a": [Flags.A | Flags.B]})
    assert caught.value.where == "object['a'][0]"

    class Local(NamedTuple):
        x: int

    with pytest.raises(ObjectTypeError):
        dumps(Local(1))


@pytest.mark.parametrize(
    ("kind", "module", "name", "rest"),
    [
        ("enum", "os", "system", "x"),
        ("enum", __name__, "Settings", "RED"),
        ("enum", __name__, "Color", "GREEN"),
        ("enum", "not.imported", "Color", "RED"),
        ("named_tuple", "builtins", "tuple", []),
        ("named_tuple", __name__, "Point", []),
        ("data_class", "subprocess", "Popen", []),
        ("data_class", __name__, "Settings", []),
    ],
)
def test_a_message_of_no_such_class_is_an_error(kind: str, module: str, name: str, rest: Any) -> None:
    import json
    import struct

    parts = {"tuple": [module, name, rest]} if kind == "enum" else [module, name, rest]
    head = json.dumps({kind: parts}).encode()
    with pytest.raises(CollectiveError):
        loads(struct.pack("<Q", len(head)) + head)
