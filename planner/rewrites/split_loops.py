"""A loop over stacked layers as several consecutive loops, each over some of the layers.

Rows a … b-1 of the stacks become arrays of their own: the loops' inputs and outputs, values computed from them row by
row (the optimizer), and therefore arguments and results of the program. Some layers can then be placed on other
devices. The rest of the program stays; for a use of a whole stack the parts are concatenated.

Each partial loop counts on from its first trip. Its body changes only in the row numbers, relative to its own, shorter
stacks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardwright.errors import PlanError
from shardwright.hlo import ArrayShape, Attribute, Instruction, Module, TupleShape
from shardwright.planner.graph.inlining import callees_first
from shardwright.planner.rewrites import edit
from shardwright.planner.rewrites.loop_parts import PartialLoopBody, Rows, element_of, loop_condition
from shardwright.planner.rewrites.row_wise import RowWise, row_wise
from shardwright.planner.rewrites.stacked_loops import StackedLoop, match_stacked_loop

#: An instruction's result, or one element of a loop's.
Value = tuple[Instruction, int]

#: A stack's rows in parts, in order.
Parts = tuple[Rows, ...]

#: The name in an instruction's metadata, up to its closing quote.
_OP_NAME = re.compile(r'(op_name="(?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class VariableRows:
    """Rows start … stop-1 of dimension 0 of the array leaf `number` of the original program; None: all of it."""

    number: int
    start: int | None = None
    stop: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitLoops:
    """A program with its loops split.

    module: the program.
    arguments: per array leaf of its arguments, the rows of the original program's.
    outputs: the same for its results.
    label_of: per entry instruction made for a part of the layers, by name, the part's label.
    """

    module: Module
    arguments: tuple[VariableRows, ...]
    outputs: tuple[VariableRows, ...]
    label_of: Mapping[str, int]


def split_loops(module: Module, parts: Mapping[str, Parts]) -> SplitLoops:
    """Cut loops of the entry computation between trips.

    parts: per loop, by name, the parts of its stacks; equal for loops over the same stacks.

    Raises PlanError for a name that is no loop over stacks, parts that do not follow one another through all rows, and
    different parts of one stack.
    """
    loops = {}
    for name, wanted in parts.items():
        while_loop = next((i for i in module.entry if i.name == name and i.opcode == "while"), None)
        stacked = None if while_loop is None else match_stacked_loop(while_loop)
        if while_loop is None or stacked is None:
            raise PlanError(f"{name} is no loop over stacked arrays", where=name)
        ends = [0, *(rows.stop for rows in wanted)]
        if [rows.start for rows in wanted] != ends[:-1] or sorted(set(ends)) != ends or ends[-1] != stacked.rows:
            raise PlanError(f"{name} has {stacked.rows} rows and cannot be cut at {ends}", where=name)
        if len(wanted) > 1:
            loops[while_loop] = stacked
    if not loops:
        counts = [sum(len(p.shape.leaves) for p in module.entry.parameters), len(module.entry.root.shape.leaves)]
        arguments, outputs = (tuple(VariableRows(number=i) for i in range(count)) for count in counts)
        return SplitLoops(module=module, arguments=arguments, outputs=outputs, label_of={})
    with edit.without_gc():
        return _Splitter(module, loops, {loop: parts[loop.name] for loop in loops}).run()


@dataclass(slots=True, eq=False)
class _Splitter:
    source: Module
    loops: Mapping[Instruction, StackedLoop]
    cuts: Mapping[Instruction, Parts]
    names: edit.Names = field(init=False)
    rows: dict[Value, Parts] = field(default_factory=dict)  # values split by rows
    ties: dict[Instruction, RowWise] = field(default_factory=dict)
    whole: dict[Value, Instruction] = field(default_factory=dict)
    parts: dict[Value, tuple[Instruction, ...]] = field(default_factory=dict)
    out: list[Instruction] = field(default_factory=list)
    label_of: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.names = edit.Names(self.source)

    def run(self) -> SplitLoops:
        entry = self.source.entry
        self._flood()
        arguments, numbers = self._parameters()
        skipped = {loop.operands[0] for loop in self.loops} - {
            operand for i in entry if i not in self.loops for operand in i.operands
        }
        for instruction in entry:
            if instruction.opcode != "parameter" and instruction not in skipped and instruction is not entry.root:
                self._instruction(instruction)
        outputs, root = self._root()
        computation = edit.computation_of(entry, self.out, root)
        module = edit.module_of(self.source, callees_first(computation))
        self._aliases(module, numbers)
        return SplitLoops(module=module, arguments=arguments, outputs=outputs, label_of=self.label_of)

    # ---- which values are made in parts -------------------------------------------
    def _flood(self) -> None:
        """Propagate from the loops' stacks through row-wise instructions, both ways, to arguments and results."""
        entry = self.source.entry
        users: dict[Value, list[Instruction]] = {}
        for instruction in entry:
            row_tie = row_wise(instruction)
            if row_tie is not None:
                self.ties[instruction] = row_tie
                for operand in row_tie.operands:
                    users.setdefault(self._value(instruction.operands[operand]), []).append(instruction)
        aliased = self._alias_map()
        todo: list[tuple[Value, Parts]] = []
        for loop, stacked in self.loops.items():
            for element in (*stacked.reads, *stacked.writes):
                todo.append((self._value(loop.operands[0].operands[element]), self.cuts[loop]))
                todo.append(((loop, element), self.cuts[loop]))
        while todo:
            value, cuts = todo.pop()
            previous = self.rows.setdefault(value, cuts)
            if previous != cuts:
                raise PlanError(
                    f"{value[0].name} would be cut at {_ends(previous)} and at {_ends(cuts)}", where=value[0].name
                )
            for instruction in (*users.get(value, ()), value[0]):
                tie = self.ties.get(instruction)
                if tie is None or (tie.reduction is not None and instruction is value[0]):
                    continue
                tied = [self._value(instruction.operands[operand]) for operand in tie.operands]
                tied += [(instruction, 0)] if tie.reduction is None else []
                todo += [(neighbor, cuts) for neighbor in tied if neighbor not in self.rows]
            todo += [(neighbor, cuts) for neighbor in aliased.get(value, ()) if neighbor not in self.rows]

    def _alias_map(self) -> dict[Value, list[Value]]:
        """Results and the arguments with their buffers, both ways; empty for an entry that is not flat."""
        entry = self.source.entry
        if entry.root.opcode != "tuple":
            return {}
        aliased: dict[Value, list[Value]] = {}
        for alias in self.source.aliases:
            if len(alias.output_index) == 1 and not alias.parameter_index:
                result = self._value(entry.root.operands[alias.output_index[0]])
                argument = (entry.parameters[alias.parameter_number], 0)
                aliased.setdefault(result, []).append(argument)
                aliased.setdefault(argument, []).append(result)
        return aliased

    # ---- the boundary of the program ---------------------------------------------------
    def _parameters(self) -> tuple[tuple[VariableRows, ...], dict[int, list[int]]]:
        """New parameters: the original rows of each, and the new numbers of each old one."""
        pieces: list[VariableRows] = []
        numbers: dict[int, list[int]] = {}
        flat = count = 0
        for parameter in sorted(self.source.entry.parameters, key=lambda p: p.index):
            cuts = self.rows.get((parameter, 0)) if isinstance(parameter.shape, ArrayShape) else None
            ranges: Sequence[Rows | None] = cuts or [None]
            new_parameters = []
            for rows in ranges:
                new = edit.copy_of(parameter, (), index=count)
                if rows is not None:
                    self._in_part(new, rows)
                    new.attributes = _with_row_range(parameter.attributes, rows)
                self.out.append(new)
                new_parameters.append(new)
                numbers.setdefault(parameter.index, []).append(count)
                for leaf in range(len(parameter.shape.leaves)):
                    pieces.append(VariableRows(number=flat + leaf, start=rows and rows[0], stop=rows and rows[1]))
                count += 1
            if cuts is None:
                self.whole[parameter, 0] = new_parameters[0]
            else:
                self.parts[parameter, 0] = tuple(new_parameters)
            flat += len(parameter.shape.leaves)
        return tuple(pieces), numbers

    def _root(self) -> tuple[tuple[VariableRows, ...], Instruction]:
        root = self.source.entry.root
        if root.opcode != "tuple":
            self._instruction(root)
            return tuple(VariableRows(number=i) for i in range(len(root.shape.leaves))), self._get((root, 0))
        pieces, operands, flat = [], [], 0
        for operand in root.operands:
            value = self._value(operand)
            cuts = self.rows.get(value)
            if cuts is None:
                operands.append(self._get(value))
                pieces += [VariableRows(number=flat + leaf) for leaf in range(len(operand.shape.leaves))]
            else:
                operands += [self._part(value, part) for part in range(len(cuts))]
                pieces += [VariableRows(number=flat, start=rows.start, stop=rows.stop) for rows in cuts]
            flat += len(operand.shape.leaves)
        new_root = edit.copy_of(root, operands, shape=TupleShape(tuple(o.shape for o in operands)), is_root=True)
        self.out.append(new_root)
        return tuple(pieces), new_root

    def _aliases(self, module: Module, numbers: Mapping[int, Sequence[int]]) -> None:
        """The header's aliases, part by part (in place)."""
        if "input_output_alias" not in module.header:
            return
        lines = []
        for alias in self.source.aliases:
            index = ", ".join(map(str, alias.parameter_index))
            results = self._positions(alias.output_index[0])
            for result, parameter in zip(results, numbers[alias.parameter_number], strict=True):
                output = ", ".join(map(str, [result, *alias.output_index[1:]]))
                lines.append(f"{{{output}}}: ({parameter}, {{{index}}}, {alias.kind})")
        module.header["input_output_alias"] = edit.attribute("input_output_alias", f"{{ {', '.join(lines)} }}")

    def _positions(self, position: int) -> list[int]:
        """Elements of the new root for one element of the old root."""
        start, positions = 0, []
        for i, operand in enumerate(self.source.entry.root.operands):
            count = len(self.rows.get(self._value(operand), (None,)))
            positions = list(range(start, start + count))
            if i == position:
                break
            start += count
        return positions

    # ---- instructions -------------------------------------------------------------------
    def _instruction(self, source: Instruction) -> None:
        if source in self.loops:
            self._loop(source)
        elif source.opcode == "get-tuple-element" and source.operands[0] in self.loops:
            return  # resolved at its consumers
        elif (tie := self.ties.get(source)) is not None and any(
            self._value(source.operands[k]) in self.rows for k in tie.operands
        ):
            self._by_rows(source, tie)
        elif (source, 0) in self.rows and source in self.ties:
            self._by_rows(source, self.ties[source])
        else:
            copy = edit.copy_of(source, [self._get(self._value(operand)) for operand in source.operands])
            self._add(copy, (source, 0))

    def _by_rows(self, source: Instruction, tie: RowWise) -> None:
        """One instruction per part; partial reductions over the rows are joined."""
        cuts = self.rows[self._value(source.operands[tie.operands[0]]) if tie.operands else (source, 0)]
        pieces = []
        for part, rows in enumerate(cuts):
            operands = [
                self._part(self._value(operand), part) if k in tie.operands else self._get(self._value(operand))
                for k, operand in enumerate(source.operands)
            ]
            new = edit.copy_of(source, operands)
            if tie.reduction is None:
                self._in_part(new, rows)
            else:
                new.name = self.names.like(source.name, f"rows{rows[0]}_{rows[1]}")
                self.label_of[new.name] = rows.label
            self.out.append(new)
            pieces.append(new)
        if tie.reduction is None:
            self.parts[source, 0] = tuple(pieces)
            return
        total = pieces[0]
        for part, other in enumerate(pieces[1:], start=1):
            name = source.name if part == len(pieces) - 1 else self.names.like(source.name, f"sum{part}")
            total = Instruction(name, tie.reduction, source.shape, (total, other), line=source.line)
            if "metadata" in source.attributes:
                total.attributes["metadata"] = source.attributes["metadata"]
            self.out.append(total)
        self.whole[source, 0] = total

    def _loop(self, source: Instruction) -> None:
        stacked, cuts = self.loops[source], self.cuts[source]
        operands = [self._value(operand) for operand in source.operands[0].operands]
        carried = {k: self._get(operands[k]) for k in (*stacked.threaded, *stacked.fixed)}
        written: dict[int, dict[int, Instruction]] = {k: {} for k in stacked.writes}
        parts = list(enumerate(cuts))
        last_loop = source
        for part, rows in reversed(parts) if stacked.is_descending else parts:
            begin, end = stacked.trips(rows.start, rows.stop)
            values = dict(carried)
            values[stacked.counter] = self._constant(source, stacked.counter, begin, rows)
            values |= {k: self._part(operands[k], part) for k in (*stacked.reads, *stacked.writes)}
            last_loop = self._part_of_loop(source, stacked, [values[k] for k in range(len(operands))], rows, end)
            for k in (*stacked.threaded, *stacked.writes):
                element = self._element(last_loop, k, rows)
                if k in written:
                    written[k][part] = element
                else:
                    carried[k] = element
        for k in stacked.writes:
            self.parts[source, k] = tuple(written[k][part] for part, _ in parts)
        for k in stacked.reads:
            self.parts[source, k] = tuple(self._part(operands[k], part) for part, _ in parts)
        for k, value in carried.items():
            self.whole[source, k] = value
        last = cuts[0] if stacked.is_descending else cuts[-1]
        self.whole[source, stacked.counter] = self._element(last_loop, stacked.counter, last)

    def _constant(self, loop: Instruction, element: int, value: int, rows: Rows) -> Instruction:
        shape = loop.shape.leaves[element]
        name = self.names.like(loop.name, f"first{rows[0]}_{rows[1]}")
        constant = Instruction(name, "constant", shape, payload=str(value), line=loop.line)
        self.label_of[name] = rows.label
        self.out.append(constant)
        return constant

    def _element(self, loop: Instruction, element: int, rows: Rows) -> Instruction:
        instruction = element_of(self.names.like(loop.name, f"element{element}"), loop, element)
        self.label_of[instruction.name] = rows.label
        self.out.append(instruction)
        return instruction

    def _part_of_loop(
        self,
        source: Instruction,
        stacked: StackedLoop,
        values: Sequence[Instruction],
        rows: Rows,
        end: int,
    ) -> Instruction:
        suffix = f"rows{rows[0]}_{rows[1]}"
        shape = TupleShape(tuple(value.shape for value in values))
        operand = Instruction(self.names.like(source.name, "operands"), "tuple", shape, tuple(values), line=source.line)
        body = PartialLoopBody(self.names, stacked, shape, rows, suffix)
        (old_body,), (old_condition,) = source.called["body"], source.called["condition"]
        made_body = body.copy(old_body)
        condition = loop_condition(self.names, old_condition, shape, stacked, end, suffix)
        part_loop = edit.copy_of(source, (operand,), name=self.names.like(source.name, suffix), shape=shape)
        part_loop.called = {"condition": (condition,), "body": (made_body,)}
        for which, computation in (("condition", condition), ("body", made_body)):
            part_loop.attributes[which] = edit.attribute(which, f"%{computation.name}")
        part_loop.attributes.pop("backend_config", None)
        self.label_of.update({operand.name: rows.label, part_loop.name: rows.label})
        self.out += [operand, part_loop]
        return part_loop

    # ---- values ---------------------------------------------------------------------
    def _value(self, instruction: Instruction) -> Value:
        """The value of an instruction; for a get-tuple-element of a split loop, the loop's element."""
        if instruction.opcode == "get-tuple-element" and instruction.operands[0] in self.loops:
            return instruction.operands[0], instruction.index
        return instruction, 0

    def _add(self, instruction: Instruction, value: Value) -> None:
        self.out.append(instruction)
        self.whole[value] = instruction

    def _in_part(self, instruction: Instruction, rows: Rows) -> None:
        """Names and shapes an instruction for some rows (in place)."""
        assert isinstance(instruction.shape, ArrayShape)
        instruction.name = self.names.like(instruction.name, f"rows{rows[0]}_{rows[1]}")
        instruction.shape = _with_rows(instruction.shape, rows[1] - rows[0])
        self.label_of[instruction.name] = rows.label

    def _get(self, value: Value) -> Instruction:
        """A value as a whole."""
        joined = self.whole.get(value)
        if joined is None:
            pieces = self.parts[value]
            shape = _with_rows(pieces[0].shape.leaves[0], sum(part.shape.leaves[0].dimensions[0] for part in pieces))
            name = self.names.like(value[0].name, f"whole{value[1]}" if value[1] else "whole")
            joined = Instruction(name, "concatenate", shape, pieces, line=value[0].line)
            joined.attributes["dimensions"] = edit.int_list("dimensions", (0,))
            self._add(joined, value)
        return joined

    def _part(self, value: Value, part: int) -> Instruction:
        """Some rows of a value."""
        if value not in self.parts:
            whole = self.whole[value]
            shape = whole.shape.leaves[0]
            pieces = []
            for rows in self.rows[value]:
                new = Instruction(whole.name, "slice", shape, (whole,), line=whole.line)
                self._in_part(new, rows)
                rest = [(0, size, 1) for size in shape.dimensions[1:]]
                new.attributes["slice"] = edit.slice_ranges([(rows.start, rows.stop, 1), *rest])
                self.out.append(new)
                pieces.append(new)
            self.parts[value] = tuple(pieces)
        return self.parts[value][part]


def _ends(parts: Parts) -> list[int]:
    return [rows.stop for rows in parts]


def _with_rows(shape: ArrayShape, rows: int) -> ArrayShape:
    return ArrayShape(shape.element_type, (rows, *shape.dimensions[1:]), layout=shape.layout)


def _with_row_range(attributes: Mapping[str, Attribute], rows: Rows) -> dict[str, Attribute]:
    """An argument's attributes, with its row range in the name."""
    new_attributes = dict(attributes)
    metadata = new_attributes.get("metadata")
    if metadata is not None:
        text = _OP_NAME.sub(rf'\1[{rows[0]}:{rows[1]}]"', metadata.text, count=1)
        new_attributes["metadata"] = edit.attribute("metadata", text)
    return new_attributes
