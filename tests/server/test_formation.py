"""How a cluster forms, refuses, loses workers and comes back: `MasterState` without a network."""

from __future__ import annotations

import pytest

from shardwright.errors import ClusterConfigError, ServerUnavailableError, WorkerLostError
from shardwright.server.master import commands as do
from shardwright.server.master import events as ev
from shardwright.server.master import node_reports
from shardwright.server.tuning import CAUSE_S
from shardwright.server.worker.exit_codes import CANNOT_START
from tests.server.simulation import WAIT_S, World


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_executors_start_when_the_last_node_is_there(order: tuple[int, int]) -> None:
    world = World()
    world.daemon_joins(order[0])
    assert not world.take(do.StartExecutor)
    world.daemon_joins(order[1])
    starts = world.take(do.StartExecutor)
    assert [(start.process_id, start.process_count, start.generation) for start in starts] == [(0, 2, 1), (1, 2, 1)]
    assert {start.coordinator_address for start in starts} == {"host:0"}, "the first node's, whoever came first"
    world.executor_joins(order[0])
    assert world.state.formation.phase == "starting"
    world.executor_joins(order[1])
    assert world.state.formation.phase == "ready"
    assert "cluster ready: 2 nodes, 2 × 4 devices" in [line.text for line in world.take(do.Log)]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"cluster_hash": "other"}, "cluster files of the master and of node 1 differ"),
        ({"jax_version": "3"}, "runs jax 3, the master 2"),
        ({"shardwright_version": "3"}, "runs shardwright 3, the master 1"),
        ({"node": 7}, "no worker of the master's cluster file"),
    ],
)
def test_a_node_that_does_not_fit_is_refused_and_the_others_wait(wrong: dict[str, object], message: str) -> None:
    world = World()
    world.daemon_joins(0)
    (refusal,) = [command for command in world.daemon_joins(1, **wrong) if isinstance(command, do.Refuse)]
    assert isinstance(refusal.error, ClusterConfigError)
    assert message in refusal.error.message
    assert refusal.error.remedy
    world.daemon_joins(1, connection=99)
    assert world.take(do.StartExecutor), "the right node still completes the cluster"


def test_a_second_node_of_the_same_index_is_refused() -> None:
    world = World()
    world.daemon_joins(1)
    (refusal,) = [command for command in world.daemon_joins(1, connection=99) if isinstance(command, do.Refuse)]
    assert "running already" in refusal.error.message
    world.send(ev.DaemonLeft(connection=99))
    assert world.state.formation.nodes[1].daemon == 11, "the first one stays"


def test_a_worker_that_never_comes_ends_the_master_by_name() -> None:
    world = World()
    world.daemon_joins(0)
    world.later(WAIT_S - 1)
    assert not world.take(do.Halt)
    world.later(2)
    (halt,) = world.take(do.Halt)
    assert isinstance(halt.error, ServerUnavailableError)
    assert "worker 1 (host:1) did not come within 100 s" in halt.error.message


def test_one_dead_executor_takes_the_generation_with_it() -> None:
    world = World()
    world.form()
    world.commands.clear()
    world.executor_dies(1)
    assert [(stop.connection, stop.generation) for stop in world.take(do.StopExecutor)] == [(10, 1)]
    assert not world.take(do.StartExecutor), "not before the other one is gone too"
    world.executor_dies(0)
    starts = world.take(do.StartExecutor)
    assert [start.generation for start in starts] == [2, 2]
    assert [start.data_port for start in starts] == [9000, 9001], "clients find it where it was"
    assert (
        "SIGKILL: somebody killed it, or the kernel did for want of memory: last words"
        in world.state.formation.nodes[1].detail
    )
    for node in range(2):
        world.executor_joins(node)
    assert not node_reports.detail_of(world.state.formation, 1), "of the one that is gone"


def test_a_lost_stream_is_explained_once_the_exit_is_known() -> None:
    world = World()
    world.form()
    world.send(ev.ExecutorLeft(connection=world.executor_connection(1)))
    world.later(CAUSE_S)
    assert world.state.formation.nodes[1].detail == "its connection was lost"
    world.executor_dies(1)
    assert (
        "SIGKILL: somebody killed it, or the kernel did for want of memory: last words"
        in world.state.formation.nodes[1].detail
    )


def test_a_daemon_that_left_is_waited_for() -> None:
    world = World()
    world.form()
    world.node_leaves(1)
    world.executor_dies(0)
    assert node_reports.node_state(world.state.formation, 1) == "lost"
    world.later(10 * WAIT_S)
    assert not world.take(do.Halt), "a cluster that once ran waits for ever"
    world.daemon_joins(1)
    assert world.state.formation.generation == 2


def test_executors_that_never_start_end_the_master() -> None:
    world = World(node_count=1)
    world.daemon_joins(0)
    for _ in range(world.limits.start_attempts):
        assert not world.take(do.Halt)
        world.executor_dies(0)
        world.passes(world.limits.last_retry_s)
    (halt,) = world.take(do.Halt)
    assert isinstance(halt.error, WorkerLostError)
    assert "the executor of node 0 does not start" in halt.error.message
    assert "last words" in halt.error.message


def test_an_executor_that_cannot_start_ends_the_master_at_once() -> None:
    world = World(node_count=1)
    world.daemon_joins(0)
    world.send(
        ev.ExecutorExited(
            connection=10, generation=1, exit_code=CANNOT_START, last_lines="no GPU", coordinator_address=""
        )
    )
    (halt,) = world.take(do.Halt)
    assert "no GPU" in halt.error.message
    assert halt.is_final


def test_an_executor_that_hangs_at_start_is_ended() -> None:
    world = World(node_count=1)
    world.daemon_joins(0)
    world.later(world.limits.start_timeout_s + 1)
    assert [stop.generation for stop in world.take(do.StopExecutor)] == [1]


def test_a_node_with_other_devices_than_the_file_says_is_refused() -> None:
    world = World(node_count=1)
    world.daemon_joins(0)
    world.executor_joins(0, device_count=3)
    (refusal,) = world.take(do.Refuse)
    assert "3 devices instead of 4" in refusal.error.message


def test_an_executor_of_an_older_generation_is_refused() -> None:
    world = World(node_count=1)
    world.form()
    world.executor_dies(0)
    world.send(ev.ExecutorJoined(connection=5, node=0, generation=1, data_address="h:1", device_count=4))
    assert [refusal.connection for refusal in world.take(do.Refuse)] == [5]


def test_failed_starts_wait_longer_and_longer() -> None:
    world = World(node_count=1)
    world.form()
    world.commands.clear()
    world.executor_dies(0)
    assert world.take(do.StartExecutor), "a lost executor is replaced at once"
    pauses = []
    for _ in range(9):
        world.executor_dies(0)
        began_s = world.now_s
        while not world.take(do.StartExecutor):
            assert not world.take(do.Halt), "a cluster that was ready is patient"
            world.passes(0.5)
        pauses.append(world.now_s - began_s)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    world.executor_joins(0)
    world.executor_dies(0)
    assert world.take(do.StartExecutor), "a start that went well ends the pauses"


def test_a_cluster_that_was_ready_gives_up_in_the_end() -> None:
    world = World(node_count=1)
    world.form()
    world.executor_dies(0)
    while not (halts := world.take(do.Halt)):
        assert world.now_s < 2 * world.limits.restart_patience_s
        world.executor_dies(0)
        world.passes(0.5)
        world.now_s += world.limits.last_retry_s
        world.passes(0.5)
    assert world.now_s >= world.limits.restart_patience_s
    assert not halts[0].is_final
