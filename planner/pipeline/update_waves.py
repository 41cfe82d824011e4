"""Schedules the once part, in waits for other stages.

If one stage's result needs another's (a global norm needs every stage's sum of squares, every update needs the norm),
the once part falls into waves; a stage has one program per wave. Every instruction runs in the last wave that its
readers allow: few values are kept from one wave to the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from shardwright.hlo import Computation, Instruction
from shardwright.planner.pipeline.microbatch_programs import Total
from shardwright.planner.pipeline.program_assignment import readers


class UpdateProgramId(NamedTuple):
    """A program of the once part."""

    wave: int
    stage: int

    @property
    def name(self) -> str:
        return f"apply.{self.wave}.{self.stage}"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateWaves:
    """of: the program of every instruction that has a stage. last: the last wave."""

    of: Mapping[Instruction, UpdateProgramId]
    last: int


def assign_waves(
    entry: Computation, stages: Mapping[Instruction, int], totals: Mapping[Instruction, Total]
) -> UpdateWaves:
    """The wave of every instruction of the once part that has a stage.

    totals: of parameters. A partial sum is reduced by a program of its stage before it is sent; every other parameter
    can be sent unchanged.
    """
    early: dict[Instruction, int] = {}
    for instruction in entry:
        early[instruction] = max(
            (early[operand] + _waits(operand, instruction, stages, totals) for operand in instruction.operands),
            default=0,
        )
    own = [i for i in entry if i in stages and i.opcode != "parameter" and i is not entry.root]
    last = max((early[instruction] for instruction in own), default=0)
    users = readers(entry)
    of: dict[Instruction, UpdateProgramId] = {}
    for instruction in reversed(own):
        limits = [of[user].wave - (of[user].stage != stages[instruction]) for user in users[instruction] if user in of]
        of[instruction] = UpdateProgramId(min(limits, default=last), stages[instruction])
    for instruction in own:
        if instruction.opcode == "get-tuple-element" and instruction.operands[0] in of:
            of[instruction] = of[instruction.operands[0]]  # a tuple does not go from one program to another
    return UpdateWaves(of=of, last=last)


def _waits(
    operand: Instruction, reader: Instruction, stages: Mapping[Instruction, int], totals: Mapping[Instruction, Total]
) -> bool:
    """Whether a program of another stage must end before this operand can be read."""
    if operand not in stages or reader not in stages or stages[operand] == stages[reader]:
        return False
    return operand.opcode != "parameter" or (operand in totals and bool(totals[operand].sharding.unreduced))
