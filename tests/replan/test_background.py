"""`background=True`: the first plan runs at once, a better one is taken over while the step runs, and measured."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import shardwright as sw
from shardwright.client.step_result import StepResult
from shardwright.client.step_times import StepTimes
from shardwright.progress import PlanProgress
from tests.replan.training import Run, batch, train

ENDS = {"kept", "went back", "no better plan", "search ended"}
LIMIT_S = 240.0


def kinds(step: Any) -> list[str]:
    return [change.kind for change in step.plan_changes]


def go_until(run: Run, events: set[str]) -> None:
    """Trains until one of these has happened."""
    end_s = time.monotonic() + LIMIT_S
    while not events & set(kinds(run.step)):
        assert time.monotonic() < end_s, kinds(run.step)
        run.go()


def descendants(of: int) -> Iterator[tuple[int, bytes]]:
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    waiting = [of]
    while waiting:
        parent = waiting.pop()
        for child in [pid for pid, above in parents.items() if above == parent]:
            waiting.append(child)
            try:
                yield child, Path(f"/proc/{child}/cmdline").read_bytes()
            except OSError:
                continue


@pytest.mark.dear
def test_a_better_plan_is_taken_over_and_measured(session: sw.Session) -> None:
    told: list[PlanProgress] = []
    caller = threading.get_ident()

    def listen(report: PlanProgress) -> None:
        assert threading.get_ident() == caller, "the listener is called in the caller's thread"
        if report.phase == "background":
            told.append(report)

    step = session.parallelize(train, donate_argnums=0, background=True, progress=listen)
    run = Run(step)
    run.go()
    assert kinds(step)[0] == "first plan"
    assert "the first plan that fits" in step.plan.notes[-1]
    go_until(run, ENDS)
    run.go(3)
    run.check_state()

    first, better, switched, end = step.plan_changes
    assert [first.kind, better.kind, switched.kind] == ["first plan", "better plan", "switched"]
    assert better.gain > 0.03
    assert better.predicted_s < 0.97 * first.predicted_s
    assert end.kind == ("kept" if end.after_s < end.before_s else "went back")
    assert switched.calls < end.calls
    assert [report.detail for report in told] == [str(change) for change in step.plan_changes]
    assert str(end) in step.report

    if end.kind == "kept":
        without = sw.plan(step.lower(run.params, *batch(0)).as_text(), 8, cache=False)
        assert replace(step.plan, planning_s=0.0).cost == replace(without, planning_s=0.0).cost


@pytest.mark.dear
def test_a_plan_that_is_slower_by_measurement_goes() -> None:
    """Its steps are slowed down by stopping the process that runs them."""
    with sw.connect(devices=8) as session:
        server = session._state.server
        assert server is not None
        step = session.parallelize(train, donate_argnums=0, background=True)
        run = Run(step)
        run.go()
        assert step.wait_for_plans(LIMIT_S)
        go_until(run, {"switched", "no better plan"})
        assert kinds(step)[-1] == "switched"
        better = step.plan
        executors = [pid for pid, command in descendants(os.getpid()) if b"worker.executor" in command]
        assert executors
        while not ENDS & set(kinds(step)):
            for pid in executors:
                os.kill(pid, signal.SIGSTOP)
            wake = threading.Timer(0.4, lambda: [os.kill(pid, signal.SIGCONT) for pid in executors])
            wake.start()
            run.go()
            wake.join()
        assert kinds(step) == ["first plan", "better plan", "switched", "went back"]
        end = step.plan_changes[-1]
        assert end.after_s > end.before_s
        assert step.plan is not better
        run.go(3)
        run.check_state()


@pytest.mark.dear
@pytest.mark.parametrize("how", ["cancel", "drop", "replan"])
def test_the_search_ends_with_its_step(how: str) -> None:
    with sw.connect(devices=8) as session:
        step = session.parallelize(train, donate_argnums=0, background=True, effort="best")
        run = Run(step)
        run.go()
        if how == "cancel":
            step.cancel()
        elif how == "replan":
            step.replan(force="fsdp")
            assert kinds(step)[-1] == "replanned"
        seen = kinds(step)
        if how == "drop":
            del run.step
            del step
        else:
            run.go(2)
            assert kinds(step) == seen
        assert _no_planner_within(20.0)


def _no_planner_within(seconds: float) -> bool:
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        niced = [pid for pid, command in descendants(os.getpid()) if b"planner_child" in command]
        if not any(os.getpriority(os.PRIO_PROCESS, pid) == 19 for pid in niced):
            return True
        time.sleep(0.2)
    return False


def _done(number: int, took_s: float, begun_s: float) -> StepResult:
    result = StepResult(number, "step")
    result.finish(None)
    result.finished_s = begun_s + took_s
    return result


def test_steps_that_are_sent_ahead_are_measured_from_answer_to_answer() -> None:
    times = StepTimes(3, skipped=1)
    for number, end_s in enumerate((10.0, 11.0, 12.5, 13.5), 1):  # the first one compiles
        assert times.median_s() is None
        times.add(_done(number, end_s, 0.0), sent_s=0.0)
    assert times.median_s() == 1.0


def test_what_the_caller_does_between_steps_is_not_measured() -> None:
    times = StepTimes(2)
    times.add(_done(1, 1.0, 0.0), sent_s=0.0)
    times.add(_done(2, 2.0, 100.0), sent_s=100.0)
    assert times.median_s() == 1.5


def test_plans_made_here_have_no_background() -> None:
    with pytest.raises(sw.OptionError, match="not improved while it runs"):
        sw.plan("", 8, background=True)
    with pytest.raises(sw.OptionError, match="background is 'yes'"):
        sw.plan("", 8, background="yes")  # type: ignore[arg-type]
