"""Saves and restores as the master orders them: `MasterState` without a network or files."""

from __future__ import annotations

import pytest

from shardwright.errors import CheckpointError, DeadlineError, InternalError, SessionError, WorkerLostError
from shardwright.server.master import commands as do
from shardwright.server.master import events as ev
from tests.server.simulation import World, ready_world

SAVE = {"executable_id": "", "files": ev.FileStepInfo(is_save=True)}
CALL = 77


def wait_for(world: World, number: int) -> None:
    world.send(ev.SaveAwaited(call=CALL, session_id="s", number=number))


def answer(world: World) -> object:
    """What the one who waits for the save was told: its value, or its error."""
    told: list[object] = [command.value for command in world.take(do.Answer) if command.call == CALL]
    told += [command.error for command in world.take(do.Fail) if command.call == CALL]
    (one,) = told
    return one


def saving(world: World) -> World:
    """Arrays 1 and 2, of 8 bytes each, were copied by step 1; the order to write them is out."""
    world.step(1, (1, 2), (), **SAVE)
    world.all_done_of(do.RunOnWorkers)
    wait_for(world, 1)
    return world


def test_all_nodes_copy_then_all_write_then_it_is_committed() -> None:
    world = ready_world()
    world.step(1, (1, 2), (), **SAVE)
    (copy,) = world.orders
    assert isinstance(copy, do.RunOnWorkers)
    world.done(copy.sequence, 0)
    assert not world.take(do.ReplyStep), "the other node has not copied yet"
    world.done(copy.sequence, 1)
    assert [reply.number for reply in world.take(do.ReplyStep)] == [1], "the client may go on"
    wait_for(world, 1)
    write = world.orders[-1]
    assert isinstance(write, do.WriteOnWorkers)
    world.done(write.sequence, 1, written_bytes=12)
    assert len(world.orders) == 2, "nothing is committed before all have written"
    world.done(write.sequence, 0, written_bytes=4)
    commit = world.orders[-1]
    assert isinstance(commit, do.FinishOnWorkers)
    assert commit.is_commit
    world.now_s += 3
    world.done(commit.sequence, 0)
    world.done(commit.sequence, 1)
    assert answer(world) == (16, 3)
    wait_for(world, 1)
    assert answer(world) == (16, 3), "it may be asked again"


def test_a_save_is_ordered_among_steps_and_sent_twice_is_done_once() -> None:
    world = ready_world()
    world.step(1, (1, 2), (3, 4))
    world.step(2, (3, 2), (), **SAVE)
    world.step(2, (3, 2), (), **SAVE)
    world.step(3, (3, 2), (5, 6))
    assert world.runs() == [1, 2, 3]


def test_steps_go_on_while_it_is_written_and_may_donate_what_it_saves() -> None:
    world = saving(ready_world())
    world.step(2, (1, 2), (3, 4))
    assert world.runs() == [2]


def test_a_donated_array_cannot_be_saved() -> None:
    world = ready_world()
    world.step(1, (1, 2), (3, 4))
    world.step(2, (1,), (), **SAVE)
    world.all_done_of(do.RunOnWorkers)
    reply = world.take(do.ReplyStep)[-1]
    assert "donated to step 1" in str(reply.error)
    wait_for(world, 2)
    assert isinstance(answer(world), CheckpointError)


@pytest.mark.parametrize("phase", ["copy", "write", "commit"])
def test_what_fails_on_one_node_ends_the_save_for_all(phase: str) -> None:
    world = ready_world()
    error = CheckpointError("disk full")
    world.step(1, (1, 2), (), **SAVE)
    wait_for(world, 1)
    for kind, name in ((do.RunOnWorkers, "copy"), (do.WriteOnWorkers, "write"), (do.FinishOnWorkers, "commit")):
        order = world.orders.pop()
        assert isinstance(order, kind)
        world.done(order.sequence, 0, written_bytes=16)
        world.done(order.sequence, 1, error=error if name == phase else None)
        if name == phase:
            break
    if phase != "commit":
        clean = world.orders.pop()
        assert isinstance(clean, do.FinishOnWorkers)
        assert not clean.is_commit
        assert not [command for command in world.take(do.Fail) if command.call == CALL], "first it is cleaned up"
        for node in range(2):
            world.done(clean.sequence, node)
    assert answer(world) is error


def test_bytes_that_nobody_wrote_are_noticed() -> None:
    world = saving(ready_world())
    world.all_done_of(do.WriteOnWorkers, written_bytes=4)
    world.all_done_of(do.FinishOnWorkers)
    told = answer(world)
    assert isinstance(told, InternalError)
    assert "8 bytes were written of 16" in told.message


def test_a_lost_worker_ends_the_save_at_once() -> None:
    world = saving(ready_world())
    world.executor_dies(1)
    assert isinstance(answer(world), WorkerLostError)
    wait_for(world, 1)
    assert isinstance(answer(world), WorkerLostError)


def test_a_worker_that_never_answers_does_not_hold_up_whoever_waits() -> None:
    world = saving(ready_world())
    (write,) = world.orders
    world.done(write.sequence, 0, written_bytes=16)
    world.later(world.limits.save_s + 1)
    told = answer(world)
    assert isinstance(told, DeadlineError)
    assert "writing" in told.message
    world.done(write.sequence, 1)  # at last: nothing comes of it
    world.step(2, (1, 2), (), **SAVE)
    assert world.runs() == [2], "the next save may begin"


def test_one_node_that_failed_long_before_the_others_does_not_end_the_generation() -> None:
    world = ready_world()
    world.step(1, (1, 2), (), **SAVE)
    (copy,) = world.orders
    world.done(copy.sequence, 0, error=CheckpointError("read-only"))
    world.later(world.limits.divergence_s + 1)
    assert world.state.formation.phase == "ready"


def test_a_second_save_is_refused_while_one_is_under_way() -> None:
    world = saving(ready_world())
    world.take(do.ReplyStep)
    world.step(2, (1, 2), (), **SAVE)
    (reply,) = world.take(do.ReplyStep)
    assert isinstance(reply.error, CheckpointError)
    assert "step 1 is still under way" in reply.error.message


def test_a_session_outlives_its_client_until_the_save_is_complete() -> None:
    world = saving(ready_world())
    world.send(ev.StepsClosed(stream=1))
    world.later(world.limits.grace_s + 1)
    assert "s" in world.state.sessions
    world.all_done_of(do.WriteOnWorkers, written_bytes=8)
    world.all_done_of(do.FinishOnWorkers)
    world.later(world.limits.grace_s + 1)
    assert "s" not in world.state.sessions


def test_closing_the_session_tells_whoever_waits() -> None:
    world = saving(ready_world())
    world.send(ev.SessionClosed(call=5, session_id="s"))
    assert isinstance(answer(world), SessionError)


def test_a_restore_makes_arrays_that_later_steps_may_read() -> None:
    world = ready_world()
    files = ev.FileStepInfo(is_save=False, output_bytes=(100, 200))
    world.step(1, (), (8, 9), executable_id="", files=files)
    world.step(2, (8, 9), (10, 11))
    assert world.runs() == [1, 2]
    assert world.state.sessions["s"].arrays[9] == 200


def test_a_restore_that_fails_fails_what_reads_it() -> None:
    world = ready_world()
    world.step(1, (), (8, 9), executable_id="", files=ev.FileStepInfo(is_save=False, output_bytes=(8, 8)))
    world.all_done(error=CheckpointError("gone"))
    world.step(2, (8, 9), (10, 11))
    assert "gone" in str(world.take(do.ReplyStep)[-1].error)
