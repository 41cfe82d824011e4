"""Mutations of protobuf messages by their descriptors: fields dropped, repeated, swapped, extreme, of wrong lengths."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_INTEGERS = (0, 1, 2, 3, 7, -1, 2**31 - 1, -(2**31), 2**32 - 1, 2**53, 2**63 - 1, -(2**63), 2**64 - 1)
_FLOATS = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0, -1.0, 1e-320, 1e-9, 1e308)
_TEXTS = (
    "", " ", "x", "\0", "é", "\u2028", "x" * 5000, "../..", "~", "*", "{}", "[[", "data", "f32", "bf16", "pred", "s4",
    "token", "tuple", "-1", "9" * 400,
)  # fmt: skip
_BYTES = (b"", b"\0", b"\xff" * 7, bytes(1 << 16))

_WHOLE = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
_REAL = (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT)

#: A message that holds a field, set or not.
Place = tuple[Message, FieldDescriptor]


def mutate(rng: random.Random, messages: Sequence[Message], donors: Sequence[Message]) -> list[Message]:
    """The messages of a call with one to three changes. donors: valid messages, whose values are put in their place."""
    mutants = [_copy(message) for message in messages]
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        if len(mutants) > 1 and rng.random() < 0.15:
            _change_order(rng, mutants)
        elif mutants:
            _change_field(rng, rng.choice(mutants), donors)
    return mutants


def _copy(message: Message) -> Message:
    copied = type(message)()
    copied.CopyFrom(message)
    return copied


def _change_order(rng: random.Random, messages: list[Message]) -> None:
    at = rng.randrange(len(messages))
    kind = rng.choice(["drop", "repeat", "reverse"])
    if kind == "drop":
        del messages[at]
    elif kind == "repeat":
        messages[at:at] = [_copy(messages[at])] * rng.choice([1, 3])
    else:
        messages.reverse()


def _change_field(rng: random.Random, message: Message, donors: Sequence[Message]) -> None:
    places = list(_places(message))
    if not places:
        return  # of a message without fields
    set_places = [(parent, field) for parent, field in places if _is_set(parent, field)]
    parent, field = rng.choice(set_places if set_places and rng.random() < 0.8 else places)
    if rng.random() < 0.12:
        parent.ClearField(field.name)
    elif field.is_repeated:
        _change_list(rng, parent, field, donors)
    elif field.message_type is not None:
        target = getattr(parent, field.name)
        target.SetInParent()
        _take(rng, target, donors)
    else:
        setattr(parent, field.name, _value(rng, field, getattr(parent, field.name), donors))


def _change_list(rng: random.Random, parent: Message, field: FieldDescriptor, donors: Sequence[Message]) -> None:
    values = getattr(parent, field.name)
    kind = rng.choice(["drop", "repeat", "reverse", "change", "change", "add"])
    if values and kind == "drop":
        del values[rng.randrange(len(values))]
    elif values and kind == "repeat":
        values.extend([values[rng.randrange(len(values))]] * rng.choice([1, 2, 50]))
    elif values and kind == "reverse":
        values.reverse()
    elif field.message_type is not None:
        _take(rng, rng.choice(values) if values and kind == "change" else values.add(), donors)
    elif values and kind == "change":
        at = rng.randrange(len(values))
        values[at] = _value(rng, field, values[at], donors)
    else:
        values.append(_value(rng, field, field.default_value or 0, donors))


def _take(rng: random.Random, target: Message, donors: Sequence[Message]) -> None:
    """Make of a message an empty one, or another one of its type."""
    others = [part for donor in donors for part in _parts(donor) if part.DESCRIPTOR is target.DESCRIPTOR]
    if others and rng.random() < 0.8:
        target.CopyFrom(rng.choice(others))
    else:
        target.Clear()


def _value(rng: random.Random, field: FieldDescriptor, value: Any, donors: Sequence[Message]) -> Any:
    """Another value that the field can hold."""
    if field.cpp_type in _WHOLE:
        low, high = _WHOLE[field.cpp_type]
        others = [value + 1, value - 1, value * 2, *_INTEGERS, *_others(rng, field, donors)]
        return rng.choice([other for other in others if low <= other <= high])
    if field.cpp_type in _REAL:
        return rng.choice([*_FLOATS, value * 2, -value])
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return not value
    if field.type == FieldDescriptor.TYPE_BYTES:
        at = rng.randrange(len(value or b"") + 1)
        return rng.choice([*_BYTES, (value or b"")[:at], (value or b"") + b"\0", (value or b"") * 2])
    return rng.choice([*_TEXTS, (value or "") + "x", *_others(rng, field, donors)])


def _others(rng: random.Random, field: FieldDescriptor, donors: Sequence[Message]) -> list[Any]:
    """Some values that other fields of this type have in one of the donors."""
    found: list[Any] = []
    for parent, each in _places(rng.choice(donors)):
        if each.cpp_type == field.cpp_type and each.type == field.type:
            value = getattr(parent, each.name)
            found.extend(value if each.is_repeated else [value])
    return rng.sample(found, min(len(found), 8))


def _parts(message: Message) -> Iterator[Message]:
    """The message and all in it."""
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for part in value if field.is_repeated else [value]:
                yield from _parts(part)


def _places(message: Message) -> Iterator[Place]:
    """Every field of the message and of all in it."""
    for part in _parts(message):
        for field in part.DESCRIPTOR.fields:
            yield part, field


def _is_set(parent: Message, field: FieldDescriptor) -> bool:
    if field.is_repeated:
        return bool(getattr(parent, field.name))
    return parent.HasField(field.name) if field.has_presence else getattr(parent, field.name) != field.default_value
