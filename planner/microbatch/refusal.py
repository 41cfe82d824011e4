"""Why a step does not split into micro-batches, for people."""

from __future__ import annotations

from shardwright.errors import MicroBatchError
from shardwright.hlo import Instruction, Module
from shardwright.planner.microbatch.kinds import Done, Term
from shardwright.planner.microbatch.labels import Labeller, Labels


def refusal(module: Module, labeller: Labeller, labels: Labels) -> MicroBatchError:
    """The error for the first conflict of `labels`: what needs the whole batch, and what of the model reads it."""
    reader = labels.conflicts[0]
    cause = labeller.reason(_cause(labels, reader))
    line = module.source(cause)
    where = f"{cause.name}, {line}" if line else cause.name
    reads = "" if cause is reader else f", which {_named(module, reader)} reads for each micro-batch"
    return MicroBatchError(
        f"{cause.opcode} {cause.name} needs the whole batch{reads}", where=where, remedy=_remedy(cause)
    )


def _named(module: Module, instruction: Instruction) -> str:
    line = module.source(instruction)
    return f"{instruction.opcode} {instruction.name}" + (f" ({line})" if line else "")


def _cause(labels: Labels, reader: Instruction) -> Instruction:
    """Where what a reader must not read was made: what summed over the batch, or needed all of it."""
    current = reader
    while current not in labels.done or current is reader:
        beside = [operand for operand in current.operands if _is_beside(labels, operand)]
        if not beside:
            return current
        current = beside[0]
    return current


def _is_beside(labels: Labels, operand: Instruction) -> bool:
    return operand not in labels.cheap and any(isinstance(kind, Term | Done) for kind in labels.kinds[operand])


def _remedy(cause: Instruction) -> str:
    if cause.opcode == "reduce":
        return "normalise each example or group by itself (group norm, layer norm), or plan without micro-batches"
    if cause.opcode in ("reduce-window", "sort", "while"):
        return "do it for each example or group of tokens (expert capacity per group), or plan without micro-batches"
    return "compute it for each example by itself, or plan without micro-batches"
