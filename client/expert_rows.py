"""Rows of a mixture of experts over the capacity that the user set: counted by the program, told after each step.

Under `expert_capacity` a program with ragged products gets one more result, which no caller sees: the custom call
`ROWS_OVER`, which the planner replaces by the number of rows that found no room. It travels as what `jax.debug` reads
does, whatever front end the program is of.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from shardwright.client.array_specs import array_spec, array_type
from shardwright.client.debug_calls import DebugCall, Level, Operand
from shardwright.client.frontends.program import Program
from shardwright.hlo import ArrayShape, Attribute, Instruction, Module, TupleShape, parse
from shardwright.hlo.attributes import parse_value
from shardwright.hlo.entry import format_aliases
from shardwright.plans.pipeline_plan import PipelinePlan
from shardwright.plans.plan import Plan
from shardwright.reserved_names import ROWS_OVER

_log = logging.getLogger("shardwright")

#: What stands in the text of every program with a ragged product.
_RAGGED = " ragged-dot("
_TYPE = array_spec((), np.dtype("int32"))


@dataclass(slots=True)
class _Rows:
    """A number of rows that goes up, or is known later."""

    count: int = 0


class RowsOver:
    """Of one step. total: those of all runs so far, also under other capacities."""

    def __init__(self, capacity: float | None, total: _Rows | None = None) -> None:
        self.capacity = capacity
        self._total = total or _Rows()
        self._of_programs: list[tuple[Program, _Rows]] = []  # what their mixtures multiply in a run

    @property
    def total(self) -> int:
        return self._total.count

    def under(self, capacity: float | None) -> RowsOver:
        """The same step's under another capacity."""
        return RowsOver(capacity, self._total)

    def tell(self, of_program: _Rows, prefix: str, values: Sequence[Any]) -> None:
        """Warn of the rows of one run. prefix: `step 12: `."""
        count, rows = int(values[0]), of_program.count
        if count <= 0:
            return
        self._total.count += count
        what = f"{count:,} of {rows:,} rows" if rows else f"{count:,} rows"
        _log.warning("%s%s were over the experts' capacity %g, and left out", prefix, what, self.capacity)

    def note_plan(self, program: Program, plan: Plan | PipelinePlan) -> None:
        """The plan of a program of `count_in`."""
        for known, of_program in self._of_programs:
            if known is program and isinstance(plan, Plan):
                of_program.count = max((note.rows for note in plan.mixtures), default=0)

    def count_in(self, program: Program) -> Program:
        """The program with the number as its last result; as it is without a capacity or a ragged product."""
        if self.capacity is None or _RAGGED not in program.hlo_text:
            return program
        module = parse(program.hlo_text)
        _add_result(module)
        _set_header(module, "input_output_alias", format_aliases(module, program.aliases) if program.aliases else "")
        _set_header(module, "buffer_donor", "")  # what they would be paired with is in `aliases`
        debug, of_program = program.debug, _Rows()
        call = DebugCall(say=partial(self.tell, of_program), operands=(Operand(number=len(debug.types)),), where="")
        counted = replace(
            program,
            hlo_text=module.to_text(),
            outputs=(*program.outputs, array_type("rows_over", _TYPE)),
            results=(*program.results, _TYPE),
            debug=Level(entries=(*debug.entries, call), types=(*debug.types, _TYPE)),
        )
        self._of_programs.append((counted, of_program))
        return counted


def _add_result(module: Module) -> None:
    """Have the entry return the number behind its results."""
    entry, root = module.entry, module.entry.root
    root.is_root = False
    target = Attribute("custom_call_target", f'"{ROWS_OVER}"', ROWS_OVER)
    names = {instruction.name for instruction in module.instructions()}
    count = Instruction(
        _unused("rows_over", names), "custom-call", ArrayShape("s32", ()), attributes={target.name: target}
    )
    added = [count]
    if not isinstance(root.shape, TupleShape):
        results: list[Instruction] = [root]
    elif root.opcode == "tuple":
        results = list(root.operands)
    else:
        results = [
            Instruction(_unused(f"result{number}", names), "get-tuple-element", shape, (root,), index=number)
            for number, shape in enumerate(root.shape.elements)
        ]
        added += results
    together = TupleShape((*(result.shape for result in results), count.shape))
    new = Instruction(_unused("results", names), "tuple", together, (*results, count), is_root=True)
    sharding = root.attributes.get("sharding")
    if sharding is not None:
        inner = sharding.text[1:-1] if isinstance(root.shape, TupleShape) else sharding.text
        text = f"{{{inner}, {{replicated}}}}"
        new.attributes["sharding"] = Attribute("sharding", text, parse_value("sharding", text))
    entry.instructions.extend([*added, new])
    layout = module.header.get("entry_computation_layout")
    if layout is not None:
        _set_header(module, "entry_computation_layout", _with_number(layout.text))


def _unused(name: str, names: set[str]) -> str:
    """A name for a new instruction, noted."""
    while name in names:
        name += ".more"
    names.add(name)
    return name


def _with_number(layout: str) -> str:
    """`{(f32[8]{0})->f32[]}` with one more result: `{(f32[8]{0})->(f32[], s32[])}`."""
    arguments, arrow, result = layout.removesuffix("}").rpartition("->")
    result = result.strip()
    inner = result[1:-1] if result.startswith("(") else result
    return f"{arguments}{arrow}({f'{inner}, ' if inner else ''}s32[])}}"


def _set_header(module: Module, name: str, text: str) -> None:
    """Sets an attribute of the module; removes it where the text is empty."""
    if text:
        module.header[name] = Attribute(name, text, parse_value(name, text))
    else:
        module.header.pop(name, None)
