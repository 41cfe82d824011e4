"""Ctrl-C while planning: the best plan so far, and a second one that leaves."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

import shardwright as sw
from shardwright import cli
from shardwright.clusters.cluster import Cluster
from shardwright.interrupts import first_interrupt
from shardwright.offline import plan_until_interrupted
from shardwright.options.plan_options import PlanOptions
from shardwright.planner.cache.plan_cache import plan_with_cache
from shardwright.planner.cache.store import default_store
from shardwright.planner.clock import Clock, Interruption
from shardwright.planner.search.search import Search
from shardwright.progress import PlanProgress
from tests.planner.programs import lower, mlp

CLUSTER = Cluster.local(8)
STEP = lower(mlp())


def interrupt(report: PlanProgress) -> None:
    """As soon as the planner tells of anything; a second one never comes."""
    if not interrupt.came:  # type: ignore[attr-defined]
        interrupt.came = True  # type: ignore[attr-defined]
        signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def _anew() -> None:
    interrupt.came = False  # type: ignore[attr-defined]


def test_the_first_ctrl_c_is_a_wish_and_the_second_one_an_order() -> None:
    wishes: list[int] = []
    with first_interrupt(lambda: wishes.append(1)) as caught:
        signal.raise_signal(signal.SIGINT)
        assert (wishes, caught.came) == ([1], True)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert wishes == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_program_with_its_own_way_keeps_it() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with first_interrupt(lambda: seen.append(-1)):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.SIGINT]


def test_a_search_that_is_interrupted_has_a_plan_that_is_not_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path))
    store, wish = default_store("plans"), Interruption()
    reports: list[PlanProgress] = []

    def stop(report: PlanProgress) -> None:
        reports.append(report)
        wish.begin()

    clock = Clock(interruption=wish)
    early = plan_with_cache(STEP, CLUSTER, PlanOptions(), store=store, progress=stop, clock=clock)
    whole = plan_with_cache(STEP, CLUSTER, PlanOptions(), store=store)
    assert early.cost.step_s >= whole.cost.step_s
    assert not any(report.phase == "cache" for report in reports)
    plan_with_cache(STEP, CLUSTER, PlanOptions(), store=store, progress=reports.append)
    assert reports[-1].phase == "cache", "the whole search's plan is"


def test_a_search_without_a_plan_makes_one_after_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large program, whose search makes no plan ahead."""
    monkeypatch.setattr(Search, "is_large", property(lambda self: True))
    wish = Interruption()
    clock = Clock(interruption=wish)

    def stop(report: PlanProgress) -> None:
        if wish.at_s is None and report.phase == "search":
            wish.begin()
            wish.at_s = clock._start_s  # long ago: its grace is over, too

    plan = plan_with_cache(STEP, CLUSTER, PlanOptions(), store=None, progress=stop, clock=clock)
    assert plan.cost.step_s > 0


def test_the_plan_of_an_interrupted_call_is_the_answer_to_the_next_one(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(KeyboardInterrupt, match="the same call again"):
        sw.plan(STEP, 8, cache=False, progress=interrupt)
    assert "Ctrl-C once more leaves" in caplog.text
    told: list[PlanProgress] = []
    plan = sw.plan(STEP, 8, cache=False, progress=told.append)
    assert not told
    assert "until planning was interrupted" in caplog.text
    assert plan.cost.step_s > 0
    sw.plan(STEP, 8, cache=False, progress=told.append, mode="propagate")
    assert told, "other options, another plan"


def test_the_command_writes_what_it_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program, out = tmp_path / "step.hlo", tmp_path / "plan.json"
    program.write_text(STEP)

    def interrupt_planning() -> None:
        while signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt_planning, daemon=True).start()
    assert cli.main(["plan", str(program), "--cluster", "8", "--no-cache", "--out", str(out)]) == 130
    assert "instructions" in json.loads(out.read_text())
    assert "interrupted: this is the best plan that was found until then" in capsys.readouterr().err


def test_of_several_ways_the_one_that_was_planned_is_taken() -> None:
    plan, was_interrupted = plan_until_interrupted(
        STEP, CLUSTER, PlanOptions(), sw.strategies.Auto(), cache=False, progress=interrupt
    )
    assert was_interrupted
    assert plan.cost.step_s > 0


def test_before_there_is_a_plan_it_is_an_interrupt_and_no_error_of_planning() -> None:
    def twice(report: PlanProgress) -> None:
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        sw.plan(STEP, 8, cache=False, progress=twice)
