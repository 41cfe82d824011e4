"""From HLO to a Plan, in this order, one module each:

    dataflow    who makes which array leaf and who reads it, through tuples, loops and calls
    strategies  the ways to compute each node on a mesh: its rule's factors, one or none per axis
    prices      seconds of each strategy and of each reshard (from `shardwright.cost`)
    pins, force what the user decided; colours, confine: what a forced strategy leaves to each instruction
    graph       nodes that decide together become clusters: a choice problem with pairwise costs
    preference  what to choose where costs are equal
    solve       exact reductions (pbqp), a bound by message passing (dual), an integer program (ilp)
    assemble    the chosen strategies as a Plan: instructions, collectives (causes: why), variables
    verify      a checker that knows nothing of the search

`search` runs them for every candidate mesh and keeps the fastest plan.
"""

from shardwright.planner.search import plan
from shardwright.progress import PlanProgress

__all__ = ["PlanProgress", "plan"]
