"""Checks of constants' literals against their shapes, without building Python numbers from them."""

from __future__ import annotations

import re
from collections.abc import Callable
from math import prod

from shardwright.hlo.lexical import bracket_end, fail, skip_space
from shardwright.hlo.shapes import ELEMENT_BITS, ArrayShape, BufferShape, OpaqueShape, Shape, TupleShape

_INT = r"-?[0-9]+"
_REAL = r"-?(?:[0-9]+\.?[0-9]*(?:[eE][+\-]?[0-9]+)?|\.[0-9]+(?:[eE][+\-]?[0-9]+)?|inf|nan(?:\(0x[0-9a-fA-F]+\))?)"
_COMPLEX = rf"\(\s*{_REAL}\s*,\s*{_REAL}\s*\)"


def _list_of(value: str) -> re.Pattern[str]:
    return re.compile(rf"[\s{{]*+{value}[\s}}]*+(?:,[\s{{]*+{value}[\s}}]*+)*+", re.ASCII)


_VALUES = {
    "pred": (_list_of("(?:true|false|-?[0-9]{1,19})"), "true or false"),
    "integer": (_list_of(_INT), "an integer"),
    "real": (_list_of(_REAL), "a number, inf or nan"),
    "complex": (_list_of(_COMPLEX), "a complex number such as (1, 2)"),
}
_ELIDED = re.compile(r"\{\s*\.\.\.\s*\}")
_NOT_BRACKETS = re.compile(r"[^{},]+")
_COMPLEX_PAIR = re.compile(r"\([^()]*\)")


def _kind(element_type: str) -> str:
    if element_type == "pred":
        return "pred"
    if element_type[0] in "su":
        return "integer"
    return "complex" if element_type[0] == "c" else "real"


def check_literal(text: str, start: int, end: int, shape: Shape, original: str) -> None:
    """Raise HloSyntaxError unless `text[start:end]` is a literal of this shape; tuples nest without recursion.

    `original` is the text with its comments, as errors show it.
    """
    pending: list[tuple[int, int, Shape]] = [(start, end, shape)]
    while pending:
        start, end, shape = pending.pop()
        start = skip_space(text, start)
        while end > start and text[end - 1] in " \t\r\n":
            end -= 1
        if isinstance(shape, TupleShape) and _ELIDED.fullmatch(text, start, end):
            continue
        if isinstance(shape, TupleShape):
            pending.extend(_tuple_parts(text, start, end, shape, original))
        elif isinstance(shape, OpaqueShape | BufferShape):
            fail(original, start, "a constant is an array or a tuple of arrays")
        else:
            _check_array(text, start, end, shape, original)


def in_range(payload: str, shape: Shape) -> str:
    """A checked literal, with out-of-range numbers accepted by XLA converted to its type.

    `u64[] constant(-1)` is 2^64 - 1, `s64[] constant(18446744073709551615)` is -1, `pred[] constant(2)` is true.
    """
    if not isinstance(shape, ArrayShape) or shape.element_type not in _WRAPPED or "..." in payload:
        return payload
    pattern, value = _WRAPPED[shape.element_type]
    return pattern.sub(lambda match: str(value(int(match[0]))), payload)


#: By element type: the numbers that are no values of it, and which value each stands for.
_WRAPPED: dict[str, tuple[re.Pattern[str], Callable[[int], int]]] = {
    "u64": (re.compile(r"-[0-9]+", re.ASCII), lambda number: number % 2**64),
    "s64": (re.compile(r"(?<![-0-9])[0-9]{19,}", re.ASCII), lambda number: (number + 2**63) % 2**64 - 2**63),
    "pred": (re.compile(r"-[0-9]+|[0-9]{2,}|[2-9]", re.ASCII), lambda number: int(number != 0)),
}


def _tuple_parts(text: str, start: int, end: int, shape: TupleShape, original: str) -> list[tuple[int, int, Shape]]:
    if not text.startswith("(", start) or text[end - 1] != ")":
        fail(original, start, "expected a tuple literal such as (1, {2, 3})")
    bounds: list[tuple[int, int]] = []
    position = begin = start + 1
    while position < end - 1:
        character = text[position]
        if character in "({":
            position = bracket_end(text, position, original)
            continue
        if character == ",":
            bounds.append((begin, position))
            begin = position + 1
        position += 1
    if text[begin : end - 1].strip() or bounds:
        bounds.append((begin, end - 1))
    if len(bounds) != len(shape.elements):
        fail(original, start, f"expected a tuple of {len(shape.elements)} elements, got {len(bounds)}")
    return [(low, high, element) for (low, high), element in zip(bounds, shape.elements, strict=True)]


def _check_array(text: str, start: int, end: int, shape: ArrayShape, original: str) -> None:
    body = text[start:end]
    if "..." in body:
        _check_elided(body, start, shape, original)
        return
    count = prod(shape.dimensions)
    element_type = shape.element_type
    pattern, expected = _VALUES[_kind(element_type)]
    if count:
        # The shortest value is one character and a comma: a wrong shape cannot make us build a huge skeleton.
        if count > len(body):
            fail(original, start, f"expected {count} values, got a literal of {len(body)} characters")
        match = pattern.match(body)
        if match is None or match.end() != len(body):
            fail(original, start + _first_bad(body, pattern), f"expected {expected}")
        if element_type[0] in "su":
            _check_range(body, element_type, start, original)
    if count == 1 and "{" not in body:
        return  # one number without its braces, as XLA reads it too
    skeleton = _COMPLEX_PAIR.sub("", body) if shape.element_type[0] == "c" else body
    brackets = _NOT_BRACKETS.sub("", skeleton)
    if brackets != _skeleton(shape.dimensions, len(body)) and not _same_but_empty(brackets, shape.dimensions):
        sizes = ",".join(map(str, shape.dimensions))
        values = f"{brackets.count(',') + 1} values"
        fail(original, start, f"expected a literal with {count} values nested as [{sizes}], got {values}")


def _check_elided(body: str, start: int, shape: ArrayShape, original: str) -> None:
    """A literal with `{...}` in the place of an array, or of some of the arrays that it nests: no value is known."""
    pattern, expected = _VALUES[_kind(shape.element_type)]
    value = "{(0,0)}" if shape.element_type[0] == "c" else "{0}"
    if not shape.dimensions or not pattern.fullmatch(_ELIDED.sub(value, body)):
        fail(original, start, f"expected {expected}, or {{...}} where the values of an array were left out")


def _check_range(body: str, element_type: str, start: int, original: str) -> None:
    """Refuse integers that the type does not hold; only those with enough digits to be too large are converted."""
    bits = ELEMENT_BITS[element_type]
    low, high = (0, 2**bits - 1) if element_type[0] == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    if bits == 64:  # XLA reads 64 bits either way: u64[] constant(-1) is 2^64 - 1
        low, high = -(2**63), 2**64 - 1
    digits = len(str(-low if low else high))
    for match in re.finditer(rf"-?[0-9]{{{digits},}}" if low else rf"-[0-9]+|[0-9]{{{digits},}}", body, re.ASCII):
        if len(match[0]) > 20 or not low <= int(match[0]) <= high:
            fail(original, start + match.start(), f"{match[0][:40]} is not a value of type {element_type}")


def _first_bad(body: str, pattern: re.Pattern[str]) -> int:
    match = pattern.match(body)
    position = match.end() if match else 0
    while position < len(body) and body[position] in " \t\r\n,{":
        position += 1
    return position


def _skeleton(dimensions: tuple[int, ...], limit: int) -> str | None:
    """Braces and commas of a literal with these dimensions; None if they alone exceed `limit` characters."""
    piece = ""
    for size in reversed(dimensions):
        if (len(piece) + 1) * size > limit + 2:
            return None
        piece = "{" + ",".join([piece] * size) + "}"
    return piece


def _same_but_empty(literal: str, dimensions: tuple[int, ...]) -> bool:
    return prod(dimensions) == 0 and literal == "{}"
