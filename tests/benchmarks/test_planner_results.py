"""A run of the planner benchmark that is stopped goes on where it was, and its outcomes come together in one table."""

from __future__ import annotations

import pytest

from benchmarks.planner.frozen import step_s
from benchmarks.planner.report import format_deviations, summarize
from benchmarks.planner.results import Results, read_outcomes
from benchmarks.planner.run import select_budgets
from benchmarks.planner.suite import Entry
from benchmarks.planner.table import markdown

GPT2 = Entry(model="gpt2", size="124M", devices=8)
DLRM = Entry(model="dlrm", size="1M", devices=8)

PREDICTED = {
    "predicted_memory_bytes": 1.9e9, "predicted_communication_s": 0.4, "predicted_compute_s": 0.5,
    "predicted_collectives": 6,
}  # fmt: skip


def outcome(entry, budget, *, ours_s=1.0, expert_s=1.0, fits=True, **changes):
    def figures(step_s):
        return {
            "product_s": 0.5, "memory_s": 0.125, "communication_s": step_s - 0.625, "memory_bytes": 2e9,
            "collectives": {"all-gather": [3, 4e6], "all-reduce": [1, 1e6]},
        }  # fmt: skip

    return {
        "case": entry.name, "budget": budget, "budget_bytes": 3e9, "machine": "a100", "ours": figures(ours_s),
        "best_expert": "zero1", "expert": figures(expert_s), "fits": fits,
        "planner": {**PREDICTED, "gap": 0.004}, **changes,
    }  # fmt: skip


@pytest.fixture
def path(tmp_path):
    return tmp_path / "out.json"


def test_what_a_run_left_is_taken_over(path):
    Results(path=path, commit="a").add(outcome(GPT2, 0.5))
    again = Results(path=path, commit="a")
    assert again.has(GPT2, 0.5)
    assert not again.has(GPT2, 1.0)
    again.add(outcome(DLRM, 1.0))
    assert [each["case"] for each in read_outcomes([path])] == [GPT2.name, DLRM.name]
    assert [each["case"] for each in again.of([DLRM, GPT2], [1.0, 0.5])] == [DLRM.name, GPT2.name]


@pytest.mark.parametrize(("commit", "how"), [("b", {}), (None, {}), ("a", {"deadline": 9.0})])
def test_other_commits_and_options_run_anew(path, commit, how):
    Results(path=path, commit="a").add(outcome(GPT2, 0.5))
    assert not Results(path=path, commit=commit, how=how).has(GPT2, 0.5)


def test_the_last_file_counts(tmp_path):
    paths = [tmp_path / "1.json", tmp_path / "2.json"]
    for number, path in enumerate(paths):
        Results(path=path, commit="a").add(outcome(GPT2, 0.5, ours_s=float(number)))
    (only,) = read_outcomes(paths)
    assert step_s(only["ours"]) == 1.0


def test_only_what_fits_counts_as_good():
    refused = {key: value for key, value in outcome(GPT2, 0.25).items() if key not in ("ours", "fits")}
    said = summarize([
        outcome(GPT2, 1.0, ours_s=0.9), outcome(GPT2, 0.5, ours_s=0.9, fits=False), outcome(DLRM, 0.5, ours_s=1.005),
        outcome(DLRM, 0.25, ours_s=1.5), {**refused, "error": "PlanRefused: no plan fits"},
    ])  # fmt: skip
    assert "never slower by more than 1% in 2 of 5, faster by more than that in 1, slower in 1." in said
    assert "over the budget by XLA's count in 1; failed or refused 1." in said


def test_a_table_has_a_row_for_each_outcome_in_the_order_of_the_suite():
    failed = {"case": DLRM.name, "budget": 0.25, "best_expert": None, "expert": None, "refused": "PlanRefused: no"}
    wide = {**PREDICTED, "gap": 0.02}
    lines = markdown(
        [failed, outcome(GPT2, 0.5, ours_s=0.9, fits=False), outcome(GPT2, 1.0, ours_s=1.1, planner=wide)]
    ).splitlines()
    assert lines[2:5] == [
        (
            "| gpt2-124M-8 | 100% | 1100.00 = 475.00 + 125.00 + 500.00 | 4 | 400.00 + 500.00; 6 | zero1 | "
            "1000.00 = 375.00 + 125.00 + 500.00 | 4 | **1.100** | **2.00%** | 1.90 / 2.00 / 3.00 |"
        ),
        (
            "| gpt2-124M-8 | 50% | 900.00 = 275.00 + 125.00 + 500.00 | 4 | 400.00 + 500.00; 6 | zero1 | "
            "1000.00 = 375.00 + 125.00 + 500.00 | 4 | 0.900 | 0.40% | **1.90 / 2.00 / 3.00** |"
        ),
        "| dlrm-1M-8 | 25% | refused |  |  | none fits |  |  |  |  |  |",
    ]


def test_predicted_figures_are_held_against_compiled_ones():
    """Communication 0.4 s against 0.475 and 0.275, compute 0.5 against 0.625, six collectives against four."""
    said = format_deviations([outcome(GPT2, 1.0, ours_s=1.1), outcome(GPT2, 0.5, ours_s=0.9)])
    assert "communication off by 30.6% in the median, 45.5% at worst" in said
    assert "compute off by 20.0% in the median" in said
    assert "collectives off by 50.0%" in said


def test_budgets_are_told_apart_by_whether_an_expert_fits():
    parts = [1.0, 0.5, 0.25]
    assert select_budgets(GPT2, parts, with_expert=True) == [1.0]
    assert select_budgets(GPT2, parts, with_expert=False) == [0.5, 0.25]
    assert select_budgets(GPT2, parts, with_expert=None) == parts
    assert select_budgets(DLRM, parts, with_expert=False) == []
