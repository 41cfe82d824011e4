"""Processes that freeze (SIGSTOP), on a real cluster of two nodes."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

import shardwright as sw
from shardwright.cli.app import main
from tests.faults.test_hung_steps import X, double, in_thread
from tests.server.raw_client import wait_until
from tests.two_nodes import Running

pytestmark = pytest.mark.cluster


def test_a_frozen_daemon_does_not_cost_its_executors_arrays(healed: Running) -> None:
    servers, session = healed
    step = session.parallelize(double)
    state = step(X)
    np.testing.assert_array_equal(state, 2 * X)
    generation = session.status().nodes[1].generation
    daemon = psutil.Process(servers[1].process.pid)
    daemon.suspend()
    began_s = time.monotonic()
    wait_until(lambda: session.status().state == "degraded", timeout_s=20)
    assert time.monotonic() - began_s < 20
    assert "its daemon has been silent" in session.status().nodes[1].detail
    until_s = time.monotonic() + 48  # longer than its connection lives without an answer
    while time.monotonic() < until_s:
        state = step(state)
        np.asarray(state)
        time.sleep(0.5)
    daemon.resume()
    wait_until(lambda: session.status().state == "ready", timeout_s=20)
    np.asarray(step(state))
    assert session.status().nodes[1].generation == generation
    servers[1].executors()[0].kill()
    wait_until(lambda: session.status().nodes[1].generation > generation)
    wait_until(lambda: session.status().state == "ready")


def test_a_frozen_executor_is_replaced(healed: Running) -> None:
    servers, session = healed
    step = session.parallelize(double)
    state = step(X)
    np.testing.assert_array_equal(state, 2 * X)
    servers[1].executors()[0].suspend()
    began_s = time.monotonic()
    wait_until(lambda: session.status().state != "ready", timeout_s=20)
    with pytest.raises(sw.WorkerLostError, match=r"the executor of node 1 was lost: process \d+ has been silent"):
        np.asarray(step(state))
    assert time.monotonic() - began_s < 20
    np.testing.assert_array_equal(session.parallelize(double)(X), 2 * X)


def count(state: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """One more step, all over the devices."""
    return {"n": state["n"] + 1, "w": state["w"] + 1}


@pytest.mark.parametrize(("who", "frozen_s"), [("master", 7.0), ("executor", 2.5)])
def test_who_goes_on_in_time_has_lost_nothing(
    healed: Running, capsys: pytest.CaptureFixture[str], who: str, frozen_s: float
) -> None:
    """A master may stand still for longer than it lets the others be silent: it blames nobody for its own absence."""
    servers, session = healed
    wait_until(lambda: session.status().state == "ready", timeout_s=60)

    def blames() -> int:
        assert main(["logs", session._state.master.address]) == 0
        log = capsys.readouterr().out
        return log.count("silent") + log.count("lost")

    step = session.parallelize(count, donate_argnums=0)
    state = step(step.init(lambda: {"n": jnp.int32(0), "w": jnp.zeros(8)}))
    assert int(state["n"]) == 1
    nodes, blamed = session.status().nodes, blames()
    frozen = psutil.Process(servers[0].process.pid) if who == "master" else servers[1].executors()[0]

    def train(state: dict[str, jax.Array]) -> tuple[int, list[float]]:
        for _ in range(50):
            state = step(state)
        return int(state["n"]), np.asarray(state["w"]).tolist()

    frozen.suspend()
    waiting, outcome = in_thread(lambda: train(state))
    time.sleep(frozen_s)
    assert not outcome
    frozen.resume()
    waiting.join(90)
    assert outcome == [(51, [51.0] * 8)]
    time.sleep(1.0)  # the master has looked at everybody again
    wait_until(lambda: session.status().state == "ready")
    assert [(n.generation, n.executor_pid, n.detail) for n in session.status().nodes] == [
        (n.generation, n.executor_pid, "") for n in nodes
    ]
    assert blames() == blamed
