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
from shardwright.planner.rules.manual import ManualPart, Place, axes_on, devices_alike, match_axis, rule_at
from shardwright.planner.rules.objections import find_objection
from shardwright.planner.rules.xla_bugs import find_xla_bug

__all__ = [
    "Factor", "Halo", "ManualPart", "OpRule", "Place", "axes_on", "coverage", "devices_alike", "exchange_bytes",
    "find_objection", "find_xla_bug", "match_axis", "rule_at", "rule_of", "strategy_rule",
]  # fmt: skip
