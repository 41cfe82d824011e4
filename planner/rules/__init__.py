"""Strategy rules: per opcode, the ways to split it over one mesh axis, or the reason against any."""

from shardwright.planner.rules import (  # noqa: F401 - importing registers the rules
    batched,
    control_flow,
    convolution,
    data_movement,
    dot,
    elementwise,
    indexing,
    reduction,
    replicated_ops,
    tuples,
)
from shardwright.planner.rules.base import Factor, OpRule, coverage, rule_of, strategy_rule
from shardwright.planner.rules.halo import Halo, exchange_bytes
from shardwright.planner.rules.xla_bugs import find_xla_bug

__all__ = ["Factor", "Halo", "OpRule", "coverage", "exchange_bytes", "find_xla_bug", "rule_of", "strategy_rule"]
