"""Reports of a planner: what they say, and that pacing loses neither the first nor the last."""

from __future__ import annotations

import io
import sys
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright import progress_lines
from shardwright.progress import BestSoFar, PlanProgress, ProgressThrottle, StageTimes
from shardwright.progress_lines import ProgressLines


def report(number: int) -> PlanProgress:
    return PlanProgress(phase="search", detail=str(number))


@given(st.lists(st.floats(0, 0.2), max_size=60))
def test_pacing_keeps_order_the_first_and_the_last(pauses: list[float]) -> None:
    now_s, heard = 0.0, list[tuple[float, int]]()
    paced = ProgressThrottle(
        lambda progress: heard.append((now_s, int(progress.detail))), interval_s=0.05, clock=lambda: now_s
    )
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
    assert str(PlanProgress(phase="parse", elapsed_s=0.25)) == "0 s  parse"
    plan_progress = PlanProgress(phase="search", detail="data=8", incumbent_s=0.002, lower_bound_s=0.003)
    assert plan_progress.gap == 0.0  # a bound over the plan is no less than optimal
    assert PlanProgress(phase="search", incumbent_s=1.0).gap is None


def test_numbers_have_units_that_people_read() -> None:
    said = str(PlanProgress(phase="search", elapsed_s=75.0, incumbent_s=6.314403, lower_bound_s=4.03e-6))
    assert said == "75 s  search  best step 6.31 s  bound 4.03 µs  gap 100.0%"


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10))))
def test_the_best_step_never_rises(figures: list[tuple[float, float]]) -> None:
    heard: list[PlanProgress] = []
    listener = BestSoFar(heard.append)
    for incumbent_s, bound_s in figures:
        listener(PlanProgress(phase="search", incumbent_s=incumbent_s, lower_bound_s=bound_s))
    best = [each.incumbent_s for each in heard if each.incumbent_s]
    assert len(heard) == len(figures)
    assert best == sorted(best, reverse=True)
    assert all(each.lower_bound_s <= each.incumbent_s for each in heard if each.incumbent_s)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_what_takes_long_says_what_goes_on(stream: type[io.StringIO], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_lines, "SHOW_AFTER_S", 0.2)
    monkeypatch.setattr(progress_lines, "EVERY_S", 0.2)
    monkeypatch.setenv("COLUMNS", "60")
    written = stream()
    monkeypatch.setattr(sys, "stderr", written)
    with ProgressLines("train_step", first="preparing for 8 cpu devices") as lines:
        assert written.getvalue() == "train_step: preparing for 8 cpu devices\n"
        lines(PlanProgress(phase="search", detail="[data=8, model=1] " * 5, incumbent_s=0.0123))
        time.sleep(1.3)
    said = written.getvalue()
    assert "train_step: 0 s  search  [data=8, model=1]" in said
    assert "train_step: 1 s  search" in said  # the clock runs without reports
    assert said.rstrip().endswith("a step predicted")
    assert "train_step: ready after 1." in said
    assert "12.3 ms a step predicted" in said
    if stream is Terminal:
        assert all(len(line) <= 60 for line in said.split("\n")[-1].split("\r")), "wraps"


def test_the_last_line_names_the_stages_that_took_long() -> None:
    """In the order in which they come; all that a planner reports counts as planning."""
    clock = iter([0.0, 3.0, 4.5, 6.5, 8.0, 8.01, 28.0, 29.0])
    times = StageTimes(clock=lambda: next(clock))
    for phase in ("trace", "lower", "queue", "search", "emit and compile", "load"):
        times.enter(phase)  # 3.0 s of lowering come before the trace, 0.01 s are of planning's second part
    assert str(times) == "trace 1.50 s, lower 5.00 s, plan 1.51 s, compile 20.0 s, load 1.00 s"


def test_what_ends_soon_says_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressLines("train_step", first="preparing"):
        pass
    assert capsys.readouterr().err == "train_step: preparing\n"
    monkeypatch.setenv("SHARDWRIGHT_PROGRESS", "off")
    with ProgressLines("train_step", first="preparing"):
        pass
    assert capsys.readouterr().err == ""
