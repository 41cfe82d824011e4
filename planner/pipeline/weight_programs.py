"""Gradients of variables as programs of their own, which a schedule may run later.

Another chunk waits for a chunk's backward program only because of what it sends: the gradients of what the chunk was
sent. What does not lead there, such as the products that make gradients of variables, moves to the *weight* program of
the chunk, which reads what the backward program has made (zero-bubble schedules, Qi et al. 2023). Nothing is computed
twice; what is read later is kept longer. A chunk that nobody waits for, as the first one, stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from shardwright.hlo import Computation, Instruction
from shardwright.planner.pipeline.program_assignment import ProgramAssignment, ProgramId, readers


def _users_of(instruction: Instruction, users: Mapping[Instruction, Sequence[Instruction]]) -> Iterator[Instruction]:
    """Those that compute with it: a tuple only hands it on."""
    for user in users[instruction]:
        if user.opcode == "tuple":
            yield from _users_of(user, users)
        else:
            yield user


def delay_weight_gradients(homes: ProgramAssignment, entry: Computation) -> ProgramAssignment:
    """The homes with everything of backward programs that no other program waits for in weight programs."""
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
