"""Micro-batches: a training step cut into the part per micro-batch, the sums, and the part that runs once. Modules:

kinds             relation of a value to the micro-batches: whole, a part, a term, done once
local_rules       one micro-batch's share of an instruction, from its sharding rule
labels            the kind of every value, through loops and branches
batch_candidates  arguments that may carry the batch
messages          reasons against a split
split             the cut: accumulators, collected values, the place of each instruction
demand            versions of instructions each part needs
writer            the versions as HLO (block: instruction by instruction; shapes: attributes that count elements)
modules           one micro-batch, and the part that runs once after the last
accumulate        both as one program, the first inside a loop
"""

from shardwright.planner.microbatch.accumulate import accumulate_step
from shardwright.planner.microbatch.kinds import Along, Done, Kind, Term, Whole
from shardwright.planner.microbatch.modules import (
    Ahead,
    Argument,
    Index,
    Input,
    Output,
    PartModule,
    ahead_module,
    micro_module,
    once_module,
)
from shardwright.planner.microbatch.split import NARROW, SharedValue, StepSplit, split_step

__all__ = [
    "NARROW",
    "Ahead",
    "Along",
    "Argument",
    "Done",
    "Index",
    "Input",
    "Kind",
    "Output",
    "PartModule",
    "SharedValue",
    "StepSplit",
    "Term",
    "Whole",
    "accumulate_step",
    "ahead_module",
    "micro_module",
    "once_module",
    "split_step",
]
