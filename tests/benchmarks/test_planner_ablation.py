"""The ablation's searches, without a mechanism or a part, still run, and say what it is worth."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.planner.ablation import to_markdown
from benchmarks.planner.ablation_parts import measure
from benchmarks.planner.mechanisms import AblatedSearch
from benchmarks.planner.results import Results
from benchmarks.planner.suite import Entry
from shardwright.clusters.cluster import Cluster
from shardwright.cost import bytes_with_margin
from shardwright.hlo import parse
from shardwright.options.plan_options import PlanOptions
from shardwright.planner.plans.verify import check_plan
from tests.planner.programs import lower, mlp

LSTM = Entry(model="lstm", size="1024", devices=16)


@pytest.mark.dear
def test_hubs_make_plans_faster() -> None:
    whole, without = measure("gpt2-2", ""), measure("gpt2-2", "hubs")
    assert whole.bound_s <= whole.step_s < without.step_s
    assert without.variables < whole.variables


def test_a_search_without_exact_fits_still_fits() -> None:
    step, arguments, _ = mlp(batch=1024, width=32, hidden=64)
    text, cluster = lower((step, arguments, ())), Cluster.local(4)
    options = PlanOptions(mesh={"data": 4}, remat="none", micro_batches=1)
    free = AblatedSearch("", text, cluster, options)
    limited = replace(options, memory_budget=bytes_with_margin(free.run().memory, free.profile) - 1)
    whole, search = (AblatedSearch(off, text, cluster, limited) for off in ("", "exact fit"))
    exact, plan = whole.run(), search.run()
    assert "exact fit" in whole.spent_s
    assert "exact fit" not in search.spent_s
    assert bytes_with_margin(plan.memory, search.profile) <= search.limit_bytes
    assert plan.cost.lower_bound_s <= plan.cost.step_s
    assert exact.cost.lower_bound_s <= plan.cost.step_s
    check_plan(parse(plan.hlo_text), plan)


@pytest.mark.parametrize("step_s", [None, 2.0])
def test_the_table_says_what_was_not_used_or_found(step_s: float | None) -> None:
    results = Results(path=None, commit=None)
    case = {"case": LSTM.name, "budget": 1.0, "cpu_s": 10.0}
    results.add({**case, "off": "", "step_s": 1.0, "bound_s": 0.99, "is_late": True})
    entries = {"no_plan": "nothing fits"} if step_s is None else {"step_s": step_s, "bound_s": None}
    results.add({**case, "off": "merging", **entries, "cpu_s": 5.0})
    results.add({**case, "off": "branching", "unused": "not needed"})
    said = to_markdown([results.of([LSTM], [1.0], ("", "merging", "branching"))])
    assert "| lstm-1024-16 at 100% | 10.0 s*, 1000.00 ms, 1.0% |" in said
    assert ("× 0.50, no plan" if step_s is None else "× 0.50, × 2.0000, no bound") in said
    assert "not used" in said
