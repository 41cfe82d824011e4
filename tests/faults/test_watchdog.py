"""A step that does not end: time limits, cancelled steps, and who is named; with a clock that is moved by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.errors import SessionError, StepCancelledError, StepTimeoutError, WorkerLostError
from shardwright.server.limits import Limits
from shardwright.server.master import commands as do
from shardwright.server.master import events as ev
from shardwright.server.master import watchdog
from tests.server.simulation import PROGRAM, World, ready_world

LIMITS = Limits(pending_steps=4, session_array_bytes=1000, step_s=60.0, stall_s=10.0, cancel_grace_s=5.0)


def world_with(limits: Limits = LIMITS, program: ev.ProgramInfo = PROGRAM) -> World:
    """Two nodes, the session "s" on stream 1 with arrays 1 and 2, and "other" on stream 9."""
    world = World(limits=limits)
    world.form()
    world.open_session()
    world.load(program)
    world.arrives(1)
    world.arrives(2)
    world.send(ev.SessionRequested(call=90, session_id="other"))
    world.all_done()
    world.send(ev.StepsOpened(stream=9, session_id="other"))
    array = ev.UploadedArray(array_id=1, size_bytes=8, devices=range(1 << 20))
    for node in range(2):
        connection = world.executor_connection(node)
        world.send(ev.ArraysUploaded(connection=connection, session_id="other", arrays=(array,)))
    world.commands.clear()
    return world


def error_of(world: World, number: int = 1) -> Exception:
    (reply,) = [reply for reply in world.take(do.ReplyStep) if reply.number == number]
    assert reply.error is not None
    return reply.error


def test_a_step_over_its_limit_fails_and_the_executors_are_replaced() -> None:
    world = world_with()
    world.step(1, (1, 2), (3, 4))
    world.heard[1] = {"sequence": world.orders[-1].sequence, "doing": "device 5"}
    world.done(world.orders[-1].sequence, 0)
    world.passes(59)
    assert not world.take(do.StopExecutor)
    world.passes(2)
    assert {stop.connection for stop in world.take(do.StopExecutor)} == {10, 11}
    error = error_of(world)
    assert isinstance(error, StepTimeoutError)
    assert "step 1 of session s did not end within 60 s: node 1 (host:1), process 1001, device 5" in str(error)
    assert "step_timeout" in str(error)
    other = world.state.sessions["other"].why_gone(1)
    assert isinstance(other, WorkerLostError)
    assert "all executors were replaced: step 1 of session s did not end" in str(other)


@pytest.mark.parametrize(
    ("timeout_s", "predicted_s", "took_s", "limit_s"),
    [(0, 0, 0, 60), (5, 0, 0, 5), (300, 0, 0, 300), (0, 2, 0, 200), (0, 2, 30, 300), (5, 2, 30, 5), (1e-9, 0, 0, 1.5)],
)
def test_the_limit_comes_from_the_user_the_plan_and_earlier_runs(
    timeout_s: float, predicted_s: float, took_s: float, limit_s: float
) -> None:
    world = world_with(program=replace(PROGRAM, predicted_s=predicted_s))
    number = 1
    if took_s:
        world.step(1, (1, 2), (3, 4))
        world.passes(took_s)
        world.all_done()
        world.arrives(1, 0, 1)
        number = 2
    world.step(number, (2 if not took_s else 3, 4 if took_s else 1), (5, 6), timeout_s=timeout_s)
    world.passes(limit_s - 1)
    assert not world.take(do.StopExecutor)
    world.passes(2)
    assert world.take(do.StopExecutor)


def test_a_step_behind_others_has_its_own_time() -> None:
    world = world_with()
    world.step(1, (1, 2), (3, 4))
    world.step(2, (3, 4), (5, 6))
    world.passes(50)
    world.all_done_of(do.LoadOnWorkers)
    first, second = [order for order in world.orders if isinstance(order, do.RunOnWorkers)]
    for node in range(2):
        world.done(first.sequence, node)
    world.passes(50)
    assert not world.take(do.StopExecutor), "it has run for 50 s of its 60"
    for node in range(2):
        world.done(second.sequence, node)
    assert [reply.error for reply in world.take(do.ReplyStep)] == [None, None]


def test_small_commands_answered_meanwhile_do_not_make_a_step_younger() -> None:
    world = world_with()
    world.step(1, (1, 2), (3, 4))
    run = world.orders.pop()
    for _ in range(13):
        world.passes(5)
        if world.state.formation.phase != "ready":
            break
        world.send(ev.ReleaseRequested(call=7, session_id="other", array_ids=(1,), after_step=0))
        world.all_done()
    assert run.sequence not in world.state.pending
    assert isinstance(error_of(world), StepTimeoutError)


def test_a_stalled_step_is_named_to_everybody_who_waits() -> None:
    world = world_with()
    world.step(1, (1, 2), (3, 4))
    world.heard[0] = world.heard[1] = {"sequence": world.orders[-1].sequence, "doing": "stage 0, task 3 (f.0)"}
    world.send(ev.LoadRequested(call=20, session_id="other", plan_id="plan"))
    other = {"session_id": "other", "stream": 9, "executable_id": "plan"}
    world.step(1, (1, 1), (3, 4), **other)
    assert watchdog.summarize(world.state) == "ready"
    world.passes(11)
    assert watchdog.summarize(world.state) == "stalled"
    notices = world.take(do.Notice)
    assert {notice.stream for notice in notices} == {1, 9}
    assert "step 1 of session s, 1" in notices[0].text
    assert "node 0 (host:0), process 1000, stage 0, task 3 (f.0); node 1" in notices[0].text
    assert any(log.is_warning and "everybody waits for step 1" in log.text for log in world.take(do.Log))
    assert "process 1001" in watchdog.waiting_for(world.state)
    world.passes(10)
    assert not world.take(do.Notice), "once"
    world.all_done()
    assert watchdog.summarize(world.state) == "ready"


def test_a_step_that_always_takes_long_is_no_suspect() -> None:
    world = world_with(replace(LIMITS, step_s=1000.0))
    world.step(1, (1, 2), (3, 4))
    world.passes(20)
    world.all_done()
    world.commands.clear()
    world.step(2, (3, 4), (5, 6))
    world.passes(30)
    assert watchdog.summarize(world.state) == "ready"
    assert not world.take(do.Notice)
    world.passes(31)
    assert watchdog.summarize(world.state) == "stalled"


def test_a_master_that_stood_still_blames_nobody() -> None:
    world = world_with()
    world.step(1, (1, 2), (3, 4))
    world.later(3600.0)
    assert not world.take(do.StopExecutor)


# ---- cancelled -------------------------------------------------------------------
def cancel(world: World, *numbers: int) -> do.Cancellation:
    world.send(ev.StepsCancelled(call=50, session_id="s", numbers=numbers))
    (answer,) = world.take(do.Answer)
    return answer.value


def test_a_step_that_waits_is_cancelled_at_once() -> None:
    world = world_with()
    world.step(1, (1, 77), (3, 4))
    assert cancel(world, 1) == do.Cancellation(cancelled=(1,), running=())
    assert isinstance(error_of(world), StepCancelledError)
    world.passes(10)
    assert not world.take(do.StopExecutor)
    world.step(2, (1, 2), (5, 6))
    assert world.runs() == [2], "the session goes on"


def test_a_step_may_be_cancelled_before_it_comes() -> None:
    world = world_with()
    assert cancel(world, 1) == do.Cancellation(cancelled=(1,), running=())
    world.step(1, (1, 2), (3, 4))
    assert not world.runs()
    assert isinstance(error_of(world), StepCancelledError)
    world.step(2, (1, 2), (5, 6))
    assert world.runs() == [2]


def test_a_cancelled_step_may_end_by_itself() -> None:
    world = world_with()
    world.step(1, (1, 2), (3, 4))
    assert cancel(world, 1, 77) == do.Cancellation(cancelled=(), running=(1,))
    world.passes(4)
    world.all_done()
    world.passes(10)
    assert [reply.error for reply in world.take(do.ReplyStep)] == [None]
    assert not world.take(do.StopExecutor)


def test_a_cancelled_step_that_does_not_end_is_ended() -> None:
    world = world_with()
    world.step(1, (1, 2), (3, 4))
    world.step(2, (3, 4), (5, 6))
    cancel(world, 1, 2)
    world.passes(6)
    assert len(world.take(do.StopExecutor)) == 2
    replies = world.take(do.ReplyStep)
    assert [type(reply.error) for reply in replies] == [StepCancelledError, StepCancelledError]
    assert "step 1 of session s was cancelled, and did not end within 5 s" in str(replies[0].error)
    world.executor_dies(0)
    world.executor_dies(1)
    assert world.state.formation.generation == 2


def test_the_grace_of_a_cancelled_step_is_twice_what_it_took_before() -> None:
    world = world_with()
    world.step(1, (1, 2), (3, 4))
    world.passes(20)
    world.all_done()
    world.step(2, (3, 4), (5, 6))
    cancel(world, 2)
    world.passes(38)
    assert not world.take(do.StopExecutor)
    world.passes(4)
    assert world.take(do.StopExecutor)


def test_a_closed_session_takes_its_step_along() -> None:
    world = world_with()
    world.step(1, (1, 2), (3, 4))
    world.send(ev.SessionClosed(call=60, session_id="s"))
    world.passes(4)
    assert not world.take(do.StopExecutor)
    world.passes(2)
    assert len(world.take(do.StopExecutor)) == 2
    assert "step 1 of session s was cancelled" in str(world.state.sessions["other"].why_gone(1))


def test_cancelling_in_a_session_that_is_gone_is_told() -> None:
    world = ready_world()
    world.send(ev.StepsCancelled(call=50, session_id="nobody", numbers=(1,)))
    (failure,) = world.take(do.Fail)
    assert isinstance(failure.error, SessionError)


def test_a_load_that_hangs_is_not_tried_again() -> None:
    world = world_with(replace(LIMITS, load_s=30.0))
    program = replace(PROGRAM, plan_id="hangs")
    world.send(ev.LoadRequested(call=70, session_id="s", plan_id="hangs"))
    world.send(ev.CompileFinished(plan_id="hangs", program=program))
    world.passes(31)
    (failure,) = world.take(do.Fail)
    assert failure.call == 70
    assert "the load of plan hangs" in str(failure.error)
    assert "hangs" not in world.state.sessions["s"].executables
