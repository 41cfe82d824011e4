"""Reports of a planner: what they say, and that pacing loses neither the first nor the last."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from shardwright.progress import PlanProgress, ProgressThrottle


def report(number: int) -> PlanProgress:
    return PlanProgress(phase="search", detail=str(number))


@given(st.lists(st.floats(0, 0.2), max_size=60))
def test_pacing_keeps_order_the_first_and_the_last(pauses: list[float]) -> None:
    now_s, heard = 0.0, list[tuple[float, int]]()
    paced = ProgressThrottle(lambda seen: heard.append((now_s, int(seen.detail))), interval_s=0.05, clock=lambda: now_s)
    for number, pause_s in enumerate(pauses):
        now_s += pause_s
        paced(report(number))
    while_working = list(heard)
    paced.flush()
    paced.flush()
    numbers = [number for _, number in heard]
    assert numbers == sorted(set(numbers))
    assert numbers[:1] == [0][: len(pauses)]
    assert numbers[-1:] == [len(pauses) - 1][: len(pauses)]
    assert all(later - earlier >= 0.05 for (earlier, _), (later, _) in pairwise(while_working))


def test_a_report_in_words() -> None:
    assert str(PlanProgress(phase="parse", elapsed_s=0.25)) == "0.2 s  parse"
    plan_progress = PlanProgress(phase="search", detail="data=8", incumbent_s=0.002, lower_bound_s=0.003)
    assert plan_progress.gap == 0.0  # a bound over the plan is no less than optimal
    assert PlanProgress(phase="search", incumbent_s=1.0).gap is None
