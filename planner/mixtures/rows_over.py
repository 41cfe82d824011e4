"""The number of rows over their experts' capacity, where a program asks for it."""

from __future__ import annotations

from shardwright.hlo import Instruction, Module
from shardwright.planner.rewrites import edit
from shardwright.reserved_names import ROWS_OVER


def is_count(instruction: Instruction) -> bool:
    """Whether it asks how many rows were over the capacity."""
    return instruction.opcode == "custom-call" and instruction.get("custom_call_target") == ROWS_OVER


def with_no_rows_over(module: Module) -> Module:
    """The module with 0 in the place of these numbers, as where there is room for all rows; itself without any."""
    counts = {instruction for instruction in module.instructions() if is_count(instruction)}
    if not counts:
        return module

    def write(_: Instruction, copy: Instruction) -> list[Instruction]:
        copy.opcode, copy.payload = "constant", "0"
        copy.attributes = {name: each for name, each in copy.attributes.items() if name == "metadata"}
        return []

    return edit.insert_ahead_of(module, counts, write)
