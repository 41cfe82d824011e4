"""Why a step does not split into micro-batches, for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardwright.errors import MicroBatchError
from shardwright.hlo import ArrayShape, Instruction, Module, SourceLocation
from shardwright.planner.microbatch.labels import KindLabels, Labeller, find_cause

if TYPE_CHECKING:
    from shardwright.planner.microbatch.split import StepSplit

#: Arguments and divisors that an error lists, at most.
_LISTED = 8


def conflict_error(module: Module, labeller: Labeller, labels: KindLabels) -> MicroBatchError:
    """The error for the first conflict of `labels`: what needs the whole batch, and what of the model reads it."""
    reader = labels.conflicts[0]
    found = labeller.reason(find_cause(labels, reader))
    place = _line(module, found) or found.op_name
    where = f"{found.name}, {place}" if place else found.name
    reads = "" if found is reader else f", which {_describe(module, reader)} reads for each micro-batch"
    return MicroBatchError(
        f"{found.opcode} {found.name} needs the whole batch{reads}", where=where, remedy=_remedy(found)
    )


def indivisible_error(split: StepSplit, micro_batches: int) -> MicroBatchError:
    """The error for a batch that does not split into so many equal parts: the last one of an epoch, as a rule."""
    size = split.divisor
    carriers = [describe_argument(split.module, split.names, number) for number in split.batch]
    of = "" if split.tightest in carriers else f" (the batch: {_join_limited(carriers)})"
    divisors = [str(number) for number in range(1, size + 1) if size % number == 0]
    return MicroBatchError(
        f"{micro_batches} micro-batches do not divide the batch: {split.tightest} splits into {size} equal parts{of}",
        where="micro_batches",
        remedy="drop a last, smaller batch (drop_remainder), or pad it to the full size and mask the loss, or take "
        f"micro_batches that divide {size}: {_join_limited(divisors)}",
    )


def argument_leaves(module: Module) -> list[ArrayShape]:
    """Shapes of the flat arguments."""
    ordered = sorted(module.entry.parameters, key=lambda parameter: parameter.index)
    return [leaf for parameter in ordered for leaf in parameter.shape.leaves]


def describe_argument(module: Module, names: Sequence[str], number: int) -> str:
    """`batch['x'] f32[30,16]`, of a flat argument."""
    shape = argument_leaves(module)[number]
    name = names[number] if number < len(names) else f"argument {number}"
    return f"{name} {shape.element_type}[{','.join(map(str, shape.dimensions))}]"


def _join_limited(items: Sequence[str]) -> str:
    return ", ".join(items if len(items) <= _LISTED else [*items[: _LISTED - 1], "…", items[-1]])


def inexact_note(module: Module, instruction: Instruction) -> str:
    """The note of an instruction of which each micro-batch has its own."""
    what = "sums over" if instruction.opcode == "reduce" else "runs through"
    return f"inexact: {_describe(module, instruction)} {what} each micro-batch by itself, not the whole batch"


def _describe(module: Module, instruction: Instruction) -> str:
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
