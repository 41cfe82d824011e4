"""The two nodes that tests share are as new after whatever a test did to them, or others are started."""

from __future__ import annotations

import socket
from collections.abc import Callable

import numpy as np
import psutil
import pytest

import tests.two_nodes
from tests.server.raw_client import RawClient
from tests.two_nodes import TwoNodes

pytestmark = pytest.mark.cluster


def leave_a_session(nodes: TwoNodes) -> None:
    RawClient(nodes.address).open()


def freeze_everything(nodes: TwoNodes) -> None:
    for server in nodes.servers:
        for process in server.family():
            process.suspend()


def kill_an_executor(nodes: TwoNodes) -> None:
    nodes.servers[0].executors()[0].kill()


def kill_a_daemon(nodes: TwoNodes) -> None:
    nodes.servers[1].process.kill()


def kill_the_master(nodes: TwoNodes) -> None:
    nodes.servers[0].process.kill()


@pytest.mark.parametrize(
    "damage", [leave_a_session, freeze_everything, kill_an_executor, kill_a_daemon, kill_the_master]
)
def test_what_a_test_leaves_is_mended(two_nodes: TwoNodes, damage: Callable[[TwoNodes], None]) -> None:
    two_nodes.heal()
    address = two_nodes.address
    damage(two_nodes)
    two_nodes.heal()
    assert two_nodes.address == address, "the same cluster"
    assert_as_new(two_nodes)


def assert_as_new(nodes: TwoNodes) -> None:
    status = nodes.status()
    assert not status.sessions
    assert [node.executor_pid for node in status.nodes] == [server.executors()[0].pid for server in nodes.servers]
    assert all(process.status() != psutil.STATUS_STOPPED for server in nodes.servers for process in server.family())
    with nodes.connect() as session:
        step = session.parallelize(lambda x: x * 2, force={"x": {0: "data"}})
        np.testing.assert_array_equal(step(np.ones(8, np.float32)), np.full(8, 2))


def test_where_nothing_helps_others_are_started(two_nodes: TwoNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    two_nodes.heal()
    address = two_nodes.address
    monkeypatch.setattr(tests.two_nodes, "HEAL_S", 5.0)
    two_nodes.servers[0].process.kill()
    two_nodes.servers[0].end()
    host, _, port = address.rpartition(":")
    with socket.create_server((host, int(port))):
        with pytest.warns(UserWarning, match="another cluster is started: not as new within 5 s: the daemon of node 0"):
            two_nodes.heal()
        assert two_nodes.address != address
        assert_as_new(two_nodes)
