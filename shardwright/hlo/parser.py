"""HLO text → `Module`.

The grammar, as XLA's printers write it and XLA's own parser reads it:

    module      ::= 'HloModule' name ':'? (',' attribute)* tables? computation+
    tables      ::= 'FileNames' … 'FunctionNames' … 'FileLocations' … 'StackFrames' …
    computation ::= 'ENTRY'? name signature? '{' instruction+ '}' (',' attribute)*
    signature   ::= '(' (name ':'? shape (',' …)*)? ')' '->' shape
    instruction ::= 'ROOT'? name '=' shape opcode '(' operands | literal | number ')' (',' attribute)*
    operand     ::= shape? name ('#' number)*
    attribute   ::= name '=' value

A name may carry a `%`. One regular expression takes a whole instruction up to
its attributes, another one attribute at a time; shapes and attributes are
interned by their text. What those expressions do not take (tuples within
tuples, tiles, operands with shapes, nested braces) goes through the slower
readers, which also say what is wrong where a text cannot be read.
"""

from __future__ import annotations

import gc
import re
from typing import NoReturn

from shardwright.hlo.attribute_text import AttributeReader
from shardwright.hlo.attributes import COMPUTATION_ATTRIBUTES
from shardwright.hlo.checks import find_problem
from shardwright.hlo.ir import Attribute, Computation, Instruction, Module
from shardwright.hlo.lexical import (
    AS_PRINTED,
    NAME,
    STRING,
    WORD_CHARACTER,
    blank_comments,
    bracket_end,
    fail,
    skip_space,
    suggest_names,
)
from shardwright.hlo.literals import check_literal, in_range
from shardwright.hlo.names import NameUniquer
from shardwright.hlo.opcodes import OPCODES, is_opcode
from shardwright.hlo.shape_text import ShapeReader
from shardwright.hlo.shapes import Shape, TupleShape, without_layout
from shardwright.hlo.source import TABLES, find_table_problem

_SIMPLE_SHAPE = r"[a-z][a-z0-9]*+\[[^\[\]()]*+\](?:\{[0-9,]*+\})?|\([^()]*+\)"
_INSTRUCTION = re.compile(
    rf"\s*+(ROOT\s++)?%?({NAME})\s*+=\s*+({_SIMPLE_SHAPE})\s++([a-z][a-z0-9\-]*+)\(([^()]*+)\)", re.ASCII
)
_BRACED = rf"\{{[^{{}}\"]*+(?:{STRING}[^{{}}\"]*+)*+\}}"
_ATTRIBUTE = re.compile(
    rf"\s*+,\s*+({NAME}=(?:{_BRACED}|{STRING}|{WORD_CHARACTER}++(?=[,\s}}])))", re.ASCII | re.DOTALL
)
_ELEMENT = re.compile(r"\s*+#\s*+([0-9]{1,9})", re.ASCII)
_NAME = re.compile(rf"%?({NAME})", re.ASCII)
_OPCODE = re.compile(r"[a-z][a-z0-9\-]*+", re.ASCII)
_ENTRY = re.compile(r"\s*+ENTRY\s++", re.ASCII)
_ROOT = re.compile(r"\s*+ROOT\s++", re.ASCII)
_TABLE_ENTRY = re.compile(rf"\s*+[0-9]++\s*+({STRING}|\{{[^{{}}\"]*+\}})", re.ASCII | re.DOTALL)
_NUMBER = re.compile(r"\s*+([0-9]{1,9})\s*+", re.ASCII)

#: Attributes whose names must be looked up when an instruction carries them.
_REFERRING = COMPUTATION_ATTRIBUTES | {"control-predecessors"}


def parse(text: str) -> Module:
    """The module of an HLO text.

    Constants printed without their value (`constant({...})`) are marked (`Instruction.is_elided`): a module with some
    can be inspected, not run.

    Raises HloSyntaxError with `line:column`, the line and a caret, UnsupportedProgramError likewise on a dimension
    without a size (`f32[?,8]`). The text may come from anybody:
    nothing in it makes the parser recurse, or take more than linear time and memory.
    """
    collecting = gc.isenabled()
    # Nothing here becomes garbage in cycles; the collector would walk the growing module again and again.
    gc.disable()
    try:
        return _Parser(text).module()
    finally:
        if collecting:
            gc.enable()


class _Parser:
    """One pass over one text. `text` has its comments blanked; offsets are those of `original`."""

    def __init__(self, text: str) -> None:
        self.original = text
        self.text = blank_comments(text)
        self.shapes = ShapeReader(self.text, self.original)
        self.attributes = AttributeReader(self.text, text, self.shapes)
        self.computations: dict[str, Computation] = {}
        self.names = NameUniquer()
        self.elements: list[Instruction] = []  # of tuples, named by the operands of the instruction being read
        self.line = 1
        self.line_offset = 0

    def fail(self, position: int, message: str, *, remedy: str = AS_PRINTED) -> NoReturn:
        fail(self.original, position, message, remedy=remedy)

    # --- module ---------------------------------------------------------------------------------

    def module(self) -> Module:
        """The whole text."""
        text = self.text
        position = skip_space(text, 0)
        if not text.startswith("HloModule", position):
            self.fail(position, "expected 'HloModule' and the module's name")
        name, position = self.name(position + len("HloModule"), "the module's name")
        header, position = self.attributes.read_list(self.after_colon(position))
        tables, position = self.source_tables(position)
        self.attributes.frame_count = len(tables["StackFrames"]) if tables else None
        entry: Computation | None = None
        while (position := skip_space(text, position)) < len(text):
            start = position
            computation, position = self.computation(position)
            if computation.is_entry:
                if entry is not None:
                    self.fail(start, f"a second ENTRY: {entry.name!r} is the entry computation already")
                entry = computation
        if entry is None:
            self.fail(len(text), "expected an ENTRY computation, the module has none")
        module = Module(name, header, list(self.computations.values()), entry, tables)
        self.check_aliases(module)
        return module

    def check_aliases(self, module: Module) -> None:
        """Every alias of the header joins an output and a parameter that exist, every donor is a buffer of one."""
        for alias in module.aliases:
            output = _element(module.entry.root.shape, alias.output_index)
            if output is None or alias.parameter_number >= len(module.entry.parameters):
                start = self.text.index("input_output_alias")
                self.fail(start, f"no such output or parameter: {{{alias.output_index}}}: {alias.parameter_number}")
        for donor in module.donors:
            parameter = next(
                (candidate for candidate in module.entry.parameters if candidate.index == donor.parameter_number), None
            )
            if parameter is None or _element(parameter.shape, donor.parameter_index) is None:
                start = self.text.index("buffer_donor")
                self.fail(start, f"no such buffer: parameter {donor.parameter_number}, {donor.parameter_index}")

    def name(self, position: int, what: str) -> tuple[str, int]:
        position = skip_space(self.text, position)
        match = _NAME.match(self.text, position)
        if match is None:
            self.fail(position, f"expected {what}")
        return match[1], match.end()

    def after_colon(self, position: int) -> int:
        """The offset after a colon, omitted or inserted here by old printers; XLA's parser accepts both."""
        position = skip_space(self.text, position)
        return position + 1 if self.text.startswith(":", position) else position

    def source_tables(self, position: int) -> tuple[dict[str, list[str]], int]:
        """The tables of source lines between header and computations: entries as printed, without their numbers."""
        tables: dict[str, list[str]] = {}
        start = position
        for name in TABLES:
            start = skip_space(self.text, position)
            if not self.text.startswith(name, start):
                if tables:
                    self.fail(start, f"expected {name!r}")
                break
            position = start + len(name)
            entries = tables[name] = []
            while match := _TABLE_ENTRY.match(self.text, position):
                entries.append(match[1])
                position = match.end()
        problem = find_table_problem(tables)
        if problem is not None:
            self.fail(start, problem)
        return tables, position

    # --- computations ---------------------------------------------------------------------------

    def computation(self, position: int) -> tuple[Computation, int]:
        entry_match = _ENTRY.match(self.text, position)
        if entry_match is not None:
            position = entry_match.end()
        start = position
        name, position = self.name(position, "a computation: ENTRY, its name, '{' and its instructions")
        if name in self.computations:
            self.fail(start, f"computation {name!r} is defined twice")
        position = signature_start = skip_space(self.text, position)
        result: Shape | None = None
        if self.text.startswith("(", position):
            result, position = self.signature(position)
        if not self.text.startswith("{", position):
            self.fail(position, f"expected '{{' and the instructions of computation {name!r}")
        instructions, position = self.instructions(position + 1)
        root = next((instruction for instruction in instructions if instruction.is_root), instructions[-1])
        root.is_root = True
        if result is not None and without_layout(result) != without_layout(root.shape):
            self.fail(
                signature_start, f"the result of computation {name!r} differs from the shape of its root {root.name!r}"
            )
        parameters = self.parameters(name, instructions, start)
        attributes, position = self.attributes.read_list(position)
        computation = Computation(name, instructions, root, parameters, entry_match is not None, attributes)
        self.computations[name] = computation
        return computation, position

    def signature(self, position: int) -> tuple[Shape, int]:
        """`(name: shape, …) -> shape` → the result's shape; the offset after it, white space skipped."""
        text = self.text
        position = skip_space(text, position + 1)
        while not text.startswith(")", position):
            _, position = self.name(position, "a parameter's name")
            _, position = self.shapes.read(self.after_colon(position))
            position = skip_space(text, position)
            if text.startswith(",", position):
                position = skip_space(text, position + 1)
            elif not text.startswith(")", position):
                self.fail(position, "expected ',' or ')' in the parameters of a computation")
        position = skip_space(text, position + 1)
        if not text.startswith("->", position):
            self.fail(position, "expected '->' and the result's shape")
        shape, position = self.shapes.read(position + 2)
        return shape, skip_space(text, position)

    def parameters(self, name: str, instructions: list[Instruction], start: int) -> tuple[Instruction, ...]:
        parameters = [instruction for instruction in instructions if instruction.opcode == "parameter"]
        parameters.sort(key=lambda parameter: parameter.index)
        for number, parameter in enumerate(parameters):
            if parameter.index != number:
                problem = "no" if parameter.index > number else "more than one"
                self.fail(start, f"computation {name!r} has {problem} parameter({min(number, parameter.index)})")
        return tuple(parameters)

    # --- instructions ---------------------------------------------------------------------------

    def instructions(self, position: int) -> tuple[list[Instruction], int]:
        """The instructions up to the closing brace, and the offset after it."""
        text = self.text
        result: list[Instruction] = []
        names: dict[str, Instruction] = {}
        has_root = False
        root: object
        shape: Shape | None
        while True:
            match = _INSTRUCTION.match(text, position)
            if match is None:
                position = skip_space(text, position)
                if text.startswith("}", position) and result:
                    return result, position + 1
                root, name, shape, opcode, start, end = self.instruction_head(position)
                name_start, position = position, end + 1
                inside = text[start:end]
            else:
                root, name, shape_text, opcode, inside = match.groups()
                name_start, start = match.start(2), match.start(5)
                position = match.end()
                shape = self.shapes.by_text.get(shape_text)
                if shape is None:
                    shape, _ = self.shapes.read(match.start(3))
            if name in names:
                self.fail(name_start, f"instruction {name!r} is defined twice")
            instruction = Instruction(name, opcode, shape)
            self.line += text.count("\n", self.line_offset, name_start)
            self.line_offset = name_start
            instruction.line = self.line
            if opcode == "parameter":
                self.read_parameter(instruction, start)
            elif opcode == "constant":
                self.read_constant(instruction, start, position - 1)
            elif inside:
                instruction.operands = self.operands(inside, start, names)
            position = self.instruction_attributes(instruction, position, names)
            self.check_instruction(instruction, name_start)
            if root:
                if has_root:
                    self.fail(name_start, "a second ROOT in this computation")
                has_root = instruction.is_root = True
            names[name] = instruction
            if self.elements:
                result += self.elements
                self.elements.clear()
            instruction.name = self.names.register(name)
            result.append(instruction)

    def instruction_head(self, position: int) -> tuple[bool, str, Shape, str, int, int]:
        """Any instruction up to its attributes: whether it is the root, its name, shape and opcode, and the
        offsets of what is inside its parentheses."""
        text = self.text
        root = _ROOT.match(text, position)
        name, position = self.name(
            root.end() if root else position, "an instruction: its name, '=', shape and opcode, or '}'"
        )
        position = skip_space(text, position)
        if not text.startswith("=", position):
            self.fail(position, f"expected '=' after the instruction's name {name!r}")
        shape, position = self.shapes.read(position + 1)
        position = skip_space(text, position)
        opcode = _OPCODE.match(text, position)
        if opcode is None:
            self.fail(position, "expected an opcode")
        self.check_opcode(opcode[0], position)
        start = skip_space(text, opcode.end())
        if not text.startswith("(", start):
            self.fail(start, f"expected '(' after the opcode {opcode[0]!r}")
        return root is not None, name, shape, opcode[0], start + 1, bracket_end(text, start, self.original) - 1

    def check_opcode(self, opcode: str, position: int) -> None:
        if not is_opcode(opcode):
            self.fail(position, f"unknown opcode {opcode!r}{suggest_names(opcode, OPCODES)}")

    def check_instruction(self, instruction: Instruction, position: int) -> None:
        """Opcode known, operands and attributes as it needs them."""
        if instruction.opcode not in OPCODES:
            self.check_opcode(instruction.opcode, self.text.find(instruction.opcode, position))
        problem = find_problem(instruction)
        if problem is not None:
            self.fail(position, problem)
        if instruction.opcode == "get-tuple-element":
            instruction.index = instruction.attributes["index"].value

    def read_parameter(self, instruction: Instruction, start: int) -> None:
        match = _NUMBER.match(self.text, start)
        if match is None or not self.text.startswith(")", match.end()):
            self.fail(start, "expected the parameter's number")
        instruction.index = int(match[1])

    def read_constant(self, instruction: Instruction, start: int, end: int) -> None:
        check_literal(self.text, start, end, instruction.shape, self.original)
        instruction.payload = in_range(self.text[start:end], instruction.shape)

    # --- operands -------------------------------------------------------------------------------

    def operands(self, inside: str, start: int, names: dict[str, Instruction]) -> tuple[Instruction, ...]:
        """The instructions named between the parentheses that begin at `start`."""
        try:
            if inside[0] == "%":
                return tuple([names[name] for name in inside[1:].split(", %")])
            return tuple([names[name] for name in inside.split(", ")])
        except KeyError:
            pass
        try:
            return tuple([names[name.strip().removeprefix("%")] for name in inside.split(",")])
        except KeyError:
            return self.parse_operand_list(start, start + len(inside), names)

    def parse_operand_list(self, position: int, end: int, names: dict[str, Instruction]) -> tuple[Instruction, ...]:
        """Operands one by one, each with or without its shape."""
        text = self.text
        result: list[Instruction] = []
        position = skip_space(text, position)
        while position < end:
            match = _NAME.match(text, position)
            after = skip_space(text, match.end()) if match else position
            shape = None
            if match is None or text[after] not in ",)#":
                if text.startswith("...", position):
                    remedy = "print the module without compact_operands"
                    self.fail(position, "operands were left out when the text was printed", remedy=remedy)
                shape, after = self.shapes.read(position)
                position = skip_space(text, after)
                match = _NAME.match(text, position)
                if match is None:
                    self.fail(position, "expected an operand's name")
            operand = names.get(match[1])
            if operand is None and text.startswith("(", skip_space(text, match.end())):
                self.fail(position, f"give the operand {match[1]}(…) a name and a line of its own")
            if operand is None:
                self.fail(position, f"no instruction {match[1]!r} before this one{suggest_names(match[1], names)}")
            after = match.end()
            while element := _ELEMENT.match(text, after):
                operand = self.tuple_element(operand, element[1], after, names)
                after = element.end()
            if shape is not None and without_layout(shape) != without_layout(operand.shape):
                self.fail(position, f"operand {match[1]!r} does not have this shape")
            position = after
            result.append(operand)
            position = skip_space(text, position)
            if position < end:
                if text[position] != ",":
                    self.fail(position, "expected ',' or ')' after an operand")
                position = skip_space(text, position + 1)
                if position >= end:
                    self.fail(position, "expected an operand")
        return tuple(result)

    def tuple_element(
        self, operand: Instruction, number: str, position: int, names: dict[str, Instruction]
    ) -> Instruction:
        """The get-tuple-element meant by `operand#number`, the notation of newer printers; one for all its uses."""
        name = f"{operand.name}_{number}"
        existing = names.get(f"{operand.name}#{number}")
        if existing is not None:
            return existing
        shape, index = operand.shape, int(number)
        if not isinstance(shape, TupleShape) or index >= len(shape.elements):
            self.fail(position, f"operand {operand.name!r} has no element {number}")
        element = Instruction(self.names.register(name), "get-tuple-element", shape.elements[index], (operand,))
        element.attributes["index"] = Attribute("index", number, index)
        element.index, element.line = index, self.line
        names[f"{operand.name}#{number}"] = element
        self.elements.append(element)
        return element

    # --- attributes -----------------------------------------------------------------------------

    def instruction_attributes(self, instruction: Instruction, position: int, names: dict[str, Instruction]) -> int:
        text = self.text
        attributes = instruction.attributes
        attribute_of_text = self.attributes.known
        while True:
            match = _ATTRIBUTE.match(text, position)
            if match is not None:
                attribute = attribute_of_text.get(match[1])
                if attribute is None:
                    attribute = self.attributes.intern(match[1], match.start(1))
                start, position = position, match.end()
            else:
                position = skip_space(text, position)
                if not text.startswith(",", position):
                    return position
                start = position
                attribute, position = self.attributes.read(position)
            name = attribute.name
            if name in attributes:
                self.fail(start, f"attribute {name!r} is given twice")
            if name in _REFERRING:
                attribute = self.resolve(attribute, instruction, start, names)
            attributes[name] = attribute

    def resolve(
        self, attribute: Attribute, instruction: Instruction, start: int, names: dict[str, Instruction]
    ) -> Attribute:
        """Look up the computations or instructions that an attribute names."""
        targets = names if attribute.name == "control-predecessors" else self.computations
        for name in attribute.value:
            if name not in targets:
                kind = "instruction" if targets is names else "computation"
                self.fail(start, f"no {kind} {name!r} before this one{suggest_names(name, targets)}")
        if targets is self.computations:
            instruction.called[attribute.name] = tuple([self.computations[name] for name in attribute.value])
            return attribute
        written = [names[name].name for name in attribute.value]
        if written == list(attribute.value):
            return attribute
        return Attribute(attribute.name, f"{{{', '.join(written)}}}", tuple(written))


def _element(shape: Shape, path: tuple[int, ...]) -> Shape | None:
    """The shape at `path` inside a tuple; None if there is none."""
    inner: Shape | None = shape
    for index in path:
        inside = isinstance(inner, TupleShape) and index < len(inner.elements)
        inner = inner.elements[index] if inside and isinstance(inner, TupleShape) else None
    return inner
