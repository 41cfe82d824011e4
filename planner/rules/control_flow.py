"""Instructions calling computations: carried values keep their sharding, the rest is planned inside."""

from __future__ import annotations

from shardwright.hlo import Instruction
from shardwright.planner.rules.base import OpRule, register_replicated, strategy_rule
from shardwright.planner.rules.tuples import leafwise


@strategy_rule("while")
def while_(instruction: Instruction) -> OpRule:
    """A carried leaf has one sharding: initial value, the body's parameter and root, and result.

    One factor per dimension of each leaf, every leaf independently. The iterations are planned in the body; the
    condition's parameter follows.
    """
    return leafwise(instruction, {i: i for i in range(len(instruction.shape.leaves))})


register_replicated(
    "its operands and result are those of the computations it calls, planned inside", "call", "conditional"
)
