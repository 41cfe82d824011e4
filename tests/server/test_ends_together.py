"""Executors that end together: the loss names the one that the others follow, whichever the master hears of first."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

import pytest

from shardwright.server.black_box import Work
from shardwright.server.master import commands as do
from shardwright.server.master import events as ev
from shardwright.server.master.roster import Elasticity, Roster
from shardwright.server.tuning import CAUSE_S
from tests.server.simulation import World, ready_world

#: What the master may hear of when the executor of node 0 is killed, in a cluster of three, in any order.
NEWS: tuple[Callable[[World], object], ...] = (
    lambda world: world.executor_dies(0),
    lambda world: world.executor_misses_another(1),
    lambda world: world.executor_misses_another(2),
    lambda world: world.send(ev.ExecutorLeft(connection=101)),
)


def loss_of(world: World) -> str:
    loss = world.state.formation.last_loss
    return "" if loss is None else loss.message


@pytest.mark.parametrize("order", list(permutations(range(len(NEWS)))))
def test_a_killed_executor_is_named_whoever_is_heard_of_first(order: tuple[int, ...]) -> None:
    world = ready_world(3)
    world.state.formation.roster = Roster(range(3), Elasticity(min_nodes=1, max_failures=1), 0.0)
    for number in order:
        NEWS[number](world)
        assert loss_of(world) == "" or "the executor of node 0 was lost: it ended with SIGKILL" in loss_of(world)
    assert loss_of(world)
    assert world.state.formation.roster.left_out == {0}
    assert not world.state.held_back


def test_a_node_that_is_gone_is_named() -> None:
    """Its daemon is missed first, then its executor; in between the other one has ended."""
    world = ready_world()
    world.executor_misses_another(0)
    world.send(ev.ExecutorLeft(connection=101))
    world.send(ev.DaemonLeft(connection=11))
    assert loss_of(world).startswith("node 1 (host:1) was lost: its daemon ended")
    assert {stop.connection for stop in world.take(do.StopExecutor)} == {10}
    world.daemon_joins(1)
    assert len(world.take(do.StartExecutor)) == 2, "the end of the other one was taken in as well"


@pytest.mark.parametrize("killed_first", [True, False])
def test_an_abort_without_a_word_is_not_the_cause_beside_a_kill(killed_first: bool) -> None:
    world = ready_world()
    news = [lambda: world.executor_dies(0), lambda: world.executor_dies(1, exit_code=-6, last_lines="")]
    for tell in news if killed_first else reversed(news):
        tell()
    assert "the executor of node 0 was lost: it ended with SIGKILL" in loss_of(world)


def test_what_nothing_explains_is_taken_in_after_a_moment() -> None:
    world = ready_world()
    assert [command.delay_s for command in world.executor_misses_another(1) if isinstance(command, do.LookAgain)] == [
        CAUSE_S
    ]
    world.later(CAUSE_S / 2)
    assert not loss_of(world)
    world.later(CAUSE_S / 2)
    assert "the executor of node 1 was lost: it ended with signal 6" in loss_of(world)


def test_a_broken_connection_is_rather_the_cause_than_an_end_that_follows_one() -> None:
    world = ready_world()
    world.send(ev.ExecutorLeft(connection=100))
    world.executor_misses_another(0)
    world.send(ev.ExecutorLeft(connection=101))
    world.later(CAUSE_S)
    assert loss_of(world) == "the executor of node 1 was lost: its connection was lost"


def test_a_crash_of_its_own_is_a_cause_at_once() -> None:
    world = ready_world()
    world.executor_dies(1, exit_code=-6, last_lines="F0101 buffer.cc:1] Check failed: size > 0")
    assert "the executor of node 1 was lost" in loss_of(world)
    world.executor_misses_another(0)
    assert "the executor of node 1 was lost" in loss_of(world)
    assert len(world.take(do.StartExecutor)) == 2


def test_what_the_other_one_was_busy_with_is_suspected() -> None:
    world = ready_world()
    world.step(1, (1, 2), (10, 11))
    (order,) = [order for order in world.orders if isinstance(order, do.RunOnWorkers)]
    world.executor_misses_another(0)
    killed = ev.ExecutorExited(
        connection=11, generation=1, exit_code=-11, last_lines="", coordinator_address="host:1",
        works=(Work(sequence=order.sequence),),
    )  # fmt: skip
    world.send(killed)
    assert [suspect.key for suspect in world.state.quarantine.records] == ["plan"]
