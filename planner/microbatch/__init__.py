"""Steps split into micro-batches, what each computes, what is added up, and what runs once, in these modules:

kinds       how a value relates to the micro-batches: whole, a part, a term, or done once
local_rules what one micro-batch can compute of an instruction, from its sharding rule
labels      the kind of every value, through loops and branches
batch_candidates  which argument carries the batch; messages: why a step does not split
split       the cut: accumulators, what is collected, what runs where
demand      which versions of which instructions each part needs
writer      the versions written as HLO (block: instruction by instruction; shapes: attributes that count elements)
modules     one micro-batch, and what follows once; accumulate: both around a loop, as one program
"""

from shardwright.planner.microbatch.accumulate import accumulate_step
from shardwright.planner.microbatch.kinds import Along, Done, Kind, Term, Whole
from shardwright.planner.microbatch.modules import Argument, Index, Input, PartModule, micro_module, once_module
from shardwright.planner.microbatch.split import SharedValue, StepSplit, split_step

__all__ = [
    "Along",
    "Argument",
    "Done",
    "Index",
    "Input",
    "Kind",
    "PartModule",
    "SharedValue",
    "StepSplit",
    "Term",
    "Whole",
    "accumulate_step",
    "micro_module",
    "once_module",
    "split_step",
]
