"""A worker that does not come back: whoever waits for it is told which one, and what to do; real servers."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import psutil
import pytest

import shardwright as sw
from tests.client.clusters import running_nodes
from tests.faults.test_hung_steps import X, double, in_thread
from tests.server.raw_client import Server, all_gone, wait_until

pytestmark = pytest.mark.cluster

LARGE = np.ones(1 << 20, np.float32)


def test_everybody_is_told_which_node_is_missing(tmp_path: Path) -> None:
    with running_nodes(tmp_path, [1, 1], "--step-wait", "5") as (servers, session):
        address = session._state.master.address
        step, total = session.parallelize(double), session.parallelize(lambda x: x.sum())
        state = step(X)
        np.testing.assert_array_equal(state, 2 * X)
        assert float(total(LARGE)) == LARGE.size
        family, master = servers[1].family(), psutil.Process(servers[0].process.pid)
        master.suspend()  # it hears of the daemon's end and of the executor's at the same time
        servers[1].process.kill()
        servers[1].end()
        wait_until(lambda: all_gone(family))
        master.resume()
        waiting, outcome = in_thread(lambda: sw.connect(address))
        wait_until(lambda: session.status().nodes[1].state == "lost")
        assert session.status().state == "degraded"
        assert "its daemon ended" in session.status().nodes[1].detail

        with pytest.raises(sw.WorkerLostError, match=r"node 1 .* was lost: its daemon ended") as lost:
            np.asarray(step(state))
        assert "start it again with launch_worker.sh, the same cluster file and task number 1" in lost.value.remedy
        with pytest.raises(sw.WorkerLostError, match="node 1 was lost while arrays went to") as lost:
            float(total(LARGE))
        with pytest.raises(sw.DeadlineError, match="not ready within 5 s: node 1 is missing") as late:
            np.asarray(step(X))
        assert "task number 1" in late.value.remedy
        with pytest.raises(sw.DeadlineError, match=r"the load of a program.* node 1 is missing") as late:
            step(step.init(lambda: 3 * jnp.ones(4)))
        assert "task number 1" in late.value.remedy
        waiting.join(90)
        (refusal,) = outcome
        assert isinstance(refusal, sw.ServerUnavailableError)
        assert "node 1 is missing" in refusal.message
        assert "task number 1" in refusal.remedy

        servers[1] = Server(str(tmp_path / "cluster.json"), "1")
        wait_until(lambda: session.status().state == "ready", timeout_s=90)
        np.testing.assert_array_equal(step(step.init(lambda: 3 * jnp.ones(4))), np.full(4, 6))
        with sw.connect(address) as other:
            np.testing.assert_array_equal(other.parallelize(double)(X), 2 * X)
