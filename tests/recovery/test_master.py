"""Snapshots as the master orders them: `MasterState` without a network."""

from __future__ import annotations

import pytest

from shardwright.errors import ArrayError, ServerUnavailableError, StateStoreError, WorkerLostError
from shardwright.server.master import commands as do
from shardwright.server.master import events as ev
from shardwright.server.master import recovered, snapshots, watchdog
from shardwright.server.master.store import SessionRow, StoredState
from tests.server.simulation import World, ready_world

SNAPSHOT = {"executable_id": "", "snapshot": ev.SnapshotStepInfo(is_restore=False), "generation": 1}


def snapshots_told(world: World) -> list[do.SnapshotEnded]:
    return [notice.snapshot for notice in world.take(do.Notice) if notice.snapshot is not None]


def lose_executors(world: World) -> None:
    """Node 1's executor dies; those of the next generation run."""
    world.executor_dies(1)
    world.orders.clear()
    world.executor_dies(0)
    for node in range(world.node_count):
        world.executor_joins(node)
    world.all_done()


def test_a_snapshot_is_complete_when_all_executors_have_stored_it() -> None:
    world = ready_world()
    world.step(1, (1, 2), (), **SNAPSHOT)
    world.all_done_of(do.RunOnWorkers)
    assert [reply.error for reply in world.take(do.ReplyStep)] == [None]
    (store,) = world.orders
    assert isinstance(store, do.StoreOnWorkers)
    assert (store.number, store.keep) == (1, ())
    world.step(2, (1, 2), (8, 9))  # training goes on
    world.done(store.sequence, 0, written_bytes=16)
    assert not snapshots_told(world)
    assert not world.take(do.RetainOnDaemons)
    world.now_s += 2
    world.done(store.sequence, 1, written_bytes=24)
    assert snapshots_told(world) == [do.SnapshotEnded(number=1, kept_bytes=40, store_s=2.0)]
    (retain,) = world.take(do.RetainOnDaemons)
    assert retain.sessions == (("s", 1),), "older ones may go"
    world.send(ev.StepsOpened(stream=5, session_id="s"))
    assert [end.number for end in snapshots_told(world)] == [1], "told again where the connection broke"


def test_a_snapshot_that_cannot_be_stored_leaves_the_one_before() -> None:
    world = ready_world()
    world.step(1, (1, 2), (), **SNAPSHOT)
    world.all_done()
    world.take(do.Notice), world.take(do.RetainOnDaemons)
    world.step(2, (1, 2), (), **SNAPSHOT)
    world.all_done_of(do.RunOnWorkers)
    world.all_done_of(do.StoreOnWorkers, error=ServerUnavailableError("the daemon of node 1 is not there"))
    (end,) = snapshots_told(world)
    assert end.number == 2
    assert isinstance(end.error, ServerUnavailableError)
    assert not world.take(do.RetainOnDaemons)
    assert world.state.sessions["s"].snapshots.complete == 1


def test_clients_that_name_a_generation_are_told_of_its_end() -> None:
    world = ready_world()
    world.step(1, (1, 2), (8, 9), generation=1)
    world.all_done()
    assert not world.take(do.Notice)
    world.executor_dies(1)
    (notice,) = world.take(do.Notice)
    assert isinstance(notice.lost, WorkerLostError)


@pytest.mark.parametrize("is_under_way", [False, True])
def test_others_are_where_a_step_runs_again_without_a_word(*, is_under_way: bool) -> None:
    world = ready_world()
    world.step(1, (20, 21), (8, 9), inline=((20, 8), (21, 8)))
    if not is_under_way:
        world.all_done()
    world.executor_dies(1)
    assert [type(notice.lost) for notice in world.take(do.Notice)] == [WorkerLostError] * is_under_way


def test_a_step_of_a_generation_that_is_over_is_refused_at_once() -> None:
    world = ready_world()
    world.step(1, (1, 2), (8, 9), generation=1)
    world.all_done()
    lose_executors(world)
    world.take(do.ReplyStep)
    world.step(2, (50, 51), (10, 11), generation=1)  # its arguments would come, or were lost on their way
    (reply,) = world.take(do.ReplyStep)
    assert isinstance(reply.error, WorkerLostError)
    assert world.runs() == []


def test_after_a_restore_arrays_have_their_old_ids_and_steps_run_again() -> None:
    world = ready_world()
    world.step(1, (1, 2), (8, 9), generation=1)
    world.all_done()
    lose_executors(world)
    world.take(do.ReplyStep)
    restore = ev.SnapshotStepInfo(is_restore=True, output_bytes=(8,))
    world.step(2, (), (1,), executable_id="", snapshot=restore, generation=2)
    world.step(3, (1, 2), (8, 9), generation=2)
    world.all_done()
    assert [reply.number for reply in world.take(do.ReplyStep)] == [2], "array 2 is unknown now, not lost: step 3 waits"
    world.arrives(2)
    world.all_done()
    assert [reply.error for reply in world.take(do.ReplyStep)] == [None]
    world.step(4, (1, 9), (12, 13), generation=2)
    (reply,) = world.take(do.ReplyStep)
    assert isinstance(reply.error, ArrayError), "array 1 was donated again"


def test_daemons_hear_what_to_keep_when_they_join_and_when_a_session_ends() -> None:
    world = ready_world()
    world.step(1, (1, 2), (), **SNAPSHOT)
    world.all_done()
    world.take(do.RetainOnDaemons)
    world.node_leaves(1)
    world.daemon_joins(1, snapshot_address="host:7")
    assert [retain.sessions for retain in world.take(do.RetainOnDaemons)] == [(("s", 1),)]
    assert world.state.formation.nodes[1].snapshot_address == "host:7"
    world.send(ev.SessionClosed(call=9, session_id="s"))
    assert [retain.sessions for retain in world.take(do.RetainOnDaemons)] == [()]


def test_a_store_that_takes_long_is_nothing_that_everybody_waits_for() -> None:
    world = ready_world()
    world.step(1, (1, 2), (), **SNAPSHOT)
    world.all_done_of(do.RunOnWorkers)
    world.passes(60)
    assert watchdog.summarize(world.state) == "ready"
    assert not world.take(do.StopExecutor)


def test_daemons_keep_what_the_store_names_and_what_the_client_would_restore() -> None:
    """Until both are past it: a snapshot may be complete for the master alone."""
    world = ready_world()
    world.names_by_hand = True

    def take_snapshot(number: int) -> do.StoreOnWorkers:
        world.step(number, (1, 2), (), **SNAPSHOT)
        world.all_done_of(do.RunOnWorkers)
        (order,) = [each for each in world.orders if isinstance(each, do.StoreOnWorkers)]
        world.all_done()
        return order

    def say(number: int) -> None:
        protection = ev.Protection(is_wanted=True, is_ready=True, snapshot=number)
        world.send(ev.ProtectionChanged(stream=1, session_id="s", protection=protection))

    take_snapshot(1)
    assert not snapshots_told(world), "it is not on the disk"
    assert not world.take(do.RetainOnDaemons)
    world.send(ev.SnapshotNamed(session_id="s", number=1))
    assert [end.number for end in snapshots_told(world)] == [1]
    say(1)
    assert take_snapshot(2).keep == (1,)
    assert take_snapshot(3).keep == (1, 2), "the disk and the client have 1"
    world.take(do.RetainOnDaemons)
    world.send(ev.SnapshotNamed(session_id="s", number=3))
    assert [retain.sessions for retain in world.take(do.RetainOnDaemons)] == [(("s", 1),)], "the client has 1"
    say(3)
    assert [retain.sessions for retain in world.take(do.RetainOnDaemons)] == [(("s", 3),)]
    take_snapshot(4)
    world.take(do.Notice)
    world.send(ev.SnapshotNamed(session_id="s", number=4, error=StateStoreError("the disk is full")))
    assert [end.error for end in snapshots_told(world)] == [None], "a loss of executors alone is survived with it"
    say(4)
    assert [retain.sessions for retain in world.take(do.RetainOnDaemons)] == [(("s", 3),)], "the disk names 3"
    assert take_snapshot(5).keep == (3, 4)


def test_a_client_that_missed_the_end_of_its_snapshot_hears_it_of_the_next_master() -> None:
    row = SessionRow(session_id="s", last_number=7, snapshot=7, snapshot_bytes=40)
    world = World()
    recovered.restore(world.state, StoredState(generation=1, team=(0, 1), sessions=(row,)), 0.0)
    assert snapshots.retain(world.state).sessions == (("s", 0),), "the client may need an older one"
    world.send(ev.StepsOpened(stream=1, session_id="s", protection=ev.Protection(is_wanted=True, snapshot=3)))
    assert snapshots_told(world) == [do.SnapshotEnded(number=7, kept_bytes=40)]
    assert snapshots.retain(world.state).sessions == (("s", 3),)
