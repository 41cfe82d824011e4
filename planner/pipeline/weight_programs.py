"""Moves gradients of variables to separate programs that a schedule may run later.

Other chunks wait for a chunk's backward program only because of the values it sends: the gradients of its inputs.
Instructions that do not lead there, such as the products for gradients of variables, move to the *weight* program of
the chunk; it reads results of the backward program (zero-bubble schedules, Qi et al. 2023). Nothing is computed twice;
values read later are kept longer. A chunk without waiting chunks, such as the first one, stays unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from shardwright.hlo import Computation, Instruction
from shardwright.planner.pipeline.program_assignment import ProgramAssignment, ProgramId, readers


def _users_of(instruction: Instruction, users: Mapping[Instruction, Sequence[Instruction]]) -> Iterator[Instruction]:
    """Instructions that compute with a value, looking through tuples."""
    for user in users[instruction]:
        if user.opcode == "tuple":
            yield from _users_of(user, users)
        else:
            yield user


def delay_weight_gradients(homes: ProgramAssignment, entry: Computation) -> ProgramAssignment:
    """The assignment with weight programs: all backward instructions that no other program waits for."""
    users = readers(entry)
    awaited: set[Instruction] = set()
    for instruction in reversed(entry.instructions):
        home = homes.of.get(instruction)
        if home is None or not home.is_backward:
            continue
        if any(user in awaited or homes.of.get(user, home) != home for user in _users_of(instruction, users)):
            awaited.add(instruction)
    chunks = {homes.of[instruction].chunk for instruction in awaited}
    of: dict[Instruction, ProgramId] = {}
    for instruction in entry:
        if instruction not in homes.of:
            continue
        home = homes.of[instruction]
        if instruction.opcode == "get-tuple-element":  # an element stays with the tuple
            home = of.get(instruction.operands[0], home)
        elif home.is_backward and home.chunk in chunks and instruction not in awaited:
            home = home._replace(is_delayed=True)
        of[instruction] = home
    return ProgramAssignment(of=of, chunks=homes.chunks)
