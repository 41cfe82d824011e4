"""Cancelled steps, and who pays for their end: others, operators, clients that are gone; with a clock moved by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.errors import OptionError, SessionError, StepCancelledError, WorkerLostError
from shardwright.server.limits import Limits
from shardwright.server.master import commands as do
from shardwright.server.master import events as ev
from shardwright.server.master import watchdog
from tests.server.simulation import PROGRAM, World

LIMITS = Limits(pending_steps=4, session_array_bytes=1000, step_s=2000.0, cancel_grace_s=10.0, grace_s=60.0)
SLOW = replace(PROGRAM, predicted_s=165.0)


def world_with(program: ev.ProgramInfo = SLOW, *, name: str = "") -> World:
    """Two nodes; the session "s" with arrays 1 and 2 on stream 1, and "other" without arrays on stream 9."""
    world = World(limits=LIMITS)
    world.form()
    world.send(ev.SessionRequested(call=1, session_id="s", name=name))
    world.all_done()
    world.send(ev.StepsOpened(stream=1, session_id="s"))
    world.load(program)
    for array_id in (1, 2):
        world.arrives(array_id)
    world.send(ev.SessionRequested(call=90, session_id="other"))
    world.all_done()
    world.send(ev.StepsOpened(stream=9, session_id="other"))
    world.send(ev.LoadRequested(call=91, session_id="other", plan_id="plan"))
    world.send(ev.CompileFinished(plan_id="plan", program=program))
    world.all_done()
    world.commands.clear()
    return world


def other_arrives(world: World, array_id: int = 1) -> None:
    array = ev.UploadedArray(array_id=array_id, size_bytes=8, devices=range(1 << 20))
    for node in range(2):
        connection = world.executor_connection(node)
        world.send(ev.ArraysUploaded(connection=connection, session_id="other", arrays=(array,)))


def other_steps(
    world: World, number: int, arguments: tuple[int, ...], outputs: tuple[int, ...], **more: object
) -> None:
    world.step(number, arguments, outputs, stream=9, session_id="other", executable_id="plan", **more)


def inline(*array_ids: int) -> dict[str, object]:
    return {"inline": tuple((array_id, 4) for array_id in array_ids)}


def cancel(world: World, *numbers: int) -> None:
    world.send(ev.StepsCancelled(call=50, session_id="s", numbers=numbers))


def comes_back(world: World) -> None:
    """The executors of the next generation run."""
    for node in range(2):
        world.executor_dies(node)
    world.orders.clear()
    for node in range(2):
        world.executor_joins(node)


def replies(world: World, stream: int) -> list[tuple[int, type | None]]:
    return [
        (reply.number, type(reply.error) if reply.error else None)
        for reply in world.take(do.ReplyStep)
        if reply.stream == stream
    ]


# ---- how long it may go on --------------------------------------------------------------
def test_nobody_else_has_arrays_so_it_ends_after_ten_seconds() -> None:
    world = world_with()
    world.step(1, (1, 2), (3, 4))
    cancel(world, 1)
    world.passes(9)
    assert not world.take(do.StopExecutor)
    world.passes(2)
    assert len(world.take(do.StopExecutor)) == 2
    assert replies(world, 1) == [(1, StepCancelledError)]


@pytest.mark.parametrize("how", ["arrays", "snapshots", "snapshots that failed", "a snapshot that is complete again"])
def test_arrays_of_others_make_it_wait_unless_they_come_back_by_themselves(how: str) -> None:
    world = world_with()
    other_arrives(world)
    if how != "arrays":
        other_steps(world, 1, (8, 9), (3, 4), restores=True, generation=1, **inline(8, 9))
        world.all_done()
    if how in ("snapshots that failed", "a snapshot that is complete again"):
        other_steps(world, 2, (9, 3), (5, 6), restores=False, generation=1)
        world.all_done()
    if how == "a snapshot that is complete again":
        info = ev.SnapshotStepInfo(is_restore=False)
        other_steps(world, 3, (1,), (), snapshot=info, generation=1)
        world.all_done()
    world.step(1, (1, 2), (3, 4))
    cancel(world, 1)
    world.passes(11)
    waits = how in ("arrays", "snapshots that failed")
    assert bool(world.take(do.StopExecutor)) != waits
    world.passes(320)
    assert bool(world.take(do.StopExecutor)) == waits, "twice its prediction"


def test_a_step_of_others_that_can_run_again_is_no_loss() -> None:
    world = world_with()
    world.step(1, (1, 2), (3, 4))
    other_steps(world, 1, (8, 9), (3, 4), **inline(8, 9))
    cancel(world, 1)
    world.passes(11)
    assert world.take(do.StopExecutor)


# ---- who is told -----------------------------------------------------------------------------
def test_all_who_wait_are_told_whom_they_wait_for_and_how_long() -> None:
    world = world_with()
    other_arrives(world)
    world.step(1, (1, 2), (3, 4))
    cancel(world, 1)
    world.passes(3)
    (notice,) = world.take(do.Notice)
    assert notice.stream == 1, "the other one does not wait yet"
    assert "everybody waits for step 1 of session s, 3 s so far" in notice.text or "2 s so far" in notice.text
    assert "cancelled; unless it ends, all executors are replaced in 32" in notice.text
    assert "that costs session other arrays that no snapshot keeps" in notice.text
    assert "shardwright cancel ADDRESS s/1" in notice.text
    other_steps(world, 1, (1, 9), (3, 4), **inline(9))
    world.passes(1)
    assert [notice.stream for notice in world.take(do.Notice)] == [9], "who begins to wait later is told, too"
    world.passes(5)
    assert not world.take(do.Notice), "once"
    assert "cancelled" in watchdog.waiting_for(world.state)


def test_a_step_that_is_not_cancelled_says_when_it_ends() -> None:
    world = world_with(replace(PROGRAM, predicted_s=0.0))
    world.step(1, (1, 2), (3, 4), timeout_s=100.0)
    world.passes(11)
    (notice,) = world.take(do.Notice)
    assert "it is ended in 9" in notice.text


# ---- operators -----------------------------------------------------------------------------------
def end(world: World, number: int, session_id: str = "s") -> None:
    world.send(ev.StepsEnded(call=60, session_id=session_id, number=number, operator="the operator olga"))


def test_an_operator_ends_a_step_at_once_whoever_loses_arrays() -> None:
    world = world_with()
    other_arrives(world)
    world.step(1, (1, 2), (3, 4))
    end(world, 1)
    world.passes(0.5)
    assert len(world.take(do.StopExecutor)) == 2
    (reply,) = world.take(do.ReplyStep)
    assert isinstance(reply.error, StepCancelledError)
    assert "step 1 of session s was ended by the operator olga" in reply.error.message
    lost = world.state.sessions["other"].why_gone(1)
    assert isinstance(lost, WorkerLostError)
    assert "the operator olga" in lost.message


def test_an_operator_ends_a_step_behind_others_when_its_turn_comes() -> None:
    world = world_with()
    other_steps(world, 1, (8, 9), (3, 4), **inline(8, 9))
    world.step(1, (1, 2), (3, 4))
    end(world, 1)
    world.passes(5)
    assert not world.take(do.StopExecutor), "the other session's step is not to blame"
    first = next(order for order in world.orders if isinstance(order, do.RunOnWorkers))
    for node in range(2):
        world.done(first.sequence, node)
    world.passes(0.5)
    assert world.take(do.StopExecutor)


def test_an_operator_ends_what_waits_and_what_a_closed_session_left() -> None:
    world = world_with()
    world.step(1, (1, 77), (3, 4))
    end(world, 0)
    (answer,) = world.take(do.Answer)
    assert answer.value == do.Cancellation(cancelled=(1,), running=())
    assert replies(world, 1) == [(1, StepCancelledError)]
    world.all_done()
    world.step(2, (1, 2), (5, 6))
    other_arrives(world)
    world.send(ev.SessionClosed(call=61, session_id="s"))
    world.passes(2)
    assert not world.take(do.StopExecutor)
    end(world, 2)
    world.passes(0.5)
    assert world.take(do.StopExecutor)


def test_what_is_not_under_way_cannot_be_ended() -> None:
    world = world_with()
    end(world, 7)
    end(world, 0)
    end(world, 1, "nobody")
    errors = [failure.error for failure in world.take(do.Fail)]
    assert [type(error) for error in errors] == [OptionError, OptionError, SessionError]
    assert "step 7" in errors[0].message


# ---- clients that are gone ---------------------------------------------------------------------------
def test_the_step_of_a_client_that_is_gone_ends_with_its_session() -> None:
    world = world_with()
    world.step(1, (1, 2), (3, 4))
    world.send(ev.StepsClosed(stream=1))
    other_steps(world, 1, (8, 9), (3, 4), **inline(8, 9))
    world.passes(59)
    assert "s" in world.state.sessions, "it may come back"
    assert not world.take(do.StopExecutor)
    assert "its client" in watchdog.waiting_for(world.state)
    world.passes(3)
    assert "s" not in world.state.sessions
    assert world.take(do.StopExecutor), "it has had its time"
    comes_back(world)
    world.all_done()
    assert replies(world, 9) == [(1, None)]


def test_the_step_of_a_named_session_goes_on_while_its_state_would_be_lost() -> None:
    world = world_with(name="run")
    world.step(1, (1, 2), (3, 4))
    world.send(ev.StepsClosed(stream=1))
    world.passes(1000)
    assert "s" in world.state.sessions
    assert not world.take(do.StopExecutor)


def test_the_step_of_a_named_session_ends_where_a_snapshot_has_its_state() -> None:
    world = world_with(name="run")
    kept = ev.Kept(description=b"state", array_ids=(2,), updates=1)
    info = ev.SnapshotStepInfo(is_restore=False)
    world.step(1, (2,), (), snapshot=info, generation=1, restores=True, kept=kept)
    world.all_done()
    world.step(2, (1, 2), (3, 4), generation=1, restores=True)
    world.send(ev.StepsClosed(stream=1))
    world.passes(59)
    assert not world.take(do.StopExecutor)
    world.passes(4)
    assert world.take(do.StopExecutor)
    assert "s" in world.state.sessions


# ---- steps that run again --------------------------------------------------------------------------------
def test_queued_steps_that_use_no_lost_array_run_again_by_themselves() -> None:
    world = world_with()
    world.step(1, (1, 2), (3, 4))
    other_steps(world, 1, (8, 9), (3, 4), **inline(8, 9))
    other_steps(world, 2, (3, 10), (5, 6), released=(4,), **inline(10))
    cancel(world, 1)
    world.passes(11)
    assert replies(world, 9) == []
    assert not world.take(do.Fail)
    comes_back(world)
    world.all_done()
    assert replies(world, 9) == [(1, None), (2, None)]
    assert world.state.sessions["other"].arrays.keys() == {9, 5, 6, 10}


def test_what_was_uploaded_for_queued_steps_is_written_again() -> None:
    world = world_with()
    for array_id in (20, 21, 22):
        other_arrives(world, array_id)
    world.step(1, (1, 2), (3, 4))
    other_steps(world, 1, (20, 9), (3, 4), resendable=(20,), **inline(9))
    other_steps(world, 2, (21, 77), (5, 6), resendable=(21,))  # waits for an argument
    other_steps(world, 3, (22, 10), (7, 8), resendable=(22,), released=(20,), **inline(10))
    cancel(world, 1)
    world.passes(11)
    assert world.take(do.StopExecutor), "the other session loses nothing"
    assert replies(world, 9) == []
    world.take(do.Notice)
    comes_back(world)
    world.all_done()
    (notice,) = world.take(do.Notice)
    assert (notice.stream, notice.resend) == (9, (20, 21, 22))
    assert not world.runs()
    other_arrives(world, 20)
    world.all_done()
    assert replies(world, 9) == [(1, None)]
    for array_id in (77, 21, 22):
        other_arrives(world, array_id)
    world.all_done()
    assert replies(world, 9) == [(2, None), (3, None)]
    assert not world.take(do.Notice)


def test_a_client_that_comes_back_is_asked_for_its_arrays_again() -> None:
    world = world_with()
    other_arrives(world, 20)
    world.step(1, (1, 2), (3, 4))
    other_steps(world, 1, (20, 9), (3, 4), resendable=(20,), **inline(9))
    end(world, 1)
    world.passes(1)
    world.send(ev.StepsClosed(stream=9))
    comes_back(world)
    world.all_done()
    assert not [notice for notice in world.take(do.Notice) if notice.resend]
    world.send(ev.StepsOpened(stream=10, session_id="other"))
    assert [notice.resend for notice in world.take(do.Notice) if notice.resend] == [(20,)]


def test_queued_steps_that_use_a_lost_array_fail_and_others_beside_them_do_not() -> None:
    world = world_with()
    other_arrives(world, 1)
    world.step(1, (1, 2), (3, 4))
    other_steps(world, 1, (1, 9), (3, 4), **inline(9))
    other_steps(world, 2, (10, 11), (5, 6), **inline(10, 11))
    other_steps(world, 3, (3, 5), (7, 8))
    end(world, 1)
    world.passes(1)
    comes_back(world)
    world.all_done()
    assert replies(world, 9) == [(1, WorkerLostError), (2, None), (3, WorkerLostError)]


def test_a_step_that_was_answered_does_not_run_again() -> None:
    world = world_with()
    other_steps(world, 1, (8, 9), (3, 4), **inline(8, 9))
    world.all_done()
    assert replies(world, 9) == [(1, None)]
    world.step(1, (1, 2), (3, 4))
    other_steps(world, 2, (3, 10), (5, 6), **inline(10))
    end(world, 1)
    world.passes(1)
    comes_back(world)
    world.all_done()
    assert replies(world, 9) == [(2, WorkerLostError)]
    assert not [order for order in world.runs() if order == 1]


def test_a_save_or_a_step_for_a_generation_does_not_run_again_by_itself() -> None:
    world = world_with()
    world.step(1, (1, 2), (3, 4))
    other_steps(world, 1, (8, 9), (3, 4), generation=1, **inline(8, 9))
    end(world, 1)
    world.passes(1)
    assert replies(world, 9) == [(1, WorkerLostError)], "its client sends it again"
