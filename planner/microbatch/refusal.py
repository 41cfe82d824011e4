"""Why a step does not split into micro-batches, for people."""

from __future__ import annotations

from shardwright.errors import MicroBatchError
from shardwright.hlo import Instruction, Module, SourceLocation
from shardwright.planner.microbatch.labels import Labeller, Labels, cause


def refusal(module: Module, labeller: Labeller, labels: Labels) -> MicroBatchError:
    """The error for the first conflict of `labels`: what needs the whole batch, and what of the model reads it."""
    reader = labels.conflicts[0]
    found = labeller.reason(cause(labels, reader))
    place = _line(module, found) or found.op_name
    where = f"{found.name}, {place}" if place else found.name
    reads = "" if found is reader else f", which {_named(module, reader)} reads for each micro-batch"
    return MicroBatchError(
        f"{found.opcode} {found.name} needs the whole batch{reads}", where=where, remedy=_remedy(found)
    )


def taken_apart(module: Module, instruction: Instruction) -> str:
    """The note of an instruction of which each micro-batch has its own."""
    what = "sums over" if instruction.opcode == "reduce" else "runs through"
    return f"inexact: {_named(module, instruction)} {what} each micro-batch by itself, not the whole batch"


def _named(module: Module, instruction: Instruction) -> str:
    place = module.source(instruction) or instruction.op_name
    return f"{instruction.opcode} {instruction.name}" + (f" ({place})" if place else "")


def _line(module: Module, instruction: Instruction) -> SourceLocation | None:
    """The user's line of an instruction; of what reads it first, where a library's function left none."""
    (computation,) = [each for each in module.computations if instruction in each.instructions]
    following = {instruction}
    for each in computation.instructions:
        if each in following or not following.isdisjoint(each.operands):
            following.add(each)
            line = module.source(each)
            if line is not None:
                return line
    return None


def _remedy(found: Instruction) -> str:
    otherwise = "plan without micro-batches, or give each its own with micro_batch_inexact"
    if found.opcode == "reduce":
        return f"normalise each example or group by itself (group norm, layer norm); {otherwise}"
    if found.opcode in ("reduce-window", "sort", "while"):
        return f"do it for each example or group of tokens (expert capacity per group); {otherwise}"
    return "compute it for each example by itself, or plan without micro-batches"
