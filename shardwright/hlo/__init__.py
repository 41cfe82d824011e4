"""HLO text both ways: `parse(text) -> Module`, `module.to_text()`."""

from shardwright.hlo.ir import Alias, Attribute, Computation, Instruction, Module, SourceLocation
from shardwright.hlo.parser import parse
from shardwright.hlo.shapes import ArrayShape, OpaqueShape, Shape, TupleShape

__all__ = [
    "Alias",
    "ArrayShape",
    "Attribute",
    "Computation",
    "Instruction",
    "Module",
    "OpaqueShape",
    "Shape",
    "SourceLocation",
    "TupleShape",
    "parse",
]
