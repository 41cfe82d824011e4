"""From HLO to a Plan, in this order, one module each:

    program     the module read once: inlining (calls written out), rewrites (dimensions split), names, pins
    dataflow    who makes which array leaf and who reads it, through tuples and loops
    segments    the program cut at its critical nodes; equal segments, and runs of them
    strategies  the ways to compute each node on a mesh: a factor, a partial sum handed on, or nothing, per axis
    prices      seconds of each strategy and of each reshard (from `shardwright.cost`)
    pins, force what the user decided; colours, mixtures, confine: what a forced strategy leaves to each instruction
    graph       variables: nodes that choose, hubs where a value lies for its readers
    chain       every kind of segment reduced once, the program put together with its runs rolled up
    preference  what to choose where costs are equal
    solve       exact reductions (pbqp), a bound by message passing (dual), an integer program (ilp)
    bound       what no plan costs less than, every repeat deciding for itself
    budget      memory as a price per byte; fitting: the price at which a plan fits; exact_fit: as rows of the ILP
    recompute   what to compute again where memory binds; relief: whether that gives a faster plan that fits
    rule_mode   instead of a search: the pins propagated
    assemble    the chosen strategies as a Plan: instructions, collectives (causes: why), variables
    found       what the search finds; mesh_search: on one mesh; finishing: bounded and written down
    parallel    work on a second core, in a forked child
    verify      a checker that knows nothing of the search
    cache       plans kept for the next time

`search` runs them for every candidate mesh and keeps the fastest plan that fits. `planning` weighs that plan against a
pipeline: `microbatch` cuts the step into micro-batches, `stages` looks for the stages, `pipeline` makes their programs.
"""

from shardwright.planner.search import plan
from shardwright.progress import PlanProgress

__all__ = ["PlanProgress", "plan"]
