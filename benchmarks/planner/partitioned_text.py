"""Parser of XLA's dumped HLO text, line by line: names, shapes, operands, attributes as text."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

_BITS = {
    "pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32, "s64": 64, "u64": 64,
    "f8e4m3fn": 8, "f8e5m2": 8, "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128, "token": 0,
}  # fmt: skip

_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([0-9,]*)\]")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_HEAD = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_NAME = re.compile(r"%([\w.\-]+)")


class CountingError(Exception):
    """The counter cannot read the text; the message names the line."""


@dataclass(frozen=True)
class Instruction:
    """One line; `shape` and `attributes` are parsed on demand."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    inside: str  # between the parentheses: operands, or a constant's value
    attributes: str
    is_root: bool

    @cached_property
    def arrays(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """(element type, dimensions) of each array of the result."""
        return tuple(
            (kind, tuple(int(size) for size in dims.split(",") if size)) for kind, dims in _ARRAY.findall(self.shape)
        )

    @cached_property
    def size_bytes(self) -> int:
        return sum(prod(dims) * _count_bits(kind) for kind, dims in self.arrays) // 8

    @property
    def dims(self) -> tuple[int, ...]:
        return self.arrays[0][1]

    @property
    def element_type(self) -> str:
        return self.arrays[0][0]

    def attribute(self, key: str) -> str:
        """The value of `key=%name` or `key=word`. Raises CountingError for a missing key."""
        match = re.search(rf"\b{key}=%?([\w.\-]+)", self.attributes)
        if match is None:
            raise CountingError(f"{self.opcode} {self.name} has no {key}")
        return match[1]

    def numbers(self, key: str) -> tuple[int, ...]:
        """The value of `key={1,2}`; empty for a missing key."""
        match = re.search(rf"\b{key}=\{{([0-9,]*)\}}", self.attributes)
        return tuple(int(n) for n in match[1].split(",") if n) if match else ()

    def branches(self) -> tuple[str, ...]:
        """Computations of a conditional."""
        match = re.search(r"branch_computations=\{([^}]*)\}", self.attributes)
        if match:
            return tuple(_NAME.findall(match[1]))
        return (self.attribute("true_computation"), self.attribute("false_computation"))


@dataclass(frozen=True)
class Module:
    """Computations by name, each a dict of instructions in program order; calls are inlined."""

    computations: dict[str, dict[str, Instruction]]
    entry: str


def read_module(text: str) -> Module:
    """Parse a dumped module. Raises CountingError with the unreadable line."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry, name = "", ""
    body: dict[str, Instruction] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if body is None:
            header = _HEADER.match(line)
            if header and not line.startswith("HloModule"):
                name, body = header[2], {}
                entry = name if header[1] else entry
        elif line.startswith("}"):
            computations[name] = _inline_calls(body, computations)  # callees stand above their callers
            body = None
        elif line.strip():
            instruction = _parse_instruction(line, number)
            body[instruction.name] = instruction
    if not entry or body is not None:
        raise CountingError("the text has no complete ENTRY computation")
    return Module(computations, entry)


def _inline_calls(
    body: dict[str, Instruction], computations: dict[str, dict[str, Instruction]]
) -> dict[str, Instruction]:
    """Inline calls, like XLA after the partitioner."""
    if not any(instruction.opcode == "call" for instruction in body.values()):
        return body
    inlined: dict[str, Instruction] = {}
    aliases: dict[str, str] = {}  # a call with a parameter for its result → its operand
    for instruction in body.values():
        operands = tuple(aliases.get(operand, operand) for operand in instruction.operands)
        if instruction.opcode != "call":
            inlined[instruction.name] = replace(instruction, operands=operands)
            continue
        names: dict[str, str] = {}
        for inner in computations[instruction.attribute("to_apply")].values():
            if inner.opcode == "parameter":
                names[inner.name] = operands[int(inner.inside)]
                if inner.is_root:
                    aliases[instruction.name] = names[inner.name]
                continue
            names[inner.name] = instruction.name if inner.is_root else f"{instruction.name}/{inner.name}"
            inlined[names[inner.name]] = replace(
                inner,
                name=names[inner.name],
                operands=tuple(names[operand] for operand in inner.operands),
                is_root=inner.is_root and instruction.is_root,
            )
    return inlined


def _parse_instruction(line: str, number: int) -> Instruction:
    head = _HEAD.match(line)
    if head is None:
        raise CountingError(f"line {number} is no instruction: {line.strip()[:80]}")
    start = head.end()
    end = _find_closing(line, start) if line[start] == "(" else line.index(" ", start)
    opcode = _OPCODE.match(line, end)
    if opcode is None:
        raise CountingError(f"line {number} has no opcode: {line.strip()[:80]}")
    close = _find_closing(line, opcode.end() - 1)
    inside = line[opcode.end() : close - 1]
    operands = () if opcode[1] == "constant" else tuple(_NAME.findall(inside))
    return Instruction(head[2], line[start:end], opcode[1], operands, inside, line[close:], bool(head[1]))


def _find_closing(line: str, start: int) -> int:
    """Position behind the parenthesis matching the one at `start`."""
    depth = 0
    for position in range(start, len(line)):
        if line[position] == "(":
            depth += 1
        elif line[position] == ")":
            depth -= 1
            if depth == 0:
                return position + 1
    raise CountingError(f"a parenthesis does not close: {line.strip()[:80]}")


def _count_bits(element_type: str) -> int:
    if element_type not in _BITS:
        raise CountingError(f"unknown element type {element_type}")
    return _BITS[element_type]
