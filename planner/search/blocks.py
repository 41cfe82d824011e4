"""Plans mixtures of experts in blocks beside the plain form, and takes the fastest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from shardwright.errors import MemoryBudgetError, PlanError
from shardwright.planner.mixtures import Blocks, describe_choice
from shardwright.plans.plan import Plan

if TYPE_CHECKING:
    from shardwright.planner.search.search import Search


def choose_blocks(plain: Search, forms: Sequence[Blocks]) -> Plan:
    """The plan of the shortest step, of the program as it is and with its mixtures in the blocks of `forms`.

    Raises what the search of the plain form raises, when no form fits the memory.
    """
    steps: dict[Blocks | None, float | str] = {}
    best: tuple[Blocks | None, Plan] | None = None
    refusal: MemoryBudgetError | None = None
    for blocks in (None, *forms):
        if best is not None and plain.clock.is_expired:
            steps[blocks] = f"not planned, {plain.clock.end} came before"
            continue
        try:
            plan = (plain if blocks is None else plain.with_blocks(blocks)).run_and_clear()
        except MemoryBudgetError as error:
            refusal = refusal or error
            steps[blocks] = "does not fit the memory"
            continue
        except PlanError as error:
            if blocks is None:
                raise
            steps[blocks] = error.message
            continue
        steps[blocks] = plan.cost.step_s
        if best is None or plan.cost.step_s < best[1].cost.step_s:
            best = blocks, plan
    if best is None:
        assert refusal is not None
        raise refusal
    taken, plan = best
    return replace(plan, notes=(describe_choice(taken, steps), *plan.notes))
