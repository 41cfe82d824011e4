"""Assigns arguments, and the instructions of the once part, to stages.

A variable is kept by the stage of its first reader, together with its optimizer state and update. Inputs to the updates
of several stages (the sum of squares of a global norm) are computed at their first operand's stage.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from shardwright.hlo import ArrayShape, Instruction
from shardwright.planner.microbatch import Ahead, Argument
from shardwright.planner.pipeline.microbatch_programs import Total
from shardwright.planner.pipeline.program_assignment import CHEAP_OPCODES, find_cheap_values, readers
from shardwright.planner.pipeline.step import PipelineStep, elements
from shardwright.planner.tuning import MAX_REPEATED_ELEMENTS

#: Their instructions, besides those rematerialized anyway.
_SMALL_WORK = CHEAP_OPCODES | {"reduce", "sine", "cosine", "tanh"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentPlacement:
    """stage_of_argument: the stage of each argument that is replaced every step.
    stages: the stage of each instruction and parameter of the once part; others are rematerialized per reader.
    """

    stage_of_argument: Mapping[int, int]
    stages: Mapping[Instruction, int]


def place_arguments(step: PipelineStep, totals: Mapping[Instruction, Total]) -> ArgumentPlacement:
    """Places arguments and the once part. totals: of the once part's parameters."""
    entry = step.once.module.entry
    keeps = _first_readers(step)
    anew = find_cheap_values(entry) | _small_work(step)
    wanted = _stage_of_updates(step, keeps)
    numbers = {
        parameter: given.number
        for parameter in entry.parameters
        if isinstance(given := step.input_of(step.once, parameter), Argument)
    }
    stages: dict[Instruction, int] = {}
    for instruction in entry:
        if instruction is entry.root or instruction in anew:
            continue
        if instruction in totals:
            stages[instruction] = totals[instruction].stage
        elif instruction in numbers:
            if numbers[instruction] in keeps:
                stages[instruction] = keeps[numbers[instruction]]
        elif (stage := _stage(instruction, wanted, stages)) is not None:
            stages[instruction] = stage
    users = readers(entry)
    for instruction in reversed(entry.instructions):  # values of arguments read only by the once part
        if instruction not in stages and instruction not in anew and instruction is not entry.root:
            stages[instruction] = next((stages[user] for user in users[instruction] if user in stages), 0)
    by_number = {number: parameter for parameter, number in numbers.items()}
    for output, number in step.aliases.items():
        result = entry.root.operands[output]
        where = stages.get(result, stages.get(by_number.get(number, result), 0))
        keeps.setdefault(number, where)
        if number in by_number:
            stages[by_number[number]] = keeps[number]
    return ArgumentPlacement(stage_of_argument=keeps, stages=stages)


def _stage(
    instruction: Instruction, update_stages: Mapping[Instruction, int], stages: Mapping[Instruction, int]
) -> int | None:
    for operand in instruction.operands:
        if operand in stages and not isinstance(operand.shape, ArrayShape):
            return stages[operand]  # tuples stay where they are
    if instruction in update_stages:
        return update_stages[instruction]
    return next((stages[operand] for operand in instruction.operands if operand in stages), None)


def _small_work(step: PipelineStep) -> set[Instruction]:
    """Values computed from small arguments alone: learning rates, step counts, bias corrections."""
    small: set[Instruction] = set()
    for instruction in step.once.module.entry:
        if instruction.opcode == "parameter":
            is_small = isinstance(step.input_of(step.once, instruction), Argument)
        else:
            is_small = instruction.opcode in _SMALL_WORK and all(operand in small for operand in instruction.operands)
        if is_small and all(elements(leaf) <= MAX_REPEATED_ELEMENTS for leaf in instruction.shape.leaves):
            small.add(instruction)
    return {instruction for instruction in small if instruction.opcode != "parameter"}


def _stage_of_updates(step: PipelineStep, keeps: Mapping[int, int]) -> dict[Instruction, int]:
    """Instructions that enter the updates of one stage only → that stage."""
    entry = step.once.module.entry
    wanted: dict[Instruction, set[int]] = {}
    for output, number in step.aliases.items():
        if number in keeps:
            wanted.setdefault(entry.root.operands[output], set()).add(keeps[number])
    for instruction in reversed(entry.instructions):
        reader_stages = wanted.get(instruction)
        if not reader_stages or instruction is entry.root:
            continue
        if len(reader_stages) > 1 and all(elements(leaf) <= MAX_REPEATED_ELEMENTS for leaf in instruction.shape.leaves):
            continue  # a norm of everything: no hint to the stages of its parts
        for operand in instruction.operands:
            wanted.setdefault(operand, set()).update(reader_stages)
    return {value: next(iter(stages)) for value, stages in wanted.items() if len(stages) == 1}


def _first_readers(step: PipelineStep) -> dict[int, int]:
    """Arguments replaced every step and read by micro-batches → the stage of their first reader."""
    replaced = set(step.aliases.values())
    users = readers(step.micro.module.entry)
    first_chunk: dict[int, int] = {}
    for parameter in step.micro.module.entry.parameters:
        given = step.input_of(step.micro, parameter)
        if isinstance(given, Argument):
            numbers = frozenset({given.number})
        elif isinstance(given, Ahead):
            numbers = step.sources_of(given)
        else:
            continue
        programs = _readers_in_programs(step.program_assignment.of, users, parameter)
        chunks = [step.program_assignment.of[reader].chunk for reader in programs]
        for number in numbers & replaced if chunks else ():
            first_chunk[number] = min(first_chunk.get(number, chunks[0]), *chunks)
    return {number: step.stage_of_chunk[chunk] for number, chunk in sorted(first_chunk.items())}


def _readers_in_programs(
    homes: Collection[Instruction], users: Mapping[Instruction, list[Instruction]], value: Instruction
) -> list[Instruction]:
    """Readers of a value, looking through tuples and rematerialized values."""
    program_readers: list[Instruction] = []
    seen: set[Instruction] = set()
    todo = list(users[value])
    while todo:
        reader = todo.pop()
        if reader in homes:
            program_readers.append(reader)
        elif reader not in seen:
            seen.add(reader)
            todo += users[reader]
    return program_readers
