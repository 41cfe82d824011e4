"""From HLO to a Plan. The packages, each of which may import those above it (docs/adr/0036):

    rules       per opcode and for one mesh axis: which dimensions may be split together
    graph       who makes which array leaf and who reads it; what the program brings along
    rewrites    the same program written so that more can be split, or less is stored
    costs       seconds of each strategy and of each move (from `shardwright.cost`)
    strategies  the ways to compute each node on a mesh: a factor, a partial sum handed on, or nothing, per axis
    solver      a choice problem: exact reductions, a bound by message passing, an integer program
    pins        what the user decided: tensors pinned to axes, forced strategies
    segments    the program cut at its critical nodes; its variables; the chain of segments, runs rolled up
    memory      prices of bytes, plans that fit, what is computed again
    plans       the chosen strategies as a Plan: instructions, collectives, variables; a checker that knows no search
    microbatch  the step cut into micro-batches
    search      every candidate mesh is planned, bounded, and the fastest plan that fits is kept
    warm_start  nearly the same program again: along the way of the earlier search
    stages      the stages of a pipeline; pipeline: their programs

`search.program` reads a module once, `search.search` plans it on every mesh. `planning` weighs that plan against a
pipeline, `cache` keeps it for the next time.
"""

from shardwright.planner.search.search import plan
from shardwright.progress import PlanProgress

__all__ = ["PlanProgress", "plan"]
