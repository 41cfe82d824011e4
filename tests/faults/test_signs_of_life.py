"""Daemons and executors that freeze, or lose a connection: who is missed, and what that costs; no network."""

from __future__ import annotations

from shardwright.errors import WorkerLostError
from shardwright.server.master import commands as do
from shardwright.server.master import events as ev
from shardwright.server.master import node_reports, watchdog
from tests.server.simulation import World, ready_world


def restarted(world: World) -> bool:
    return world.state.formation.phase != "ready" or world.state.formation.generation > 1


def test_a_silent_executor_is_replaced_within_twenty_seconds() -> None:
    world = ready_world()
    world.step(1, (1, 2), (3, 4))
    world.passes(6, silent={1})
    assert watchdog.summarize(world.state) == "stalled"
    assert "process 1001, has been silent for" in node_reports.detail_of(world.state.formation, 1)
    assert not restarted(world)
    world.passes(10, silent={1})
    assert {stop.connection for stop in world.take(do.StopExecutor)} == {10, 11}
    (reply,) = world.take(do.ReplyStep)
    assert isinstance(reply.error, WorkerLostError)
    assert "the executor of node 1 was lost: process 1001 has been silent for 16 s" in str(reply.error)


def test_a_silent_daemon_costs_nothing_while_its_executor_is_heard() -> None:
    world = ready_world()
    world.passes(16, silent_daemons={1})
    (warning,) = [log.text for log in world.take(do.Log) if log.is_warning]
    assert "node 1: its daemon has been silent for" in warning
    assert "its executor goes on" in warning
    assert watchdog.summarize(world.state) == "degraded"
    assert node_reports.node_state(world.state.formation, 1) == "ready"
    world.passes(60, silent_daemons={1})
    world.step(1, (1, 2), (3, 4))
    world.all_done()
    assert [reply.error for reply in world.take(do.ReplyStep)] == [None]
    world.passes(1)
    assert watchdog.summarize(world.state) == "ready"


def test_a_daemon_that_loses_its_connection_is_taken_up_again() -> None:
    world = ready_world()
    world.send(ev.DaemonLeft(connection=11))
    assert not restarted(world)
    assert watchdog.summarize(world.state) == "degraded"
    world.daemon_joins(1, connection=31, executor_generation=1)
    assert watchdog.summarize(world.state) == "ready"
    assert not world.take(do.StartExecutor)
    assert 1 in world.state.sessions["s"].arrays
    world.executor_dies(0)
    assert [stop.connection for stop in world.take(do.StopExecutor)] == [31], "orders go to where it is now"


def test_a_node_that_dies_is_noticed_at_once() -> None:
    world = ready_world()
    world.node_leaves(1)
    assert world.state.formation.phase == "stopping"
    assert node_reports.node_state(world.state.formation, 1) == "lost"
    assert "node 1 (host:1) was lost: its daemon ended" in str(world.state.sessions["s"].why_gone(1))


def test_a_node_that_freezes_whole_is_given_up_and_may_come_back() -> None:
    world = ready_world()
    world.passes(16, silent={1}, silent_daemons={1})
    assert [stop.connection for stop in world.take(do.StopExecutor)] == [10]
    assert [each.connection for each in world.take(do.Disconnect)] == [11]
    assert node_reports.node_state(world.state.formation, 1) == "lost"
    world.executor_dies(0)
    world.daemon_joins(1, connection=31, executor_generation=1)
    assert {start.connection for start in world.take(do.StartExecutor)} == {10, 31}


def test_another_daemon_of_the_node_begins_anew() -> None:
    world = ready_world()
    world.send(ev.DaemonLeft(connection=11))
    world.daemon_joins(1, connection=31)
    assert [refusal.connection for refusal in world.take(do.Refuse)] == [101], "the executor without a daemon"
    assert [stop.connection for stop in world.take(do.StopExecutor)] == [10]
    world.executor_dies(0)
    assert {start.connection for start in world.take(do.StartExecutor)} == {10, 31}


def test_an_executor_lost_while_its_daemon_is_silent_waits_for_the_daemon() -> None:
    world = ready_world()
    world.passes(20, silent_daemons={1})
    world.send(ev.ExecutorLeft(connection=world.executor_connection(1)))
    assert world.state.formation.phase == "stopping"
    world.executor_dies(0)
    assert not world.take(do.StartExecutor)
    world.passes(20, silent_daemons={1})
    assert node_reports.node_state(world.state.formation, 1) == "lost"
    world.daemon_joins(1, connection=31)
    assert len(world.take(do.StartExecutor)) == 2
