"""Reads attributes: `, name=value` after an instruction, a computation or the module's name."""

from __future__ import annotations

import re
from collections.abc import Callable

from shardwright.hlo.attributes import AttributeValueError, parse_value
from shardwright.hlo.ir import Attribute
from shardwright.hlo.lexical import NAME, fail, skip_space, value_end
from shardwright.hlo.literals import check_literal
from shardwright.hlo.replica_groups import MAX_DEVICES
from shardwright.hlo.shape_text import ShapeReader

_ATTRIBUTE_NAME = re.compile(rf"({NAME})=\s*+", re.ASCII)


class AttributeReader:
    """Attributes of one text; equal texts give the same object.

    `text` has its comments blanked, `original` is what errors show. `known` maps `name=value` to the
    attributes read so far.
    """

    def __init__(self, text: str, original: str, shapes: ShapeReader) -> None:
        self.text = text
        self.original = original
        self.shapes = shapes
        self.known: dict[str, Attribute] = {}
        self.frame_count: int | None = None  # entries of the StackFrames table, where there is one
        self._expanded_devices = 0
        # Values that hold shapes; each reader checks them and says where the rest of the value begins.
        self._readers: dict[str, Callable[[int], int]] = {
            "literal": self._literal,
            "outfeed_shape": self._skip_outfeed_shape,
            "operand_layout_constraints": self._layout_constraints,
            "entry_computation_layout": self._entry_layout,
        }

    def read_list(self, position: int) -> tuple[dict[str, Attribute], int]:
        """The attributes of the module or of a computation."""
        attributes: dict[str, Attribute] = {}
        while self.text.startswith(",", start := skip_space(self.text, position)):
            attribute, position = self.read(start)
            if attribute.name in attributes:
                fail(self.original, start, f"attribute {attribute.name!r} is given twice")
            attributes[attribute.name] = attribute
        return attributes, position

    def read(self, comma: int) -> tuple[Attribute, int]:
        """Any attribute, from the comma before it on."""
        start = skip_space(self.text, comma + 1)
        match = _ATTRIBUTE_NAME.match(self.text, start)
        if match is None:
            fail(self.original, start, "expected an attribute: name=value")
        position = match.end()
        reader = self._readers.get(match[1])
        if reader is not None:
            position = reader(position)
        end = value_end(self.text, position, self.original)
        if end == position:
            fail(self.original, end, f"expected the value of attribute {match[1]!r}")
        key = f"{match[1]}={self.text[match.end() : end]}"
        attribute = self.known.get(key)
        return attribute or self.intern(key, start), end

    def _literal(self, start: int) -> int:
        """Check the constant of a custom-call; the offset of its last bracketed or bare word."""
        if self.text.startswith("(", start):
            return start
        shape, position = self.shapes.read(start)
        position = skip_space(self.text, position)
        check_literal(self.text, position, value_end(self.text, position, self.original), shape, self.original)
        return position

    def _skip_outfeed_shape(self, start: int) -> int:
        self.shapes.read(start)
        return start

    def _layout_constraints(self, start: int) -> int:
        self._shape_list(start, "{", "}")
        return start

    def _entry_layout(self, start: int) -> int:
        """`{(parameter shapes)->result shape}`"""
        position = skip_space(self.text, start + 1)
        if not self.text.startswith("{", start) or not self.text.startswith("(", position):
            fail(self.original, start, "expected {(parameter shapes)->result shape}")
        position = skip_space(self.text, self._shape_list(position, "(", ")"))
        if not self.text.startswith("->", position):
            fail(self.original, position, "expected '->' and the result's shape")
        _, position = self.shapes.read(position + 2)
        position = skip_space(self.text, position)
        if not self.text.startswith("}", position):
            fail(self.original, position, "expected '}' after the result's shape")
        return start

    def _shape_list(self, start: int, opening: str, closing: str) -> int:
        """Shapes between brackets, separated by commas; the offset after them."""
        position = skip_space(self.text, start + 1)
        if not self.text.startswith(opening, start):
            fail(self.original, start, f"expected {opening!r} and shapes")
        while not self.text.startswith(closing, position):
            _, position = self.shapes.read(position)
            position = skip_space(self.text, position)
            if self.text.startswith(",", position):
                position = skip_space(self.text, position + 1)
            elif not self.text.startswith(closing, position):
                fail(self.original, position, f"expected ',' or {closing!r} after a shape")
        return position + 1

    def intern(self, key: str, start: int) -> Attribute:
        name, _, text = key.partition("=")
        text = text.strip()
        try:
            value = parse_value(name, text)
        except AttributeValueError as error:
            fail(self.original, start, f"attribute {name!r}: {error}")
        if name == "metadata" and self.frame_count is not None:
            if not 0 <= value.get("stack_frame_id", 0) <= self.frame_count:
                fail(
                    self.original, start, f"stack_frame_id is not one of the {self.frame_count} entries of StackFrames"
                )
        elif name == "replica_groups":
            # Short texts stand for many devices: bound what all of them together expand to.
            self._expanded_devices += sum(map(len, value))
            if self._expanded_devices > 16 * MAX_DEVICES:
                fail(self.original, start, "the replica groups of this module hold too many devices")
        attribute = self.known[key] = Attribute(name, text, value)
        return attribute
