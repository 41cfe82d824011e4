"""From HLO to a Plan. Each package may import those above it (docs/adr/0036):

    rules       per opcode and for one mesh axis: the dimensions that can be split together
    graph       producers and readers of array leaves; properties of the program
    rewrites    equivalent programs with more splittable dimensions or fewer stored bytes
    costs       seconds of each strategy and of each reshard (from `shardwright.cost`)
    strategies  each node's choices on a mesh: per axis a factor, a forwarded partial sum, or nothing
    solver      a choice problem: exact reductions, a bound by message passing, an integer program
    constraints the user's decisions: tensors pinned to axes, forced strategies
    segments    the program cut at its critical nodes; its variables; the chain of segments, runs tied
    memory      multipliers per byte, feasible plans, rematerialization
    plans       the chosen strategies as a Plan: instructions, collectives, variables; an independent checker
    microbatch  the step cut into micro-batches
    search      plans and bounds on every candidate mesh; the fastest feasible plan
    warm_start  a nearly equal program: along the path of the earlier search
    stages      the stages of a pipeline; pipeline: their programs

`search.program` reads a module once, `search.search` plans it on every mesh. `planning` compares that plan with a
pipeline, `cache` stores it.
"""

from shardwright.planner.search.search import plan
from shardwright.progress import PlanProgress

__all__ = ["PlanProgress", "plan"]
