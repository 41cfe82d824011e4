"""Strategy rules: for every opcode the ways to split it over one mesh axis, or why there are none."""

from shardwright.planner.rules import (  # noqa: F401 - importing registers the rules
    batched,
    control_flow,
    convolution,
    data_movement,
    dot,
    elementwise,
    indexing,
    opaque,
    reduction,
    tuples,
)
from shardwright.planner.rules.base import Factor, OpRule, coverage, rule_of, strategy_rule
from shardwright.planner.rules.denied import denied
from shardwright.planner.rules.halo import Halo, exchanged_bytes

__all__ = ["Factor", "Halo", "OpRule", "coverage", "denied", "exchanged_bytes", "rule_of", "strategy_rule"]
