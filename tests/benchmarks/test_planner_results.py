"""A run of the planner benchmark that is stopped goes on where it was, and its outcomes come together in one table."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.planner.planned import lower, plan  # noqa: E402
from benchmarks.planner.report import summary  # noqa: E402
from benchmarks.planner.results import Results, read_outcomes  # noqa: E402
from benchmarks.planner.run import chosen_budgets  # noqa: E402
from benchmarks.planner.suite import Entry  # noqa: E402
from benchmarks.planner.table import markdown  # noqa: E402

GPT2 = Entry(model="gpt2", size="124M", devices=8)
DLRM = Entry(model="dlrm", size="1M", devices=8)


def outcome(entry, budget, *, ours_s=1.0, expert_s=1.0, fits=True, **changes):
    def figures(step_s):
        return {"judged": {"a100": {"step_s": step_s}}, "wire_bytes": 5e6, "memory_bytes": 2e9}

    return {
        "case": entry.name, "budget": budget, "budget_bytes": 3e9, "machine": "a100", "ours": figures(ours_s),
        "best_expert": "zero1", "expert": figures(expert_s), "fits": fits,
        "planner": {"gap": 0.004, "predicted_memory_bytes": 1.9e9}, **changes,
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
    assert only["ours"]["judged"]["a100"]["step_s"] == 1.0


def test_only_what_fits_counts_as_good():
    refused = {key: value for key, value in outcome(GPT2, 0.25).items() if key not in ("ours", "fits")}
    said = summary([
        outcome(GPT2, 1.0, ours_s=0.9), outcome(GPT2, 0.5, ours_s=0.9, fits=False), outcome(DLRM, 0.5, ours_s=1.005),
        outcome(DLRM, 0.25, ours_s=1.5), {**refused, "error": "PlanRefused: no plan fits"},
    ])  # fmt: skip
    assert "never slower by more than 1% in 2 of 5, faster by more than that in 1, slower in 1." in said
    assert "over the budget by XLA's count in 1; failed or refused 1." in said


def test_a_table_has_a_row_for_each_outcome_in_the_order_of_the_suite():
    failed = {"case": DLRM.name, "budget": 0.25, "best_expert": None, "expert": None, "refused": "PlanRefused: no"}
    wide = {"gap": 0.02, "predicted_memory_bytes": 1.9e9}
    lines = markdown(
        [failed, outcome(GPT2, 0.5, ours_s=0.9, fits=False), outcome(GPT2, 1.0, ours_s=1.1, planner=wide)]
    ).splitlines()
    assert lines[2:5] == [
        "| gpt2-124M-8 | 100% | 5 | zero1 | 5 | **1.100** | **2.00%** | 1.90 / 2.00 / 3.00 |",
        "| gpt2-124M-8 | 50% | 5 | zero1 | 5 | 0.900 | 0.40% | **1.90 / 2.00 / 3.00** |",
        "| dlrm-1M-8 | 25% | refused | none fits |  |  |  |  |",
    ]


def test_memory_is_predicted_for_the_compiler_that_is_named():
    tiny = {"layers": 1, "width": 64, "heads": 4, "context": 16, "vocabulary": 64}
    entry = Entry(model="gpt2", size="124M", devices=8, changes=tiny)
    text = lower(entry).hlo_text
    own, a100, cpu = (plan(text, entry, {"mesh": "8"}, limit_s=300, compiler=name) for name in (None, "a100", "cpu"))
    assert own["predicted_memory_bytes"] == a100["predicted_memory_bytes"] != cpu["predicted_memory_bytes"]
    assert own["predicted_step_s"] == a100["predicted_step_s"] == cpu["predicted_step_s"], "prices stay the machine's"


def test_budgets_are_told_apart_by_whether_an_expert_fits():
    parts = [1.0, 0.5, 0.25]
    assert chosen_budgets(GPT2, parts, with_expert=True) == [1.0]
    assert chosen_budgets(GPT2, parts, with_expert=False) == [0.5, 0.25]
    assert chosen_budgets(GPT2, parts, with_expert=None) == parts
    assert chosen_budgets(DLRM, parts, with_expert=False) == []
