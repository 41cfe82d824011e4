"""The graph that HLO text describes: module, computations, instructions.

Built by the parser only, read by everybody else. Objects are slotted and not
frozen because a module of 51,000 instructions must parse in seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwright.hlo.shapes import Shape


class Attribute:
    """One `name=value` of an instruction: the text as printed and its parsed value.

    Interned by (name, text): equal attributes of a module are one object.
    """

    __slots__ = ("name", "text", "value")

    def __init__(self, name: str, text: str, value: Any) -> None:
        self.name = name
        self.text = text
        self.value = value

    def __repr__(self) -> str:
        return f"{self.name}={self.text}"


@dataclass(slots=True, eq=False)
class Instruction:
    """One instruction. Identity is by object; `name` is unique in its module.

    `called` holds the computations that attributes name (`to_apply`, `body`,
    `condition`, `calls`, `branch_computations`, …), by attribute name.
    `payload` is the text inside the opcode's parentheses where that is not a
    list of operands: a constant's literal, a parameter's or
    get-tuple-element's number stays in `index`.
    """

    name: str
    opcode: str
    shape: Shape
    operands: tuple[Instruction, ...] = ()
    attributes: dict[str, Attribute] = field(default_factory=dict)
    called: dict[str, tuple[Computation, ...]] = field(default_factory=dict)
    payload: str = ""
    index: int = -1  # of a parameter or a get-tuple-element
    is_root: bool = False
    line: int = 0  # in the text it was parsed from, from 1

    def get(self, name: str, default: Any = None) -> Any:
        """The parsed value of attribute `name`, or `default`."""
        attribute = self.attributes.get(name)
        return default if attribute is None else attribute.value

    @property
    def is_elided(self) -> bool:
        """Whether this is a constant whose value, or a part of it, was left out when the text was printed."""
        return self.opcode == "constant" and "..." in self.payload

    @property
    def op_name(self) -> str:
        """`op_name` of the metadata (`jit(step)/transpose(jvp(block))/mul`), or ''."""
        metadata = self.get("metadata")
        return metadata.get("op_name", "") if metadata else ""

    def __repr__(self) -> str:
        return f"<{self.name} = {self.opcode}>"


@dataclass(slots=True, eq=False)
class Computation:
    """A named list of instructions, operands before users, with one root."""

    name: str
    instructions: list[Instruction]
    root: Instruction
    parameters: tuple[Instruction, ...]
    is_entry: bool = False
    attributes: dict[str, Attribute] = field(default_factory=dict)  # execution_thread

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions)


@dataclass(frozen=True, slots=True)
class Alias:
    """Output leaf `output_index` may reuse the buffer of parameter `parameter_number`."""

    output_index: tuple[int, ...]
    parameter_number: int
    parameter_index: tuple[int, ...] = ()
    kind: str = "may-alias"


@dataclass(frozen=True, slots=True)
class Donor:
    """Parameter leaf whose buffer any output may reuse (`buffer_donor`)."""

    parameter_number: int
    parameter_index: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SourceLocation:
    """A line of the user's program, from the module's source-line tables."""

    file: str
    line: int
    function: str
    column: int = field(default=-1, compare=False)  # in bytes, from 0, where the expression begins; -1: not known

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.function})"


@dataclass(slots=True, eq=False)
class Module:
    """An HLO module. `header` holds the attributes after the module's name, in order."""

    name: str
    header: dict[str, Attribute]
    computations: list[Computation]  # in text order; the entry is among them
    entry: Computation
    tables: Mapping[str, list[str]] = field(default_factory=dict)  # FileNames, …: entries as printed, unnumbered

    def to_text(self) -> str:
        """HLO text that XLA's parser reads as an equal module."""
        from shardwright.hlo.printer import print_module

        return print_module(self)

    @property
    def aliases(self) -> tuple[Alias, ...]:
        """What the header says about outputs that reuse argument buffers."""
        attribute = self.header.get("input_output_alias")
        return () if attribute is None else attribute.value

    @property
    def donors(self) -> tuple[Donor, ...]:
        """Argument buffers that the header gives away without saying to which output."""
        attribute = self.header.get("buffer_donor")
        return () if attribute is None else attribute.value

    def instructions(self) -> Iterator[Instruction]:
        for computation in self.computations:
            yield from computation.instructions

    def source(self, instruction: Instruction) -> SourceLocation | None:
        """The innermost line of the user's that made an instruction, where the text has one."""
        from shardwright.hlo.source import locate

        return locate(self, instruction)

    def place(self, instruction: Instruction) -> str:
        """Where an instruction comes from, in short: the user's `file:line`, else its `op_name`, else ''."""
        from shardwright.hlo.source import place

        return place(self, instruction)
