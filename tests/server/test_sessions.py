"""Sessions, arrays and numbered steps: `MasterState` without a network."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.errors import (
    ArrayError,
    CompilationAbortedError,
    DeadlineError,
    ExecutionError,
    ResourceLimitError,
    SessionError,
    ShardwrightError,
    WorkerLostError,
)
from shardwright.server.limits import Limits
from shardwright.server.master import commands as do
from shardwright.server.master import events as ev
from tests.server.simulation import PROGRAM, World, ready_world


def error_of(world: World) -> ShardwrightError:
    """The error of the one step that was replied to."""
    (reply,) = world.take(do.ReplyStep)
    assert reply.error is not None
    return reply.error


# ---- steps -------------------------------------------------------------------
def test_a_step_runs_on_every_node_and_is_replied_once_all_are_done() -> None:
    world = ready_world()
    world.step(1, (1, 2), (3, 4))
    (order,) = world.orders
    world.done(order.sequence, 1, run_s=0.5, values=())
    assert not world.take(do.ReplyStep)
    world.done(order.sequence, 0, run_s=0.2, values=("loss",))
    (reply,) = world.take(do.ReplyStep)
    assert (reply.number, reply.error, reply.values, reply.run_s) == (1, None, ("loss",), 0.5)


def test_traces_of_all_nodes_come_with_the_reply() -> None:
    world = ready_world()
    world.step(1, (1, 2), (3, 4))
    (order,) = world.orders
    world.done(order.sequence, 0, traces=("stage 0",))
    world.done(order.sequence, 1, traces=("stage 1", "stage 2"))
    (reply,) = world.take(do.ReplyStep)
    assert reply.traces == ("stage 0", "stage 1", "stage 2")


def test_a_step_that_failed_on_one_node_is_ended_on_the_others() -> None:
    world = ready_world(node_count=3)
    world.step(1, (1, 2), (3, 4))
    (order,) = world.orders
    world.done(order.sequence, 2)
    failure = ExecutionError("no memory left", where="stage 1, task 7")
    world.done(order.sequence, 1, error=failure)
    (abort,) = world.take(do.AbortOnWorkers)
    assert (abort.sequence, abort.nodes, abort.error) == (order.sequence, frozenset({0}), failure)
    world.done(order.sequence, 0, error=ExecutionError("ended elsewhere"))
    assert not world.take(do.AbortOnWorkers), "nobody is left to be told"
    assert error_of(world) is failure


def test_a_lost_worker_is_named_with_the_stages_that_it_computed() -> None:
    world = ready_world(node_count=3)
    nodes = (frozenset({0}), frozenset({1}), frozenset({1, 2}))
    world.load(replace(PROGRAM, plan_id="pipeline", stages=nodes))
    world.step(1, (1, 2), (3, 4), executable_id="pipeline")
    world.executor_dies(1)
    error = error_of(world)
    assert isinstance(error, WorkerLostError)
    assert "node 1" in error.message
    assert "it computed stages 1, 2 of step 1" in error.message


def test_an_array_on_some_devices_is_there_once_their_nodes_have_it() -> None:
    world = ready_world(node_count=3)  # of four devices each
    world.arrives(7, 1, devices=range(4, 10))
    world.step(1, (1, 7), (3, 4))
    assert not world.runs(), "node 2 holds a part of it"
    world.arrives(7, 2, devices=range(4, 10))
    assert world.runs() == [1]


def test_steps_are_dispatched_ahead_of_each_other() -> None:
    world = ready_world()
    world.step(1, (1, 2), (3, 4))
    world.step(2, (3, 2), (5, 6))
    assert world.runs() == [1, 2]


def test_a_number_is_executed_once_however_often_it_is_sent() -> None:
    world = ready_world()
    world.step(1, (1, 2), (3, 4))
    world.step(1, (1, 2), (3, 4))
    assert world.runs() == [1]
    world.all_done(values=("loss",))
    world.send(ev.StepsClosed(stream=1))
    world.send(ev.StepsOpened(stream=2, session_id="s"))
    world.take(do.ReplyStep)
    world.step(1, (1, 2), (3, 4), stream=2)
    (reply,) = world.take(do.ReplyStep)
    assert (reply.stream, reply.number, reply.values) == (2, 1, ("loss",))
    assert not world.orders


def test_replies_that_a_broken_stream_missed_come_in_order_after_resending() -> None:
    world = ready_world()
    for number in (1, 2, 3):
        world.step(number, (2 * number - 1 if number > 1 else 1, 2), (2 * number + 1, 2 * number + 2 + 100))
    world.send(ev.StepsClosed(stream=1))
    world.all_done()
    assert not world.take(do.ReplyStep)
    world.send(ev.StepsOpened(stream=2, session_id="s"))
    for number in (2, 3):
        world.step(number, (0, 0), (0, 0), stream=2)
    assert [reply.number for reply in world.take(do.ReplyStep)] == [2, 3]
    assert world.state.sessions["s"].last_number == 3


def test_a_newer_stream_ends_the_older() -> None:
    world = ready_world()
    world.send(ev.StepsOpened(stream=2, session_id="s"))
    (end,) = world.take(do.EndStream)
    assert end.stream == 1
    world.step(1, (1, 2), (3, 4), stream=1)
    assert not world.runs(), "what the older stream still says is not heard"


@pytest.mark.parametrize(("number", "message"), [(3, "does not follow"), (0, "does not follow")])
def test_numbers_must_follow_each_other(number: int, message: str) -> None:
    world = ready_world()
    world.step(1, (1, 2), (3, 4))
    world.step(number, (1, 2), (5, 6))
    (end,) = world.take(do.EndStream)
    assert isinstance(end.error, SessionError)
    assert message in end.error.message


def test_too_many_steps_ahead_of_the_replies_end_the_stream() -> None:
    world = ready_world()
    for number in range(1, world.limits.pending_steps + 1):
        world.step(number, (9, 8), (0, 0))
    assert not world.take(do.EndStream)
    world.step(world.limits.pending_steps + 1, (9, 8), (0, 0))
    (end,) = world.take(do.EndStream)
    assert isinstance(end.error, ResourceLimitError)


def test_a_failed_step_fails_what_reads_its_outputs_and_nothing_else() -> None:
    world = ready_world()
    world.step(1, (1, 2), (3, 4))
    world.all_done(error=ExecutionError("out of memory"))
    assert "out of memory" in error_of(world).message
    world.step(2, (3, 2), (5, 6))
    assert "out of memory" in error_of(world).message
    assert not world.runs()
    world.all_done()
    world.arrives(7)
    world.step(3, (7, 2), (8, 9))
    assert world.runs() == [3]


# ---- arrays --------------------------------------------------------------------
def test_a_step_waits_until_its_arguments_are_on_every_node() -> None:
    world = ready_world()
    world.step(1, (7, 2), (3, 4))
    world.arrives(7, 0)
    assert not world.runs()
    world.arrives(7, 1)
    assert world.runs() == [1]


def test_an_argument_that_never_comes_is_an_error_that_names_it() -> None:
    world = ready_world()
    world.step(1, (7, 2), (3, 4))
    world.arrives(7, 0)
    world.later(world.limits.argument_wait_s + 1)
    error = error_of(world)
    assert isinstance(error, ArrayError)
    assert "array 7, an argument of step 1, was not written" in error.message
    (poison,) = world.orders
    assert isinstance(poison, do.ReleaseOnWorkers)
    assert (poison.array_ids, poison.error) == ((3, 4), error), "whoever fetches an output there is told"


def test_inline_arguments_need_no_put_and_stay() -> None:
    world = ready_world()
    world.step(1, (1, 50), (3, 4), inline=((50, 8),))
    world.step(2, (3, 50), (5, 6))
    assert world.runs() == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "outputs", "more", "message"),
    [
        ((1, 2), (5, 6), {}, "array 1 was donated to step 1"),
        ((3, 3), (5, 6), {}, "array 3 is donated as argument 0 and passed twice"),
        ((3, 2), (4, 6), {}, "array id 4 is in use already"),
        ((3, 2), (5, 5), {}, "given to two new arrays"),
        ((3, 2), (5, 6), {"released": (2,)}, "array 2 is released before"),
        ((3, 2), (5, 6), {"executable_id": "x"}, "no executable"),
        ((3,), (5, 6), {}, "1 arguments and 2 outputs for a program of 2 and 2"),
    ],
)
def test_steps_that_cannot_run_are_refused_by_name(
    arguments: tuple[int, ...], outputs: tuple[int, ...], more: dict[str, object], message: str
) -> None:
    world = ready_world()
    world.step(1, (1, 2), (3, 4))
    world.all_done()
    world.take(do.ReplyStep)
    world.step(2, arguments, outputs, **more)
    assert message in error_of(world).message
    assert not world.runs()


def test_released_arrays_are_gone_and_counted() -> None:
    world = ready_world()
    world.send(ev.ReleaseRequested(call=5, session_id="s", array_ids=(2, 99), after_step=0))
    (order,) = world.orders
    assert isinstance(order, do.ReleaseOnWorkers)
    assert order.array_ids == (2,), "unknown ids are ignored"
    assert world.state.sessions["s"].array_bytes == 8
    world.step(1, (1, 2), (3, 4))
    assert "array 2 was released" in error_of(world).message


def test_a_release_waits_for_the_steps_that_were_sent_before_it() -> None:
    world = ready_world()
    world.step(1, (7, 2), (3, 4))
    world.send(ev.ReleaseRequested(call=5, session_id="s", array_ids=(2,), after_step=1))
    world.send(ev.ReleaseRequested(call=6, session_id="s", array_ids=(3,), after_step=2))
    assert not world.orders
    world.arrives(7)
    assert [type(order) for order in world.orders] == [do.RunOnWorkers, do.ReleaseOnWorkers]
    world.arrives(60)
    world.step(2, (3, 60), (8, 9))
    assert [type(order) for order in world.orders][2:] == [do.RunOnWorkers], "3 was donated: nothing to free"
    assert [answer.call for answer in world.take(do.Answer)] == [5, 6]


def test_arrays_over_the_sessions_limit_are_refused() -> None:
    world = ready_world()
    world.step(1, (1, 50), (3, 4), inline=((50, 990),))
    assert isinstance(error_of(world), ResourceLimitError)


def test_an_upload_over_the_sessions_limit_is_freed_and_its_readers_are_told() -> None:
    world = ready_world()
    for array_id in range(10, 10 + 1000 // 8):
        world.arrives(array_id)
    assert world.state.sessions["s"].array_bytes <= 1000
    last = 10 + 1000 // 8 - 1
    assert any(isinstance(order, do.ReleaseOnWorkers) and order.array_ids == (last,) for order in world.orders)
    world.orders.clear()
    world.step(1, (last, 2), (3, 4))
    assert isinstance(error_of(world), ResourceLimitError)


# ---- executables ---------------------------------------------------------------
def test_loading_twice_compiles_once() -> None:
    world = ready_world()
    world.send(ev.LoadRequested(call=8, session_id="s", plan_id="plan"))
    (answer,) = world.take(do.Answer)
    assert answer.value is PROGRAM
    assert not world.take(do.Compile)


def test_a_compiler_that_aborts_fails_the_load_only() -> None:
    world = ready_world()
    world.send(ev.LoadRequested(call=8, session_id="s", plan_id="bad"))
    world.send(ev.LoadRequested(call=9, session_id="s", plan_id="bad"))
    world.send(ev.CompileFinished(plan_id="bad", error=CompilationAbortedError("boom")))
    assert [(fail.call, fail.error.message) for fail in world.take(do.Fail)] == [(8, "boom"), (9, "boom")]
    world.step(1, (1, 2), (3, 4))
    assert world.runs() == [1]
    world.send(ev.LoadRequested(call=10, session_id="s", plan_id="bad"))
    assert world.take(do.Compile)[-1].plan_id == "bad", "and may be tried again"


def test_a_load_that_a_worker_refuses_fails_with_its_error() -> None:
    world = ready_world()
    world.send(ev.LoadRequested(call=8, session_id="s", plan_id="other"))
    world.send(ev.CompileFinished(plan_id="other", program=PROGRAM.__class__(
        plan_id="other", argument_count=0, donated=frozenset(), output_bytes=())))  # fmt: skip
    world.all_done(error=ExecutionError("shardings differ"))
    assert [fail.error.message for fail in world.take(do.Fail)] == ["shardings differ"]


def test_unloaded_is_unloaded() -> None:
    world = ready_world()
    world.send(ev.UnloadRequested(call=8, session_id="s", executable_id="plan"))
    assert [type(order) for order in world.orders] == [do.UnloadOnWorkers]
    world.step(1, (1, 2), (3, 4))
    assert "no executable" in error_of(world).message


# ---- loss and recovery ------------------------------------------------------------
def test_a_lost_worker_fails_running_steps_and_arrays_and_the_session_goes_on() -> None:
    world = ready_world()
    world.step(1, (1, 2), (3, 4))
    world.executor_dies(1)
    assert isinstance(error_of(world), WorkerLostError)
    world.step(2, (3, 2), (5, 6))
    error = error_of(world)
    assert isinstance(error, WorkerLostError)
    assert "run init again" in error.remedy
    world.orders.clear()
    world.executor_dies(0)
    for node in (0, 1):
        world.executor_joins(node)
    world.step(3, (50, 51), (7, 8), inline=((50, 8), (51, 8)))
    world.all_done()
    (reply,) = world.take(do.ReplyStep)
    assert (reply.number, reply.error) == (3, None), "session and executable came back by themselves"


def test_a_step_for_a_cluster_that_stays_away_is_an_error() -> None:
    world = ready_world()
    world.executor_dies(1)
    world.step(1, (50, 51), (7, 8), inline=((50, 8), (51, 8)))
    world.later(world.limits.argument_wait_s + 1)
    error = error_of(world)
    assert isinstance(error, DeadlineError)
    assert "the executor of node 1 was lost" in error.message
    assert "start the nodes" in error.remedy


def test_a_step_for_a_node_that_stays_away_names_it() -> None:
    world = ready_world()
    world.node_leaves(1)
    world.executor_dies(0)
    world.step(1, (50, 51), (7, 8), inline=((50, 8), (51, 8)))
    world.later(world.limits.argument_wait_s + 1)
    error = error_of(world)
    assert isinstance(error, DeadlineError)
    assert "node 1 is missing (host:1: its daemon ended" in error.message
    assert "task number 1" in error.remedy


def test_a_program_for_a_node_that_stays_away_is_an_error_and_loaded_once_it_is_back() -> None:
    world = ready_world()
    world.node_leaves(1)
    world.executor_dies(0)
    world.later(3600.0)
    world.send(ev.LoadRequested(call=20, session_id="s", plan_id="new"))
    world.later(world.limits.argument_wait_s - 1)
    world.send(ev.CompileFinished(plan_id="new", program=replace(PROGRAM, plan_id="new")))
    world.later(world.limits.argument_wait_s - 1)
    assert not world.take(do.Fail), "it has waited for the node since it was compiled"
    world.later(2.0)
    (failure,) = world.take(do.Fail)
    assert failure.call == 20
    assert isinstance(failure.error, DeadlineError)
    assert "node 1 is missing" in failure.error.message
    world.send(ev.LoadRequested(call=21, session_id="s", plan_id="new"))
    world.daemon_joins(1, connection=31)
    for node in range(2):
        world.executor_joins(node)
    world.all_done()
    assert [answer.call for answer in world.take(do.Answer)] == [21]


def test_a_step_that_waited_for_its_program_runs_once_it_is_loaded() -> None:
    world = ready_world()
    world.executor_dies(1)
    world.executor_dies(0)
    world.step(1, (50, 51), (7, 8), inline=((50, 8), (51, 8)))
    for node in range(2):
        world.executor_joins(node)
    world.all_done_of(do.OpenOnWorkers)
    world.later(world.limits.argument_wait_s + 1)
    world.all_done()
    assert [reply.error for reply in world.take(do.ReplyStep)] == [None]


def test_a_session_asked_for_before_the_workers_come_is_opened_then() -> None:
    world = World()
    world.send(ev.SessionRequested(call=1, session_id="s"))
    assert not world.take(do.Answer)
    world.form()
    world.all_done()
    assert [answer.call for answer in world.take(do.Answer)] == [1]


def test_executors_that_part_ways_are_started_anew() -> None:
    world = ready_world()
    world.step(1, (1, 2), (3, 4))
    (order,) = world.orders
    world.done(order.sequence, 0, error=ExecutionError("out of memory"))
    world.later(world.limits.divergence_s + 1)
    assert len(world.take(do.StopExecutor)) == 2
    assert isinstance(error_of(world), WorkerLostError)


# ---- ends ---------------------------------------------------------------------------
def test_a_session_without_a_client_expires_and_frees_its_arrays() -> None:
    world = ready_world()
    world.later(world.limits.grace_s + 1)
    assert "s" in world.state.sessions, "an open stream keeps it"
    world.send(ev.StepsClosed(stream=1))
    world.later(world.limits.grace_s - 1)
    world.send(ev.SessionTouched(session_id="s"))
    world.later(world.limits.grace_s - 1)
    assert "s" in world.state.sessions
    world.later(2)
    assert "s" not in world.state.sessions
    assert [type(order) for order in world.orders] == [do.CloseOnWorkers]
    assert [ended.session_id for ended in world.take(do.SessionEnded)] == ["s"]


def test_closing_ends_the_stream_and_calls_and_may_be_repeated() -> None:
    world = ready_world()
    world.send(ev.LoadRequested(call=8, session_id="s", plan_id="slow"))
    for call in (20, 21):
        world.send(ev.SessionClosed(call=call, session_id="s"))
    assert [answer.call for answer in world.take(do.Answer)] == [20, 21]
    assert [fail.call for fail in world.take(do.Fail)] == [8]
    assert [end.stream for end in world.take(do.EndStream)] == [1]


def test_there_is_a_limit_of_sessions() -> None:
    world = ready_world()
    world.send(ev.SessionRequested(call=30, session_id="t"))
    world.send(ev.SessionRequested(call=31, session_id="u"))
    (fail,) = world.take(do.Fail)
    assert fail.call == 31
    assert isinstance(fail.error, ResourceLimitError)


@pytest.mark.parametrize(
    "event",
    [
        ev.LoadRequested(call=1, session_id="no", plan_id="p"),
        ev.UnloadRequested(call=1, session_id="no", executable_id="p"),
        ev.ReleaseRequested(call=1, session_id="no", array_ids=(1,), after_step=0),
        ev.StepsOpened(stream=1, session_id="no"),
    ],
)
def test_an_unknown_session_is_named(event: ev.Event) -> None:
    (command,) = World().send(event)
    assert isinstance(command, do.Fail | do.EndStream)
    assert isinstance(command.error, SessionError)
    assert "no session no" in command.error.message


def test_a_program_that_nobody_waits_for_is_not_compiled_to_its_end() -> None:
    world = ready_world()
    world.send(ev.SessionRequested(call=30, session_id="t"))
    world.all_done()
    for call, session_id in ((31, "s"), (32, "t"), (33, "t")):
        world.send(ev.LoadRequested(call=call, session_id=session_id, plan_id="slow"))
    for call, session_id in ((31, "s"), (32, "t")):
        world.send(ev.LoadAbandoned(call=call, session_id=session_id, plan_id="slow"))
    assert not world.take(do.CancelCompile), "another client waits for it"
    world.send(ev.LoadAbandoned(call=33, session_id="t", plan_id="slow"))
    assert [cancelled.plan_id for cancelled in world.take(do.CancelCompile)] == ["slow"]
    world.send(ev.LoadRequested(call=34, session_id="t", plan_id="slow"))
    assert [order.plan_id for order in world.take(do.Compile)][-1] == "slow", "and begins anew"
    world.send(ev.SessionClosed(call=35, session_id="t"))
    assert [cancelled.plan_id for cancelled in world.take(do.CancelCompile)] == ["slow"]


def test_the_session_that_is_missed_least_gives_way() -> None:
    world = ready_world()  # "s" has arrays, a program and a client
    world.send(ev.SessionRequested(call=30, session_id="empty"))
    world.all_done()
    world.send(ev.SessionRequested(call=31, session_id="new"))
    assert [fail.call for fail in world.take(do.Fail)] == [31], "nobody has been idle"
    world.later(world.limits.evict_idle_s + 1)
    world.send(ev.SessionRequested(call=32, session_id="new"))
    assert set(world.state.sessions) == {"s", "new"}
    world.all_done()
    world.later(world.limits.evict_idle_s + 1)
    world.send(ev.StepsOpened(stream=7, session_id="new"))
    world.send(ev.SessionRequested(call=33, session_id="newer"))
    assert set(world.state.sessions) == {"s", "new"}, "the one has arrays and a client, the other was just heard"
    world.send(ev.StepsClosed(stream=1))
    world.later(world.limits.evict_idle_s + 1)
    world.send(ev.StepsOpened(stream=8, session_id="new"))
    world.take(do.Fail)
    world.send(ev.SessionRequested(call=34, session_id="newer"))
    (full,) = world.take(do.Fail)
    assert isinstance(full.error, ResourceLimitError)
    assert set(world.state.sessions) == {"s", "new"}, "its client is away, and may come back to its arrays"
    world.later(world.limits.grace_s)
    world.send(ev.SessionRequested(call=35, session_id="newer"))
    assert set(world.state.sessions) == {"new", "newer"}, "its client was away for too long"


def test_a_session_that_asks_for_nothing_for_long_ends() -> None:
    world = World(limits=Limits(session_idle_s=100.0))
    world.form()
    world.open_session()
    world.later(99)
    world.send(ev.SessionTouched(session_id="s"))
    world.later(99)
    assert "s" in world.state.sessions
    world.later(2)
    (end,) = world.take(do.EndStream)
    assert "its client asked for nothing for 100 s" in end.error.message
