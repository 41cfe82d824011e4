"""Shapes ↔ text, interned: a module of 51,000 instructions has a few hundred different shapes."""

from __future__ import annotations

import re
from math import prod

from shardwright.errors import UnsupportedProgramError
from shardwright.hlo.lexical import fail, skip_space
from shardwright.hlo.shapes import ELEMENT_BITS, ArrayShape, BufferShape, OpaqueShape, Shape, TupleShape

_TYPE = re.compile(r"([A-Za-z][A-Za-z0-9]*+)\s*+\[([^\[\]]*+)\]", re.ASCII)
# A brace that no number or colon follows opens a computation's body, not a layout.
_LAYOUT = re.compile(r"\s*+\{(?=\s*[0-9:])([^{}\"]*+)\}", re.ASCII)
_DIMENSION = re.compile(r"\s*+(<=)?\s*+([0-9]+)\s*+", re.ASCII)
_UNKNOWN_SIZE = re.compile(r"\s*+(?:<=)?\s*+\?\s*+", re.ASCII)
_BUFFER = re.compile(r"b\s*+\(\s*+", re.ASCII)
_OPAQUE = frozenset(["token", "opaque"])

#: XLA's layout: minor-to-major, then `:` and what else there is (tiles `T(8,128)(2,1)`, element size `E(4)`,
#: memory space `S(5)`, …), each a word and its arguments in parentheses.
_LAYOUT_TEXT = re.compile(
    r"\s*+((?:[0-9]+(?:\s*+,\s*+[0-9]+)*+)?)\s*+(?::\s*+(?:[A-Z#*]+(?:\([^(){}]*+\)\s*+)++)*+)?", re.ASCII
)
#: What to do about sizes that are not known before a program runs.
FIXED_SIZES = "export it for fixed shapes: a plan is for arrays of known sizes"
#: XLA counts elements and bytes in 63 bits.
_MAX_SIZE = 2**63 - 1
#: Bounds on what may be written, far above what is: products and comparisons of shapes stay cheap.
MAX_RANK = 128
MAX_TUPLE_DEPTH = 64


class ShapeReader:
    """Reads shapes out of one text; equal texts give the same object."""

    def __init__(self, text: str, original: str | None = None) -> None:
        self.text = text
        self.original = original or text  # with its comments, for errors
        self.by_text: dict[str, Shape] = {}

    def read(self, position: int) -> tuple[Shape, int]:
        """The shape at `position` and the offset after it; tuples nest without recursion."""
        text = self.text
        open_tuples: list[tuple[int, list[Shape]]] = []
        while True:
            position = skip_space(text, position)
            if text.startswith("(", position):
                if len(open_tuples) >= MAX_TUPLE_DEPTH:
                    fail(self.original, position, f"tuple shapes nest deeper than {MAX_TUPLE_DEPTH}")
                open_tuples.append((position, []))
                position = skip_space(text, position + 1)
                if not text.startswith(")", position):
                    continue
                shape, position = self._close(open_tuples, position + 1)
            else:
                shape, position = self._read_buffer(position) or self._read_leaf(position)
            while open_tuples:
                open_tuples[-1][1].append(shape)
                position = skip_space(text, position)
                if text.startswith(",", position):
                    position += 1
                    break
                if not text.startswith(")", position):
                    fail(self.original, position, "expected ',' or ')' in a tuple shape")
                shape, position = self._close(open_tuples, position + 1)
            else:
                return shape, position

    def _close(self, open_tuples: list[tuple[int, list[Shape]]], end: int) -> tuple[Shape, int]:
        start, elements = open_tuples.pop()
        key = self.text[start:end]
        shape = self.by_text.get(key)
        if shape is None:
            shape = self.by_text[key] = TupleShape(tuple(elements))
        return shape, end

    def _read_buffer(self, position: int) -> tuple[Shape, int] | None:
        match = _BUFFER.match(self.text, position)
        if match is None:
            return None
        shape, end = self._read_leaf(match.end())
        end = skip_space(self.text, end)
        if not isinstance(shape, ArrayShape) or not self.text.startswith(")", end):
            fail(self.original, match.end(), "expected the shape of one array and ')' in b(…)")
        key = self.text[position : end + 1]
        return self.by_text.setdefault(key, BufferShape(shape)), end + 1

    def _read_leaf(self, position: int) -> tuple[Shape, int]:
        text = self.text
        match = _TYPE.match(text, position)
        if match is None:
            fail(self.original, position, "expected a shape such as f32[2,3]{1,0}, (f32[], s32[2]) or token[]")
        element_type, dimension_text = match.groups()
        layout_match = _LAYOUT.match(text, match.end())
        end = match.end() if layout_match is None else layout_match.end()
        key = text[position:end]
        shape = self.by_text.get(key)
        if shape is not None:
            return shape, end
        layout = None
        layout_order: list[str] = []
        if layout_match is not None:
            layout = layout_match[1]
            layout_parts = _LAYOUT_TEXT.fullmatch(layout)
            if layout_parts is None:
                fail(self.original, layout_match.start(1), "expected a layout such as {1,0} or {1,0:T(8,128)S(1)}")
            layout_order = [number.strip() for number in layout_parts[1].split(",")] if layout_parts[1] else []
        if element_type in _OPAQUE:
            if dimension_text.strip() or layout is not None:
                fail(self.original, match.start(2), f"{element_type}[] has no dimensions and no layout")
            shape = OpaqueShape(element_type)
        else:
            if element_type not in ELEMENT_BITS:
                fail(self.original, position, f"unknown element type {element_type!r}")
            dimensions, dynamic = self._dimensions(dimension_text, match.start(2))
            if layout is not None and sorted(layout_order) != sorted(map(str, range(len(dimensions)))):
                fail(self.original, match.end(), f"expected a layout that orders {len(dimensions)} dimensions")
            shape = ArrayShape(element_type, dimensions, dynamic, layout)
            if shape.size_bytes > _MAX_SIZE or prod(dimensions) > _MAX_SIZE:
                fail(self.original, position, "the size of this array does not fit in 63 bits")
        self.by_text[key] = shape
        return shape, end

    def _dimensions(self, dimension_text: str, start: int) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        if not dimension_text.strip():
            return (), ()
        dimensions: list[int] = []
        dynamic: list[bool] = []
        offset = start
        if dimension_text.count(",") >= MAX_RANK:
            fail(self.original, start, f"an array has at most {MAX_RANK} dimensions")
        for part in dimension_text.split(","):
            match = _DIMENSION.fullmatch(part)
            if _UNKNOWN_SIZE.fullmatch(part):
                fail(
                    self.original,
                    offset,
                    "a dimension without a size",
                    remedy=FIXED_SIZES,
                    kind=UnsupportedProgramError,
                )
            if match is None:
                fail(self.original, offset, "expected a dimension: a number, or <= and a number where it is dynamic")
            if len(match[2]) > 19 or (size := int(match[2])) > _MAX_SIZE:
                fail(self.original, offset, "a dimension must fit in 63 bits")
            dimensions.append(size)
            dynamic.append(match[1] is not None)
            offset += len(part) + 1
        return tuple(dimensions), tuple(dynamic) if any(dynamic) else ()


def format_shape(shape: Shape) -> str:
    """HLO text of a shape, with its layout where it has one; tuples print without recursion."""
    pieces: list[str] = []
    pending: list[Shape | str] = [shape]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            pieces.append(item)
        elif isinstance(item, TupleShape):
            pending.append(")")
            for number, element in enumerate(reversed(item.elements)):
                if number:
                    pending.append(", ")
                pending.append(element)
            pending.append("(")
        elif isinstance(item, OpaqueShape):
            pieces.append(f"{item.kind}[]")
        elif isinstance(item, BufferShape):
            pieces.append(f"b({_format_array(item.element)})")
        else:
            pieces.append(_format_array(item))
    return "".join(pieces)


def _format_array(shape: ArrayShape) -> str:
    sizes = [str(size) for size in shape.dimensions]
    if shape.dynamic:
        sizes = [f"<={size}" if dynamic else size for size, dynamic in zip(sizes, shape.dynamic, strict=True)]
    layout = "" if shape.layout is None else f"{{{shape.layout}}}"
    return f"{shape.element_type}[{','.join(sizes)}]{layout}"
