"""`parallelize(progress=…)`: the user's callback hears how planning goes, and may end it."""

from __future__ import annotations

import signal
import threading

import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.progress import PlanProgress


def test_a_callback_hears_of_the_preparation_once(session: sw.Session) -> None:
    seen: list[PlanProgress] = []
    step = session.parallelize(lambda x: jnp.tanh(x) @ x.T, progress=seen.append)
    step.compile(np.ones((16, 8), np.float32))
    assert [type(report) for report in seen] == [PlanProgress] * len(seen)
    planning = [report for report in seen if report.phase not in ("emit and compile", "load")]
    assert planning[-1].incumbent_s == pytest.approx(step.plan.cost.step_s)
    assert {report.phase for report in seen[len(planning) :]} == {"emit and compile", "load"}
    assert [report.elapsed_s for report in seen] == sorted(report.elapsed_s for report in seen)
    heard = len(seen)
    step(np.ones((16, 8), np.float32))
    assert len(seen) == heard  # planned already


def test_a_callback_that_raises_ends_the_planning_and_the_session_goes_on(session: sw.Session) -> None:
    def stop(report: PlanProgress) -> None:
        raise RuntimeError(f"enough at {report.phase}")

    step = session.parallelize(lambda x: jnp.cos(x).sum(), progress=stop)
    with pytest.raises(RuntimeError, match="enough at"):
        step(np.ones(8, np.float32))
    other = session.parallelize(lambda x: jnp.cos(x).sum())
    assert np.asarray(other(np.zeros(8, np.float32))) == 8


def test_ctrl_c_keeps_the_best_plan_for_the_next_call(session: sw.Session, caplog: pytest.LogCaptureFixture) -> None:
    reports: list[PlanProgress] = []

    def stop(report: PlanProgress) -> None:
        reports.append(report)
        if len(reports) == 1:
            signal.raise_signal(signal.SIGINT)

    step = session.parallelize(lambda x: jnp.tanh(jnp.tanh(x) @ x.T).sum(), progress=stop)
    with pytest.raises(KeyboardInterrupt, match="the next call runs the best plan so far") as caught:
        step(np.zeros((16, 8), np.float32))
    assert len(caught.traceback) == 2, "the caller's line, and the step's: no way down through the client"
    heard = len(reports)
    assert np.asarray(step(np.zeros((16, 8), np.float32))) == 0
    assert "until planning was interrupted" in caplog.text
    assert {report.phase for report in reports[heard:]} <= {"emit and compile", "load"}, "it is not planned again"


def test_a_second_ctrl_c_leaves_at_once(session: sw.Session) -> None:
    def stop(report: PlanProgress) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    step = session.parallelize(lambda x: jnp.tanh(jnp.tanh(x) * 7).sum(), progress=stop)
    with pytest.raises(KeyboardInterrupt):
        step(np.zeros(8, np.float32))
    other = session.parallelize(lambda x: jnp.tanh(jnp.tanh(x) * 7).sum())
    assert np.asarray(other(np.zeros(8, np.float32))) == 0


@pytest.mark.parametrize("way", ["call", "compile"])
def test_an_error_after_tracing_ends_the_lines(session: sw.Session, way: str) -> None:
    (handle,) = session.parallelize(lambda x: (x + 1,))(np.zeros(8, np.float32))

    def shift(x: jnp.ndarray) -> jnp.ndarray:
        shifted = x + jnp.asarray(handle)
        handle.delete()
        return shifted

    step = session.parallelize(shift)
    with pytest.raises(sw.ArrayError, match="closes over"):
        (step if way == "call" else step.compile)(np.ones(8, np.float32))
    assert "progress" not in {thread.name for thread in threading.enumerate()}
