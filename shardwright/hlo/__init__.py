"""HLO text both ways: `parse(text) -> Module`, `module.to_text()`."""

from shardwright.hlo.attributes import ConvDims, Window
from shardwright.hlo.elided import elided, require_values
from shardwright.hlo.ir import Alias, Attribute, Computation, Donor, Instruction, Module, SourceLocation
from shardwright.hlo.parser import parse
from shardwright.hlo.shape_text import format_shape
from shardwright.hlo.shapes import ArrayShape, BufferShape, OpaqueShape, Shape, TupleShape, without_layout
from shardwright.hlo.source import locate, stack

__all__ = [
    "Alias",
    "ArrayShape",
    "Attribute",
    "BufferShape",
    "Computation",
    "ConvDims",
    "Donor",
    "Instruction",
    "Module",
    "OpaqueShape",
    "Shape",
    "SourceLocation",
    "TupleShape",
    "Window",
    "elided",
    "format_shape",
    "locate",
    "parse",
    "require_values",
    "stack",
    "without_layout",
]
