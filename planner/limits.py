"""How far a search goes: target gaps, and the sizes from which less is tried."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchLimits:
    """Limits of one search.

    target_gap: optimality gap down to which plans and bounds are improved, relative.
    fine_target_gap: the finer target once a gap had to be closed and message passing takes seconds, relative.
    max_cheap_entries: entries of edges between decisions up to which message passing takes seconds (17 million: 9 s).
    simplicity_tolerance: excess of a simpler plan's step over the fastest one's, at most, relative.
    max_exact_states: states of all variables in the largest program solved exactly under a memory budget.
    max_exact_plans: plans judged there, at most: each row makes the next search longer.
    max_exact_work: plans × states squared there, at most: an integer program takes about the square of its states
        (0.4 s of CPU for 350 of them, 5 s for 1,400), and the plan after a forbidden one is mostly similar, of equal
        size.
    max_branched: branches split, at most.
    large_program_nodes: nodes of a program whose experts' plans are priced beside the search by default, at most.
        Larger programs also skip coarse meshes, unless the plan needs no finer one.
    huge_program_nodes: nodes of a program from which it is compared with no experts.
    min_pipeline_step_s: shorter steps are planned as one program, seconds: a pipeline search takes seconds, and savings
        on so short a step repay them only after thousands of steps.
    huge_device_count: devices, on several nodes, from which one program is planned on one mesh only (nodes × devices of
        a node, unmodified program) before a pipeline search: the whole search takes minutes for a program worth a
        pipeline.
    """

    target_gap: float = 0.01
    fine_target_gap: float = 0.005
    max_cheap_entries: int = 25_000_000
    simplicity_tolerance: float = 0.01
    max_exact_states: int = 3000
    max_exact_plans: int = 40
    max_exact_work: int = 1_000_000
    max_branched: int = 4
    large_program_nodes: int = 2500
    huge_program_nodes: int = 20_000
    min_pipeline_step_s: float = 0.02
    huge_device_count: int = 256
