"""What the master counts: rates, histograms, and how work ends."""

from __future__ import annotations

import asyncio

import pytest

import shardwright as sw
from shardwright.server.master.statistics import Histogram, Rate, Statistics, Work


def test_a_rate_is_that_of_the_last_seconds() -> None:
    rate = Rate(since_s=100.0)
    for number in range(10):
        rate.add(100.0 + number / 5)
    assert rate.per_s(102.0) == pytest.approx(5, rel=0.15), "so soon it is the mean"
    for number in range(10, 500):
        rate.add(100.0 + number / 5)
    assert rate.per_s(200.0) == pytest.approx(5, rel=0.02)
    assert rate.per_s(210.0) == pytest.approx(5 / 2.718, rel=0.02)
    assert rate.per_s(400.0) < 1e-6


def test_a_histogram_counts_as_prometheus_does() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 7.0):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1], "a bound is in its bucket"
    assert histogram.sum == 12.0


def test_work_ends_in_one_of_three_ways() -> None:
    work = Work()
    with work.timed():
        pass
    with pytest.raises(sw.PlanError), work.timed():
        raise sw.PlanError("no")
    with pytest.raises(asyncio.CancelledError), work.timed():
        raise asyncio.CancelledError
    assert work.results == {"succeeded": 1, "failed": 1, "cancelled": 1}
    assert sum(work.seconds.counts) == 1


def test_steps_are_counted_by_kind_and_end() -> None:
    statistics = Statistics(now_s=5.0)
    statistics.step_ended("a", "step", None, 0.02)
    statistics.step_ended("a", "save", None, 9.0)
    statistics.step_ended("a", "step", sw.StepCancelledError("it was"), 0.0)
    statistics.session_ended("a", ["step", "move"])
    assert statistics.steps == {
        ("step", "succeeded"): 1, ("save", "succeeded"): 1, ("step", "cancelled"): 2, ("move", "cancelled"): 1,
    }  # fmt: skip
    assert statistics.step_s.sum == 0.02
    assert statistics.rates == {}
