"""What a server that drains takes, refuses and waits for; with a clock that is moved by hand."""

from __future__ import annotations

from shardwright.errors import ServerDrainingError, WorkerLostError
from shardwright.server.master import commands as do
from shardwright.server.master import events as ev
from shardwright.server.master import watchdog
from tests.server.simulation import World, ready_world

SIGTERM = ev.DrainRequested(reason="SIGTERM", limit_s=30.0)


def drained(world: World) -> bool:
    return bool(world.take(do.Drained))


def errors(world: World) -> dict[int, Exception | None]:
    return {reply.number: reply.error for reply in world.take(do.ReplyStep)}


def test_steps_sent_before_the_notice_run_and_later_ones_do_not() -> None:
    world = ready_world()
    world.step(1, (1, 2), (10, 11))
    world.send(SIGTERM)
    (notice,) = world.take(do.DrainNotice)
    assert (notice.stream, notice.reason, notice.left_s) == (1, "the server is ending (SIGTERM)", 30.0)
    assert watchdog.summarize(world.state) == "draining"
    world.step(2, (10, 2), (20, 21))  # it was on its way
    assert world.runs() == [1, 2]
    world.passes(2.5)
    world.step(3, (20, 2), (30, 31))
    assert world.runs() == [1, 2]
    world.all_done()
    outcome = errors(world)
    assert outcome[1] is None
    assert outcome[2] is None
    assert isinstance(outcome[3], ServerDrainingError)
    assert 20 in world.state.sessions["s"].arrays, "what the refused step would have taken over is there"


def test_a_step_that_waits_for_an_argument_is_told_soon() -> None:
    world = ready_world()
    world.step(1, (99, 2), (10, 11))
    world.send(SIGTERM)
    assert not world.take(do.ReplyStep), "the argument may be on its way"
    world.passes(3.0)
    assert isinstance(errors(world)[1], ServerDrainingError)


def test_a_save_is_taken_and_waited_for() -> None:
    world = ready_world()
    world.send(SIGTERM)
    world.passes(1.0)
    world.step(1, (2,), (), executable_id="", files=ev.FileStepInfo(is_save=True))
    world.all_done_of(do.RunOnWorkers)
    world.passes(20.0)
    assert not drained(world), "it is being written"
    world.all_done(written_bytes=4)
    world.passes(1.0)
    assert not drained(world), "its client may have more to do"
    world.send(ev.SessionClosed(call=5, session_id="s"))
    world.later(0.5)
    assert drained(world)


def test_nobody_is_waited_for_who_has_nothing_here_or_is_gone() -> None:
    world = World()
    world.form()
    world.open_session()
    world.send(SIGTERM)
    assert drained(world), "it has no arrays"
    world = ready_world()
    world.send(ev.StepsClosed(stream=1))
    world.send(SIGTERM)
    assert drained(world), "its client is gone"
    world = World()
    world.send(ev.SessionRequested(call=1, session_id="s"))
    world.send(SIGTERM)
    (fail,) = world.take(do.Fail)
    assert isinstance(fail.error, ServerDrainingError), "it waited for workers"
    assert drained(world)


def test_a_transfer_that_goes_on_is_waited_for() -> None:
    world = ready_world()
    world.heard[1] = {"transfers": 2}
    world.send(SIGTERM)
    world.passes(20.0)
    assert not drained(world)
    assert "2 transfers of arrays" in watchdog.waiting_for(world.state)
    world.heard.clear()
    world.passes(3.0)
    assert not drained(world)
    world.passes(2.0)
    assert drained(world)


def test_at_the_limit_what_runs_is_cut_off_by_name() -> None:
    world = ready_world()
    world.step(1, (1, 2), (10, 11))
    world.send(SIGTERM)
    world.passes(29.0)
    assert not drained(world)
    world.passes(2.0)
    assert drained(world)
    error = errors(world)[1]
    assert isinstance(error, ServerDrainingError)
    assert "did not end in time" in error.message


def test_loads_and_sessions_are_refused_and_waiting_loads_told() -> None:
    world = ready_world()
    world.send(ev.LoadRequested(call=7, session_id="s", plan_id="other"))
    world.send(SIGTERM)
    assert [fail.call for fail in world.take(do.Fail)] == [7]
    world.send(ev.LoadRequested(call=8, session_id="s", plan_id="another"))
    world.send(ev.SessionRequested(call=9, session_id="t"))
    failed = world.take(do.Fail)
    assert [fail.call for fail in failed] == [8, 9]
    assert all(isinstance(fail.error, ServerDrainingError) for fail in failed)


def test_a_node_leaves_and_the_server_goes_on() -> None:
    world = ready_world()
    world.send(ev.DrainRequested(connection=11, reason="SIGTERM", limit_s=30.0))
    (notice,) = world.take(do.DrainNotice)
    assert notice.reason == "node 1 will leave (SIGTERM)"
    world.passes(2.0)
    assert not drained(world), "its client has arrays"
    world.passes(3.0)
    (done,) = world.take(do.Drained)
    assert done.nodes == frozenset({1})
    world.node_leaves(1)
    world.later(0.5)
    (over,) = world.take(do.DrainNotice)
    assert over.reason == ""
    world.executor_dies(0)
    world.daemon_joins(1)
    world.executor_joins(0)
    world.executor_joins(1)
    assert world.state.formation.phase == "ready"
    world.all_done_of(do.OpenOnWorkers)
    told = [order for order in world.orders if isinstance(order, do.ReleaseOnWorkers)]
    assert {array_id for order in told for array_id in order.array_ids} == {1, 2}, "new executors know what is lost"
    assert all(isinstance(order.error, WorkerLostError) for order in told)
    world.step(1, (1, 2), (10, 11))
    error = errors(world)[1]
    assert isinstance(error, WorkerLostError)
    assert "node 1" in error.message
    assert "it was drained (SIGTERM)" in error.message


def test_the_whole_server_drains_although_a_node_does() -> None:
    world = ready_world()
    world.send(ev.DrainRequested(connection=11, reason="notice", limit_s=60.0))
    world.send(SIGTERM)
    assert [notice.reason for notice in world.take(do.DrainNotice)][-1] == "the server is ending (SIGTERM)"
    world.send(ev.DrainRequested(connection=10, reason="notice", limit_s=60.0))
    assert not world.take(do.DrainNotice), "that is included"
    world.passes(6.0)
    (done,) = world.take(do.Drained)
    assert done.nodes is None
