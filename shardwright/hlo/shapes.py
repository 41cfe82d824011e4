"""Shapes of HLO values: arrays with layouts, tuples, tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

#: In a layout: the value lies in its host's memory. XLA's number of that memory space (Layout::kHostMemorySpace in
#: xla/layout.h).
HOST_SPACE = "S(5)"

#: Bits of one element, by HLO element type.
ELEMENT_BITS: dict[str, int] = {
    "pred": 8, "s1": 1, "s2": 2, "s4": 4, "s8": 8, "s16": 16, "s32": 32, "s64": 64,
    "u1": 1, "u2": 2, "u4": 4, "u8": 8, "u16": 16, "u32": 32, "u64": 64,
    "f4e2m1fn": 4, "f8e3m4": 8, "f8e4m3": 8, "f8e4m3b11fnuz": 8, "f8e4m3fn": 8,
    "f8e4m3fnuz": 8, "f8e5m2": 8, "f8e5m2fnuz": 8, "f8e8m0fnu": 8,
    "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128,
}  # fmt: skip


@dataclass(frozen=True)
class ArrayShape:
    """An array, e.g. `f32[16,<=32]{1,0:T(8,128)}`.

    `dimensions` are sizes in elements (upper bounds where `dynamic` is true);
    `layout` is the text between the braces, or None where none was printed.
    """

    element_type: str
    dimensions: tuple[int, ...]
    dynamic: tuple[bool, ...] = ()  # empty: no dimension is dynamic
    layout: str | None = None

    @property
    def rank(self) -> int:
        return len(self.dimensions)

    @cached_property
    def size_bytes(self) -> int:
        """Bytes of the array without padding, sub-byte types packed."""
        return (prod(self.dimensions) * ELEMENT_BITS[self.element_type] + 7) // 8

    @cached_property
    def leaves(self) -> tuple[ArrayShape, ...]:
        return (self,)

    @cached_property
    def is_on_host(self) -> bool:
        """Whether it lies in the memory of the device's host."""
        return self.layout is not None and HOST_SPACE in self.layout

    def on_host(self) -> ArrayShape:
        """The same array in the memory of the host."""
        if self.is_on_host:
            return self
        order = ",".join(map(str, reversed(range(self.rank)))) if self.layout is None else self.layout
        layout = f"{order}{'' if ':' in order else ':'}{HOST_SPACE}"
        return ArrayShape(self.element_type, self.dimensions, self.dynamic, layout)


@dataclass(frozen=True)
class TupleShape:
    """A tuple of shapes, possibly nested, possibly empty."""

    elements: tuple[Shape, ...]

    @cached_property
    def size_bytes(self) -> int:
        return sum(leaf.size_bytes for leaf in self.leaves)

    @cached_property
    def leaves(self) -> tuple[ArrayShape, ...]:
        """The arrays in the tuple, depth first; tokens and opaque values are left out."""
        return tuple(leaf for element in self.elements for leaf in element.leaves)


@dataclass(frozen=True)
class OpaqueShape:
    """A shape with no array in it: `token[]` or `opaque[]`."""

    kind: str

    @property
    def size_bytes(self) -> int:
        return 0

    @property
    def leaves(self) -> tuple[ArrayShape, ...]:
        return ()


@dataclass(frozen=True)
class BufferShape:
    """A buffer that is passed on in place, `b(f32[2]{0})`: what it holds is in `element`."""

    element: ArrayShape

    @property
    def size_bytes(self) -> int:
        return self.element.size_bytes

    @property
    def leaves(self) -> tuple[ArrayShape, ...]:
        return (self.element,)


Shape = ArrayShape | TupleShape | OpaqueShape | BufferShape


def without_layout(shape: Shape) -> Shape:
    """The same shape with no layout anywhere in it; for comparisons."""
    if isinstance(shape, ArrayShape):
        return shape if shape.layout is None else ArrayShape(shape.element_type, shape.dimensions, shape.dynamic)
    if isinstance(shape, TupleShape):
        return TupleShape(tuple(without_layout(element) for element in shape.elements))
    if isinstance(shape, BufferShape):
        element = shape.element
        return BufferShape(ArrayShape(element.element_type, element.dimensions, element.dynamic))
    return shape
