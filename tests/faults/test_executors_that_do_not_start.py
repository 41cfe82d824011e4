"""Executors that are killed while they start, on real servers: the next start comes later, or the servers give up."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

import shardwright as sw
from shardwright.cli.app import main
from tests.faults.test_hung_steps import in_thread
from tests.server.raw_client import Server, all_gone, wait_until
from tests.server.test_processes import cluster_file
from tests.two_nodes import Running

pytestmark = pytest.mark.cluster


class Killer:
    """Kills the executors of a node, each once."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._killed: set[int] = set()

    def kill_next(self) -> None:
        """The one that runs, or the next one as soon as it is there."""
        wait_until(self._kill_new, timeout_s=90)

    def _kill_new(self) -> bool:
        new = [process for process in self._server.executors() if process.pid not in self._killed]
        for process in new:
            process.kill()
            self._killed.add(process.pid)
        return bool(new)


def initial() -> dict[str, jax.Array]:
    return {"n": jnp.int32(0), "w": jnp.arange(8, dtype=jnp.float32)}


def count(state: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {"n": state["n"] + 1, "w": state["w"] + 1}


def read_warnings(session: sw.Session, capsys: pytest.CaptureFixture[str]) -> list[str]:
    capsys.readouterr()
    assert main(["logs", session._state.master.address, "--level", "warning"]) == 0
    return capsys.readouterr().out.splitlines()


def test_starts_that_fail_are_tried_again_later_each_time(healed: Running, capsys: pytest.CaptureFixture[str]) -> None:
    servers, session = healed
    step = session.parallelize(count, donate_argnums=0)
    state = step(step(step.init(initial)))
    assert int(state["n"]) == 2
    earlier = read_warnings(session, capsys)
    generation, killer = session.status().nodes[1].generation, Killer(servers[1])
    for _ in range(4):
        killer.kill_next()

    wait_until(lambda: session.status().state == "ready", timeout_s=90)
    assert [server.process.poll() for server in servers] == [None, None]
    assert session.status().nodes[1].generation >= generation + 4
    with pytest.raises(sw.WorkerLostError, match="executor of node 1 was lost") as caught:
        step(state)["n"].block_until_ready()
    assert "run init again" in caught.value.remedy
    state = step(step.init(initial))
    assert int(state["n"]) == 1
    np.testing.assert_array_equal(state["w"], np.arange(8) + 1)

    log = "\n".join(line for line in read_warnings(session, capsys) if line not in earlier)
    for failed, pause_s in ((1, 1), (2, 2), (3, 4)):
        assert f"start {failed} failed; the next one in {pause_s} s" in log
    assert "SIGKILL: somebody killed it, or the kernel did for want of memory" in log


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[Server]]:
    """Two nodes of two devices, right after their start."""
    path = cluster_file(tmp_path)
    with ExitStack() as stack:
        running = [Server(str(path), str(task)) for task in range(2)]
        for server in running:
            stack.callback(server.stop)
        yield running


def test_a_cluster_that_cannot_start_ends_and_leaves_nothing(servers: list[Server], tmp_path: Path) -> None:
    port = json.loads((tmp_path / "cluster.json").read_text())["master"]["port"]
    families: dict[int, psutil.Process] = {}
    killer = Killer(servers[1])
    for number in range(5):
        killer.kill_next()
        families |= {process.pid: process for server in servers for process in server.family()}
        if number == 0:
            waiting, outcome = in_thread(lambda: sw.connect(port))
    ends = [server.end(60) for server in servers]
    assert [code for code, _ in ends] == [75, 75], ends
    assert "shardwright: the executor of node 1 does not start: it ended with SIGKILL" in ends[0][1]
    assert "the log of that node says more" in ends[0][1]
    waiting.join(60)
    assert isinstance(outcome[0], sw.ServerUnavailableError), outcome
    wait_until(lambda: all_gone(list(families.values())))
