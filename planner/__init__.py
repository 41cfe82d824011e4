"""From HLO to a Plan: graph → strategies → costs → exact reductions → integer program → check."""

from shardwright.planner.search import PlanProgress, plan

__all__ = ["PlanProgress", "plan"]
