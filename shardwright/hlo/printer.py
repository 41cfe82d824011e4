"""`Module` → HLO text, read by XLA's parser to an equal module."""

from __future__ import annotations

from collections.abc import Iterable

from shardwright.hlo.ir import Attribute, Computation, Instruction, Module
from shardwright.hlo.shape_text import format_shape


def print_module(module: Module) -> str:
    """The module's text: names with `%`, result shapes with layouts, operands without shapes."""
    lines = [f"HloModule {module.name}{_attributes(module.header.values())}", ""]
    for table, entries in module.tables.items():
        lines.append(table)
        lines.extend(f"{number} {entry}" for number, entry in enumerate(entries, start=1))
        lines.append("")
    shape_texts: dict[int, str] = {}
    for computation in module.computations:
        _print_computation(computation, lines, shape_texts)
    return "\n".join(lines)


def _attributes(attributes: Iterable[Attribute]) -> str:
    return "".join([f", {attribute.name}={attribute.text}" for attribute in attributes])


def _print_computation(computation: Computation, lines: list[str], shape_texts: dict[int, str]) -> None:
    lines.append(f"{'ENTRY ' if computation.is_entry else ''}%{computation.name} {{")
    for instruction in computation.instructions:
        shape = instruction.shape
        # Shapes are interned: the text of each is made once. They outlive this call, so their ids stay theirs.
        shape_text = shape_texts.get(id(shape))
        if shape_text is None:
            shape_text = shape_texts[id(shape)] = format_shape(shape)
        root = "ROOT " if instruction.is_root else ""
        attributes = _attributes(instruction.attributes.values())
        lines.append(
            f"  {root}%{instruction.name} = {shape_text} {instruction.opcode}({_inside(instruction)}){attributes}"
        )
    lines.append(f"}}{_attributes(computation.attributes.values())}")
    lines.append("")


def _inside(instruction: Instruction) -> str:
    if instruction.opcode == "parameter":
        return str(instruction.index)
    if instruction.opcode == "constant":
        return instruction.payload
    return ", ".join([f"%{operand.name}" for operand in instruction.operands])
