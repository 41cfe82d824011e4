"""Reasons against a split into micro-batches, for people."""

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
    """The error for the first conflict of `labels`: the whole-batch instruction, and its consumer in the model."""
    reader = labels.conflicts[0]
    cause = labeller.reason(find_cause(labels, reader))
    place = _line(module, cause) or cause.op_name
    where = f"{cause.name}, {place}" if place else cause.name
    reads = "" if cause is reader else f", which {_describe(module, reader)} reads for each micro-batch"
    return MicroBatchError(
        f"{cause.opcode} {cause.name} needs the whole batch{reads}", where=where, remedy=_remedy(cause)
    )


def indivisible_error(split: StepSplit, micro_batches: int) -> MicroBatchError:
    """The error for a batch not divisible into equal parts: usually the last one of an epoch."""
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
    """The note on an instruction with its own value in each micro-batch."""
    what = "sums over" if instruction.opcode == "reduce" else "runs through"
    return f"inexact: {_describe(module, instruction)} {what} each micro-batch by itself, not the whole batch"


def _describe(module: Module, instruction: Instruction) -> str:
    place = module.source(instruction) or instruction.op_name
    return f"{instruction.opcode} {instruction.name}" + (f" ({place})" if place else "")


def _line(module: Module, instruction: Instruction) -> SourceLocation | None:
    """The user's source line of an instruction; else, in a library function, of its first consumer."""
    (computation,) = [owner for owner in module.computations if instruction in owner.instructions]
    following = {instruction}
    for consumer in computation.instructions:
        if consumer in following or not following.isdisjoint(consumer.operands):
            following.add(consumer)
            line = module.source(consumer)
            if line is not None:
                return line
    return None


def _remedy(culprit: Instruction) -> str:
    otherwise = "plan without micro-batches, or give each its own with micro_batch_inexact"
    if culprit.opcode == "reduce":
        return f"normalise each example or group by itself (group norm, layer norm); {otherwise}"
    if culprit.opcode in ("reduce-window", "sort", "while"):
        return f"do it for each example or group of tokens (expert capacity per group); {otherwise}"
    return "compute it for each example by itself, or plan without micro-batches"
