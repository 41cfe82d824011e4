"""Nodes of a real cluster that fail again and again, are too few, or are written into the file while it runs."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import shardwright as sw
from tests.elasticity.clusters import nodes_of, running, snapshot_of, wait_for_nodes
from tests.elasticity.training import assert_close, run, run_on_one_device
from tests.server.raw_client import Server, wait_until

pytestmark = pytest.mark.cluster


def state_of(session: sw.Session, node: int) -> str:
    return next((each.state for each in session.status().nodes if each.node.index == node), "")


def test_a_flapping_node_is_left_out_by_name(tmp_path: Path) -> None:
    with running(tmp_path, [2, 2], "--rejoin-grace", "30", "--node-failures", "2") as cluster:
        session = cluster.connect(snapshot_every=4)

        def disturb(number: int) -> None:
            if number in (5, 9):
                wait_for_nodes(session, 0, 1)
                wait_until(lambda: snapshot_of(session))
                cluster.kill_executor(1)

        assert_close(run(session, 16, after_call=disturb, force="fsdp"), run_on_one_device(16))
        assert nodes_of(session) == [0]
        assert state_of(session, 1) == "left out"
        session.close()
        cluster.servers[0].process.terminate()
        _, log = cluster.servers[0].end()
        assert "node 1 has failed 2 times in a row: it is left out" in log


def test_a_node_that_is_written_into_the_file_joins_and_leaves(tmp_path: Path) -> None:
    with running(tmp_path, [2], "--rejoin-grace", "2") as cluster:
        session = cluster.connect(snapshot_every=4)

        def disturb(number: int) -> None:
            if number == 6:
                cluster.start(cluster.add_entry(2))
                # It waits to join, or is in at once: a session that waits for this for 5 s is quiet.
                wait_until(lambda: state_of(session, 1) in ("joining", "starting", "ready"), 60)
            if number == 12:
                wait_for_nodes(session, 0, 1)
            if number == 18:
                cluster.remove_last_entry()
                wait_until(lambda: not state_of(session, 1), 60)

        assert_close(run(session, 24, after_call=disturb, force="fsdp"), run_on_one_device(24))
        assert nodes_of(session) == [0]
        code, log = cluster.servers.pop(1).end()
        assert code == 1
        assert "no longer in the master's cluster file" in log
        session.close()


def test_a_node_may_come_before_the_master_has_read_of_it(tmp_path: Path) -> None:
    """The new node's file has it; what the master discovers, every five seconds, has it three seconds later."""
    with running(tmp_path, [2]) as cluster:
        cluster.stop()
        described, program = tmp_path / "described.json", tmp_path / "nodes.sh"
        described.write_text(cluster.path.read_text())
        program.write_text(f"#!/bin/sh\ncat {described}\n")
        program.chmod(0o755)
        cluster.servers[0] = Server(str(described), "0", "--discover", str(program))
        session = cluster.connect()
        cluster.start(cluster.add_entry(2))
        time.sleep(3)
        described.write_text(cluster.path.read_text())
        wait_for_nodes(session, 0, 1)
        session.close()


def test_a_node_that_is_about_to_go_away_leaves_without_an_error(tmp_path: Path) -> None:
    with running(tmp_path, [2, 2], "--rejoin-grace", "2") as cluster:
        session = cluster.connect(snapshot_every=4)

        def disturb(number: int) -> None:
            if number == 6:
                cluster.servers[1].process.terminate()
            if number == 14:
                wait_for_nodes(session, 0)

        assert_close(run(session, 20, after_call=disturb, force="fsdp"), run_on_one_device(20))
        code, _ = cluster.servers.pop(1).end(60)
        assert code == 0
        (report,) = session.recoveries
        assert "node 1 leaves" in report.loss
        session.close()


def test_below_the_least_it_waits_and_goes_on(tmp_path: Path) -> None:
    with running(tmp_path, [2, 2], "--rejoin-grace", "1", min_nodes=2) as cluster:
        session = cluster.connect(snapshot_every=4)

        def disturb(number: int) -> None:
            if number == 6:
                wait_until(lambda: snapshot_of(session))
                cluster.kill(1)
                wait_until(lambda: state_of(session, 1) == "lost")
                wait_until(lambda: session.status().state == "degraded")
                cluster.start(1)

        assert_close(run(session, 12, after_call=disturb, force="fsdp"), run_on_one_device(12))
        assert nodes_of(session) == [0, 1]
        session.close()
