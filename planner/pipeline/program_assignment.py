"""Assigns the instructions of the micro part to the programs of a pipeline.

Each instruction of a micro-batch's work has a chunk of the model. Within a chunk it is *backward* if it depends on a
later chunk, else *forward*. The last chunk's backward pass follows its forward pass at once: both are one program.
Values of constants alone belong to no program: they are rematerialized in every program that reads them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from shardwright.errors import PlanError
from shardwright.hlo import Computation, Instruction

#: Instructions cheap to rematerialize, given rematerialized operands.
CHEAP_OPCODES = frozenset({
    "constant", "iota", "broadcast", "convert", "compare", "select", "add", "subtract", "multiply", "divide", "negate",
    "and", "or", "not", "xor", "maximum", "minimum", "reshape", "transpose", "sign", "abs", "clamp", "rsqrt", "sqrt",
    "exponential", "power", "copy", "floor", "shift-left", "shift-right-logical", "dynamic-slice", "slice",
    "concatenate", "bitcast", "bitcast-convert", "remainder", "is-finite", "log", "ceil",
})  # fmt: skip

#: Instructions that only rearrange or convert their operand: a view of an argument is still an argument.
_VIEWS = frozenset({"bitcast", "broadcast", "convert", "copy", "reshape", "slice", "transpose"})

#: Instructions that only forward arrays: a tuple goes with its reader, an element with its producer.
_TUPLES = frozenset({"tuple", "get-tuple-element"})


class ProgramId(NamedTuple):
    """The program of an instruction. is_delayed: the chunk's weight program (`delay_weight_gradients`)."""

    chunk: int
    is_backward: bool
    is_delayed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramAssignment:
    """of: the program of each instruction; others are parameters, or rematerialized per reader."""

    of: Mapping[Instruction, ProgramId]
    chunks: int

    @property
    def has_backward(self) -> bool:
        """Whether there is a backward pass at all."""
        return any(home.is_backward for home in self.of.values() if home.chunk < self.chunks - 1) or self.chunks == 1

    def without(self, instructions: Collection[Instruction]) -> ProgramAssignment:
        """The assignment of all others."""
        return ProgramAssignment(
            of={instruction: home for instruction, home in self.of.items() if instruction not in instructions},
            chunks=self.chunks,
        )

    def programs(self) -> list[ProgramId]:
        """Every nonempty program: forward in order, then backward in reverse, then delayed ones."""
        ids = sorted(set(self.of.values()))
        forward = [home for home in ids if not home.is_backward]
        backward = [home for home in reversed(ids) if home.is_backward and not home.is_delayed]
        return forward + backward + [home for home in reversed(ids) if home.is_delayed]


def assign_programs(
    entry: Computation, chunk_of: Mapping[str, int], chunks: int, remade_from: Collection[Instruction]
) -> ProgramAssignment:
    """The program of every instruction of a micro-batch's work.

    chunk_of: chunks by instruction name; an instruction without one goes with its readers, else with its operands.
    remade_from: parameters present in every program (the number of the micro-batch).
    Raises PlanError if the forward pass reads a value of the backward pass.
    """
    anew = find_cheap_values(entry, remade_from)
    anew |= _views_of_arguments(entry, chunk_of, anew)
    wanted = _chunks_by_readers(entry, chunk_of)
    seen: dict[Instruction, _Reach] = {}
    homes: dict[Instruction, ProgramId] = {}
    for instruction in entry:
        reach = _Reach.of([seen[operand] for operand in instruction.operands])
        if instruction.opcode == "parameter" or instruction in anew:
            seen[instruction] = _NOTHING
            continue
        if instruction.opcode == "get-tuple-element" and instruction.operands[0] in homes:
            homes[instruction] = homes[instruction.operands[0]]
            seen[instruction] = seen[instruction.operands[0]]
            continue
        if instruction.opcode in _TUPLES:
            seen[instruction] = reach
            continue
        chunk = wanted.get(instruction, reach.last)
        home = _program_id(instruction, max(chunk, 0), reach, chunks)
        homes[instruction] = home
        seen[instruction] = _Reach(home.chunk, home.chunk if home.is_backward else None)
    return ProgramAssignment(of=homes, chunks=chunks)


class _Reach(NamedTuple):
    """Producers of a value: the last chunk among them, and the first chunk among the backward ones."""

    last: int
    first_backward: int | None

    @classmethod
    def of(cls, reaches: list[_Reach]) -> _Reach:
        backward = [reach.first_backward for reach in reaches if reach.first_backward is not None]
        return cls(max((reach.last for reach in reaches), default=-1), min(backward, default=None))


_NOTHING = _Reach(-1, None)


def _program_id(instruction: Instruction, chunk: int, reach: _Reach, chunks: int) -> ProgramId:
    if chunk >= chunks:
        raise PlanError(f"chunk {chunk} of a pipeline of {chunks} chunks", where=instruction.name)
    if reach.first_backward is not None:
        # The backward pass goes from the last chunk to the first: it is not there yet in an earlier one.
        return ProgramId(min(chunk, reach.first_backward), True)
    return ProgramId(chunk, chunk == chunks - 1 or reach.last > chunk)


def find_cheap_values(entry: Computation, roots: Collection[Instruction] = ()) -> set[Instruction]:
    """Cheap instructions that read only other cheap ones, constants and `roots`."""
    cheap = set(roots)
    for instruction in entry:
        if instruction.opcode in CHEAP_OPCODES and all(operand in cheap for operand in instruction.operands):
            cheap.add(instruction)
    return cheap


def _views_of_arguments(
    entry: Computation, chunk_of: Mapping[str, int], anew: Collection[Instruction]
) -> set[Instruction]:
    """Casts and reshapes of arguments that belong to no chunk: rematerialized per reader."""
    views: set[Instruction] = set()
    for instruction in entry:
        if instruction.opcode not in _VIEWS or instruction.name in chunk_of or instruction in anew:
            continue
        if all(
            operand.opcode == "parameter" or operand in views or operand in anew for operand in instruction.operands
        ):
            views.add(instruction)
    return views


def _chunks_by_readers(entry: Computation, chunk_of: Mapping[str, int]) -> dict[Instruction, int]:
    """The chunk of every instruction that has one, or whose readers have: the first of theirs."""
    wanted: dict[Instruction, int] = {}
    for instruction in reversed(entry.instructions):
        own = chunk_of.get(instruction.name)
        chunk = wanted.get(instruction) if own is None else own
        if chunk is None:
            continue
        wanted[instruction] = chunk
        for operand in instruction.operands:
            if operand.name not in chunk_of:
                wanted[operand] = min(chunk, wanted.get(operand, chunk))
    return wanted


def readers(entry: Computation) -> dict[Instruction, list[Instruction]]:
    """The readers of each instruction, in order."""
    users: dict[Instruction, list[Instruction]] = {instruction: [] for instruction in entry}
    for instruction in entry:
        for operand in dict.fromkeys(instruction.operands):
            users[operand].append(instruction)
    return users
