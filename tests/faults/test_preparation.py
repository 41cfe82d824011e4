"""Calls that are being planned, compiled or loaded: given up by their client, or while the executor is killed."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import jax
import numpy as np
import psutil
import pytest

import shardwright as sw
from shardwright.progress import PlanProgress
from tests.client.clusters import start_nodes
from tests.faults.test_hung_steps import X, in_thread
from tests.server.raw_client import ROOT, Server, all_gone, wait_until

pytestmark = pytest.mark.cluster

_numbers = itertools.count(2)


def new_function() -> tuple[Callable[[jax.Array], jax.Array], float]:
    """A function that no server has seen, and what it makes of 1."""
    factor = float(next(_numbers))
    return lambda x: x * factor, factor


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, sw.Session]]:
    (server,), session = start_nodes(tmp_path_factory.mktemp("preparation"), [1])
    yield server, session
    session._state.close_quietly()
    server.stop()


@pytest.fixture
def session(cluster: tuple[Server, sw.Session]) -> Iterator[sw.Session]:
    session = sw.connect(cluster[1]._state.master.address)
    yield session
    session._state.close_quietly()


def only_child(server: Server, session: sw.Session, kind: str) -> psutil.Process:
    """The planner or compiler that the next call goes to: it is warm, and now it is frozen."""
    function, factor = new_function()
    np.testing.assert_array_equal(session.parallelize(function)(X), factor * X)
    (child,) = server.compilers() if kind == "compiler" else server.planners()
    child.suspend()
    return child


def under_way(session: sw.Session, kind: str) -> int:
    """Calls that planners or compilers have begun with."""
    status = session.status()
    return (status.compiling if kind == "compiler" else status.planning).running


def test_ctrl_c_while_a_program_is_planned(cluster: tuple[Server, sw.Session]) -> None:
    server, session = cluster
    planner = only_child(server, session, "planner")
    script = (
        "import sys, numpy as np, shardwright as sw\n"
        "session = sw.connect(sys.argv[1])\n"
        "print('plans', flush=True)\n"
        "try:\n    session.parallelize(lambda x: x * 1.5)(np.ones(4, np.float32))\n"
        "except KeyboardInterrupt:\n    print('interrupted', flush=True)\n"
        "print(float(session.parallelize(lambda x: x * 2.5)(np.ones(4, np.float32))[0]), flush=True)\n"
    )
    client = subprocess.Popen(
        [sys.executable, "-c", script, session._state.master.address],
        stdout=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ,
    )  # fmt: skip
    assert client.stdout is not None
    assert client.stdout.readline() == "plans\n"
    wait_until(lambda: under_way(session, "planner") == 1, timeout_s=60)
    client.send_signal(signal.SIGINT)
    assert client.stdout.readline() == "interrupted\n"
    wait_until(lambda: all_gone([planner]), timeout_s=60)
    assert client.stdout.readline() == "2.5\n", "its session goes on"
    assert client.wait(30) == 0


def test_a_plan_that_was_left_unfinished_is_its_sessions_alone(session: sw.Session) -> None:
    reports: list[PlanProgress] = []

    def stop(report: PlanProgress) -> None:
        reports.append(report)
        if len(reports) == 1:
            signal.raise_signal(signal.SIGINT)

    def function(x: jax.Array) -> jax.Array:
        return (x * 1.25).sum()

    with pytest.raises(KeyboardInterrupt, match="the next call runs"):
        session.parallelize(function, progress=stop)(X)
    heard = len(reports)
    with sw.connect(session._state.master.address) as other:
        other.parallelize(function, progress=reports.append)(X)
    assert "parse" in {report.phase for report in reports[heard:]}, "it is planned anew"


@pytest.mark.parametrize("kind", ["planner", "compiler"])
@pytest.mark.parametrize("how", ["cancel", "close"])
def test_a_call_that_is_given_up_ends_its_child(
    cluster: tuple[Server, sw.Session], session: sw.Session, kind: str, how: str
) -> None:
    server, other = cluster
    child = only_child(server, other, kind)
    function, _ = new_function()
    step = session.parallelize(function)
    waiting, outcome = in_thread(lambda: np.asarray(step(X)))
    wait_until(lambda: under_way(other, kind) == 1, timeout_s=60)
    assert not outcome
    if how == "cancel":
        assert step.cancel() == 1
    else:
        session.close()
    waiting.join(60)
    assert isinstance(outcome[0], sw.StepCancelledError if how == "cancel" else sw.SessionError), outcome
    wait_until(lambda: all_gone([child]), timeout_s=60)
    function, factor = new_function()
    np.testing.assert_array_equal(other.parallelize(function)(X), factor * X)
    if how == "cancel":
        assert step.cancel() == 0
        assert np.asarray(step(X)).shape == X.shape, "the same call again works"


@pytest.mark.parametrize("moment", ["compiled", "loaded"])
def test_an_executor_that_dies_while_a_program_is_prepared(
    cluster: tuple[Server, sw.Session], session: sw.Session, caplog: pytest.LogCaptureFixture, moment: str
) -> None:
    """The caller hears nothing of it: the program goes to the executor that follows."""
    server, other = cluster
    compiler = only_child(server, other, "compiler")
    (executor,), (node,) = server.executors(), session.status().nodes
    function, factor = new_function()
    step = session.parallelize(function)
    with caplog.at_level(logging.INFO, logger="shardwright"):
        waiting, outcome = in_thread(lambda: np.asarray(step(X)))
        wait_until(lambda: under_way(session, "compiler") == 1, timeout_s=60)
        if moment == "loaded":
            executor.suspend()
            compiler.resume()
            wait_until(lambda: ": load (" in caplog.text, timeout_s=60)
            assert not outcome
        executor.kill()
        wait_until(lambda: all_gone([executor]))
        compiler.resume()
        waiting.join(90)
    np.testing.assert_array_equal(outcome[0], factor * X)
    assert session.status().nodes[0].generation == node.generation + 1
    np.testing.assert_array_equal(step(2 * X), 2 * factor * X)
