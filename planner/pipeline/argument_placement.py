"""Which stage keeps which argument, and which stage computes what of the once part.

A variable is kept by the stage that reads it first; its optimizer state, and what updates it, are there too. What
goes into the updates of several stages (the sum of squares of a global norm) stands where its first operand is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from shardwright.hlo import ArrayShape, Instruction
from shardwright.planner.microbatch import Argument
from shardwright.planner.pipeline.microbatch_programs import Total
from shardwright.planner.pipeline.program_assignment import CHEAP_OPCODES, find_cheap_values, readers
from shardwright.planner.pipeline.step import PipelineStep, elements

#: Most elements of what every stage computes for itself out of small arguments.
_SMALL = 64

#: Instructions for that, besides those that are made anew anyway.
_SMALL_WORK = CHEAP_OPCODES | {"reduce", "sine", "cosine", "tanh"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentPlacement:
    """keeps: per argument that is replaced every step, the stage that keeps it.
    stages: per instruction and parameter of the once part its stage; those left out are made anew where they are read.
    """

    stage_of_argument: Mapping[int, int]
    stages: Mapping[Instruction, int]


def place_arguments(step: PipelineStep, totals: Mapping[Instruction, Total]) -> ArgumentPlacement:
    """totals: of the once part's parameters."""
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
    for instruction in reversed(entry.instructions):  # what is made of arguments that only the once part reads
        if instruction not in stages and instruction not in anew and instruction is not entry.root:
            stages[instruction] = next((stages[user] for user in users[instruction] if user in stages), 0)
    by_number = {number: parameter for parameter, number in numbers.items()}
    for output, number in step.aliases.items():
        made = entry.root.operands[output]
        where = stages.get(made, stages.get(by_number.get(number, made), 0))
        keeps.setdefault(number, where)
        if number in by_number:
            stages[by_number[number]] = keeps[number]
    return ArgumentPlacement(stage_of_argument=keeps, stages=stages)


def _stage(
    instruction: Instruction, wanted: Mapping[Instruction, int], stages: Mapping[Instruction, int]
) -> int | None:
    for operand in instruction.operands:
        if operand in stages and not isinstance(operand.shape, ArrayShape):
            return stages[operand]  # tuples stay where they are
    if instruction in wanted:
        return wanted[instruction]
    return next((stages[operand] for operand in instruction.operands if operand in stages), None)


def _small_work(step: PipelineStep) -> set[Instruction]:
    """What is made of small arguments alone: learning rates, counts of steps, corrections of a bias."""
    small: set[Instruction] = set()
    for instruction in step.once.module.entry:
        if instruction.opcode == "parameter":
            is_small = isinstance(step.input_of(step.once, instruction), Argument)
        else:
            is_small = instruction.opcode in _SMALL_WORK and all(operand in small for operand in instruction.operands)
        if is_small and all(elements(leaf) <= _SMALL for leaf in instruction.shape.leaves):
            small.add(instruction)
    return {instruction for instruction in small if instruction.opcode != "parameter"}


def _stage_of_updates(step: PipelineStep, keeps: Mapping[int, int]) -> dict[Instruction, int]:
    """What goes into the updates of one stage only, and that stage."""
    entry = step.once.module.entry
    wanted: dict[Instruction, set[int]] = {}
    for output, number in step.aliases.items():
        if number in keeps:
            wanted.setdefault(entry.root.operands[output], set()).add(keeps[number])
    for instruction in reversed(entry.instructions):
        found = wanted.get(instruction)
        if not found or instruction is entry.root:
            continue
        if len(found) > 1 and all(elements(leaf) <= _SMALL for leaf in instruction.shape.leaves):
            continue  # a norm of everything: it says nothing about where its parts are
        for operand in instruction.operands:
            wanted.setdefault(operand, set()).update(found)
    return {each: next(iter(stages)) for each, stages in wanted.items() if len(stages) == 1}


def _first_readers(step: PipelineStep) -> dict[int, int]:
    """Arguments that are replaced every step and that micro-batches read: the stage of their first reader."""
    replaced = set(step.aliases.values())
    users = readers(step.micro.module.entry)
    found: dict[int, int] = {}
    for parameter in step.micro.module.entry.parameters:
        given = step.input_of(step.micro, parameter)
        if isinstance(given, Argument) and given.number in replaced:
            chunks = [
                step.program_assignment.of[reader].chunk
                for reader in _readers_in_programs(step.program_assignment.of, users, parameter)
            ]
            if chunks:
                found[given.number] = step.stage_of_chunk[min(chunks)]
    return found


def _readers_in_programs(
    homes: Collection[Instruction], users: Mapping[Instruction, list[Instruction]], value: Instruction
) -> list[Instruction]:
    """Who reads a value; tuples and what is made anew are seen through."""
    found: list[Instruction] = []
    seen: set[Instruction] = set()
    todo = list(users[value])
    while todo:
        reader = todo.pop()
        if reader in homes:
            found.append(reader)
        elif reader not in seen:
            seen.add(reader)
            todo += users[reader]
    return found
