"""The ablation's searches, put together from the planner's pieces, still run, and say what a part is worth."""

from __future__ import annotations

import pytest

from benchmarks.planner.ablation import measure


@pytest.mark.slow
def test_hubs_make_plans_faster() -> None:
    whole, without = measure("gpt2-2", ""), measure("gpt2-2", "hubs")
    assert whole.bound_s <= whole.step_s < without.step_s
    assert without.variables < whole.variables
