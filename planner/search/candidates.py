"""The plans that a search compared, each with its step, and why it passed over those faster than the chosen one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardwright.planner.constraints.forced import origin
from shardwright.planner.memory.messages import summarize_error
from shardwright.planner.search.experts import expert_candidates
from shardwright.planner.search.tuning import SAME_STEP
from shardwright.plans.plan import Candidate

if TYPE_CHECKING:
    from shardwright.planner.search.solutions import CandidatePlan, SearchResult

_IGNORING_MEMORY = "its fastest plan, memory aside"


def list_candidates(outcome: SearchResult, chosen: CandidatePlan) -> tuple[Candidate, ...]:
    """Every mesh with its fastest plan, or why it has none, and the priced experts' plans."""
    search, chosen_s = outcome.search, chosen.cost.step_s
    name, ignored_memory = origin(search.options), search.clock.is_expired
    share = max(search.simplicity_tolerance, search.min_gain)
    less_simple = f"less simple, and faster by less than {100 * share:g} %"

    def explain(candidate: Candidate, fits: bool) -> Candidate:
        """The candidate, with the reason why it was passed over where it is faster."""
        step_s = candidate.step_s
        if step_s is None or candidate.note or step_s >= chosen_s * (1 - SAME_STEP):
            return candidate
        is_similar = step_s * (1 + share) >= chosen_s * (1 - SAME_STEP)
        return replace(candidate, note=less_simple if fits and is_similar else _IGNORING_MEMORY)

    candidates = {}
    for solution in outcome.solutions:
        step_s = outcome.predict_step_s(solution)
        is_faster = step_s < chosen_s and not ignored_memory
        fits = is_faster and search.fits(outcome.evaluate(solution))
        candidates[solution.mesh] = explain(Candidate(mesh=solution.mesh, step_s=step_s, name=name), fits)
    refused = {
        mesh: Candidate(mesh=mesh, step_s=None, note=summarize_error(error), name=name)
        for mesh, error in outcome.mesh_errors.items()
    }
    experts = [
        explain(candidate, not ignored_memory and (candidate.name, candidate.mesh) not in search.expert_misfits)
        for candidate in expert_candidates(search)
    ]
    is_simpler = any(candidate.note == less_simple for candidate in (*candidates.values(), *experts))
    note = f"the simplest within {100 * share:g} % of the fastest" if is_simpler else ""
    ours = {chosen.mesh: Candidate(mesh=chosen.mesh, step_s=chosen_s, name=name, note=note)}
    searched = {mesh: each for mesh, each in candidates.items() if mesh not in refused} | ours
    return (*searched.values(), *refused.values(), *experts)
