"""What ends executors again and again: who is suspected, who is stopped, who pays; with a clock moved by hand."""

from __future__ import annotations

import mmap
from dataclasses import replace

import pytest

from shardwright.errors import ExecutionError, RepeatedLossError, StepTimeoutError, WorkerLostError
from shardwright.server.black_box import BlackBox, Work, dataset_key
from shardwright.server.limits import Limits
from shardwright.server.master import commands as do
from shardwright.server.master import events as ev
from tests.server.simulation import PROGRAM, World

LIMITS = Limits(pending_steps=16, session_array_bytes=100_000, step_s=50.0)
KEY = dataset_key("data:batches", "{}")


def killed_by(world: World, *works: Work, exit_code: int = 3, node: int = 0) -> None:
    """The executor of a node ends while it is busy with this, and the next generation comes."""
    world.send(
        ev.ExecutorExited(
            connection=10 + node, generation=world.generation_of[node], exit_code=exit_code, last_lines="",
            coordinator_address="host:0", works=works,
        )
    )  # fmt: skip
    others = [other for other in range(world.node_count) if other != node]
    for other in others:
        world.send(
            ev.ExecutorExited(
                connection=10 + other, generation=world.generation_of[other], exit_code=-9, last_lines="",
                coordinator_address="host:1", works=works, was_killed=True,
            )
        )  # fmt: skip
    world.orders.clear()
    for each in range(world.node_count):
        world.executor_joins(each)
    world.all_done_of(do.OpenOnWorkers)
    world.all_done_of(do.LoadOnWorkers)
    world.all_done_of(do.ReleaseOnWorkers)


@pytest.fixture
def world() -> World:
    return world_of(2)


def world_of(node_count: int) -> World:
    """Two sessions, "s" on stream 1 and "other" on stream 9, each with a program; owners are others."""
    world = World(node_count=node_count, limits=LIMITS)
    world.form()
    for session_id, stream, plan_id in (("s", 1, "killer"), ("other", 9, "good")):
        world.send(ev.SessionRequested(call=stream, session_id=session_id, owner=f"owner of {session_id}"))
        world.all_done()
        world.send(ev.StepsOpened(stream=stream, session_id=session_id))
        load(world, session_id, plan_id)
    world.commands.clear()
    return world


def load(world: World, session_id: str, plan_id: str) -> None:
    world.send(ev.LoadRequested(call=5, session_id=session_id, plan_id=plan_id))
    world.send(ev.CompileFinished(plan_id=plan_id, program=replace(PROGRAM, plan_id=plan_id, donated=frozenset())))
    world.all_done()


def step(world: World, number: int, session_id: str = "s", first_id: int = 0, **more: object) -> int:
    """A step that brings its arguments along; returns its sequence number, 0: it was not sent."""
    before, first_id = len(world.orders), first_id or 10 * number
    how: dict[str, object] = {
        "session_id": session_id, "stream": 1 if session_id == "s" else 9, "name": f"train_{session_id}",
        "executable_id": "killer" if session_id == "s" else "good",
        "inline": ((first_id, 4), (first_id + 1, 4)),
    }  # fmt: skip
    world.step(number, (first_id, first_id + 1), (first_id + 2, first_id + 3), **(how | more))
    return sequence_of(world, session_id, number) if len(world.orders) > before else 0


def sequence_of(world: World, session_id: str, number: int) -> int:
    return next(
        (
            order.sequence
            for order in world.orders
            if isinstance(order, do.RunOnWorkers) and (order.step.session_id, order.step.number) == (session_id, number)
        ),
        0,
    )


def errors(world: World, stream: int) -> list[type | None]:
    return [type(reply.error) if reply.error else None for reply in world.take(do.ReplyStep) if reply.stream == stream]


# ---- steps -------------------------------------------------------------------------------
@pytest.mark.parametrize("node_count", [1, 2])
def test_a_step_that_ends_its_executor_is_stopped_after_five_times(node_count: int) -> None:
    world = world_of(node_count)
    for number in range(1, 6):
        sequence = step(world, number)
        assert sequence
        killed_by(world, Work(sequence=sequence))
    replies = world.take(do.ReplyStep)
    assert [type(reply.error) for reply in replies] == [WorkerLostError] * 5
    assert "busy with step 1 (train_s) of session s" in str(replies[0].error), "each loss names it"
    assert not step(world, 6)
    (reply,) = world.take(do.ReplyStep)
    assert isinstance(reply.error, RepeatedLossError)
    assert "step 5 (train_s) of session s of owner of s ended the executors 5 times" in reply.error.message
    assert any("ended the executors" in log.text and log.is_warning for log in world.take(do.Log))
    world.send(ev.LoadRequested(call=70, session_id="s", plan_id="killer"))
    (failure,) = world.take(do.Fail)
    assert isinstance(failure.error, RepeatedLossError), "it is not loaded again either"
    assert step(world, 1, "other"), "others go on"
    load(world, "s", "mended")
    assert step(world, 7, executable_id="mended"), "and so does the session"


def test_whoever_was_there_by_chance_is_not_stopped(world: World) -> None:
    """The other session's step is there at each death, as long as it may be."""
    number, together = 0, 0
    while not world.state.quarantine.stopped:
        number += 1
        theirs, mine = step(world, number, "other"), step(world, number)
        if mine:
            together += 1
            killed_by(world, Work(sequence=theirs), Work(sequence=mine))
            continue
        for node in range(2):
            world.done(theirs, node)
        killed_by(world, Work(sequence=sequence_of(world, "s", number)))
    assert (number, together) == (5, 2), "twice suspected, each runs alone"
    assert [suspect.session_id for suspect in world.state.quarantine.stopped] == ["s"]
    assert not world.state.quarantine.records, "who stopped explains all of those deaths"


def test_a_step_on_trial_is_not_overtaken_for_ever(world: World) -> None:
    for number in (1, 2):
        killed_by(world, Work(sequence=step(world, number)))
    first = step(world, 1, "other")
    assert not step(world, 3)
    assert not step(world, 2, "other"), "it waits behind the one on trial"
    for node in range(2):
        world.done(first, node)
    mine = sequence_of(world, "s", 3)
    assert mine
    assert not sequence_of(world, "other", 2)
    for node in range(2):
        world.done(mine, node)
    assert sequence_of(world, "other", 2)


def test_a_step_that_a_success_clears_does_not_wait_for_itself(world: World) -> None:
    """The step before it clears them both, while another suspect is left."""
    killed_by(world, Work(sequence=step(world, 1)), Work(sequence=step(world, 1, "other")), exit_code=-9)
    killed_by(world, Work(sequence=step(world, 2)), exit_code=-9)
    first = step(world, 3)
    assert not step(world, 4), "they run alone"
    for node in range(2):
        world.done(first, node)
    assert sequence_of(world, "s", 4)


@pytest.mark.parametrize(("exit_code", "successes"), [(-9, 1), (1, 1), (3, 20), (-11, 20)])
def test_success_clears(world: World, exit_code: int, successes: int) -> None:
    """One, where the executor may have been killed from outside; more, where it ended of itself."""
    number = 0
    for _ in range(4):
        number += 1
        killed_by(world, Work(sequence=step(world, number)), exit_code=exit_code)
    for count in range(successes):
        assert len(world.state.quarantine.records) == 1, count
        number += 1
        step(world, number)
        world.all_done()
    assert not world.state.quarantine.records
    killed_by(world, Work(sequence=step(world, number + 1)), exit_code=exit_code)
    assert not world.state.quarantine.stopped


def test_a_replay_is_no_success(world: World) -> None:
    """A client with snapshots sends the steps before the one that kills again each time."""
    number = 0
    for _ in range(5):
        world.state.sessions["s"].drop_reasons.clear()  # as the restore of a snapshot does
        for first_id in (100, 110, 120):
            number += 1
            sequence = step(world, number, first_id=first_id, generation=world.state.formation.generation)
            if first_id < 120:
                world.all_done()
        killed_by(world, Work(sequence=sequence), exit_code=-9)
    assert [suspect.key for suspect in world.state.quarantine.stopped] == ["killer"]


def test_an_hour_without_a_death_clears(world: World) -> None:
    for number in range(1, 5):
        killed_by(world, Work(sequence=step(world, number)))
    world.now_s += 3601
    killed_by(world, Work(sequence=step(world, 5)))
    assert not world.state.quarantine.stopped


def test_executors_that_were_stopped_on_purpose_accuse_nobody(world: World) -> None:
    sequence = step(world, 1)
    world.send(ev.StepsEnded(call=60, session_id="s", number=1, operator="olga"))
    world.passes(1)
    for node in range(2):
        world.send(
            ev.ExecutorExited(
                connection=10 + node, generation=1, exit_code=-9, last_lines="", coordinator_address="host:0",
                works=(Work(sequence=sequence),), was_killed=True,
            )
        )  # fmt: skip
    assert not world.state.quarantine.records


def test_a_step_that_always_hangs_is_stopped(world: World) -> None:
    for number in range(1, 6):
        sequence = step(world, number)
        world.passes(51)
        killed_by(world, Work(sequence=sequence), exit_code=-9)
    assert errors(world, 1) == [StepTimeoutError] * 5
    step(world, 6)
    assert errors(world, 1) == [RepeatedLossError]


def test_a_step_that_fails_on_one_node_while_others_wait_for_it_is_stopped(world: World) -> None:
    for number in range(1, 6):
        sequence = step(world, number)
        world.done(sequence, 0, error=ExecutionError("out of memory"))
        world.passes(16)
        killed_by(world, Work(sequence=sequence), exit_code=-9)
    step(world, 6)
    assert errors(world, 1)[-1] is RepeatedLossError


def test_an_executor_that_falls_silent_accuses_what_it_was_busy_with(world: World) -> None:
    sequence = step(world, 1)
    world.passes(20, silent=[1])
    for node in range(2):
        world.send(
            ev.ExecutorExited(
                connection=10 + node, generation=1, exit_code=-9, last_lines="", coordinator_address="host:0",
                works=(Work(sequence=sequence),), was_killed=True,
            )
        )  # fmt: skip
    assert [suspect.key for suspect in world.state.quarantine.records] == ["killer"]


def test_a_step_that_had_begun_does_not_run_again_by_itself_and_those_behind_it_do(world: World) -> None:
    begun = step(world, 1)
    step(world, 2)
    world.send(ev.ExecutorLeft(connection=world.executor_connection(0)))  # its daemon says why afterwards
    killed_by(world, Work(sequence=begun))
    assert errors(world, 1) == [WorkerLostError]
    assert sequence_of(world, "s", 2)


def test_a_load_that_ends_its_executor_is_not_repeated_for_ever(world: World) -> None:
    program = replace(PROGRAM, plan_id="bad")
    world.send(ev.LoadRequested(call=70, session_id="s", plan_id="bad"))
    world.send(ev.CompileFinished(plan_id="bad", program=program))
    deaths = 0
    while (orders := [o for o in world.orders if isinstance(o, do.LoadOnWorkers) and o.program.plan_id == "bad"]) and (
        deaths < 10
    ):
        deaths += 1
        world.send(
            ev.ExecutorExited(
                connection=10, generation=world.generation_of[0], exit_code=-11, last_lines="",
                coordinator_address="host:0", works=(Work(sequence=orders[-1].sequence),),
            )
        )  # fmt: skip
        world.executor_dies(1)
        world.orders.clear()
        for node in range(2):
            world.executor_joins(node)
        world.all_done_of(do.OpenOnWorkers)
    assert deaths == 5
    (failure,) = world.take(do.Fail)
    assert isinstance(failure.error, RepeatedLossError)
    assert "the load of plan bad" in failure.error.message


# ---- datasets --------------------------------------------------------------------------------------
def dataset_work(session_id: str = "s") -> Work:
    return Work(session_id=session_id, key=KEY, function="data:batches", batch=7)


def test_a_dataset_that_ends_its_process_is_stopped_in_its_session_alone(world: World) -> None:
    deaths = 0
    while not world.state.quarantine.stopped:
        deaths += 1
        killed_by(world, dataset_work(), Work(sequence=step(world, deaths, "other")))
    assert deaths == 5
    world.executor_dies(0)
    world.executor_dies(1)
    world.orders.clear()
    for node in range(2):
        world.executor_joins(node)
    opened = {order.session_id: order.refused for order in world.orders if isinstance(order, do.OpenOnWorkers)}
    assert opened["other"] == ()
    ((key, error),) = opened["s"]
    assert key == KEY
    assert "batch 7 of the dataset data:batches of session s" in str(error)


def test_what_was_stopped_has_one_death_left_in_other_sessions_of_its_owner(world: World) -> None:
    for _ in range(5):
        killed_by(world, dataset_work())
    world.send(ev.SessionClosed(call=80, session_id="s"))
    assert not world.state.quarantine.stopped
    world.send(ev.SessionRequested(call=81, session_id="later", owner="owner of s"))
    killed_by(world, dataset_work("other"))
    assert not world.state.quarantine.stopped, "of another owner"
    killed_by(world, dataset_work("later"))
    (suspect,) = world.state.quarantine.stopped
    assert suspect.session_id == "later"


# ---- the black box --------------------------------------------------------------------------------------
def test_the_black_box_has_what_is_under_way_and_nothing_else() -> None:
    box = BlackBox.make()
    writer = BlackBox(box.descriptor)
    try:
        work = Work(session_id="s", key=KEY, function="m:f", batch=3)
        with writer.at(Work(sequence=7)), writer.at(work):
            with writer.at(Work(sequence=5)):
                pass
            assert box.read() == [Work(sequence=7), work]
        assert box.read() == []
    finally:
        writer._memory.close()
        box.close()


def test_the_black_box_leaves_out_what_it_has_no_room_for() -> None:
    box = BlackBox.make()
    try:
        with box.at(Work(key="k", function="x" * mmap.PAGESIZE)):
            assert box.read() == []
    finally:
        box.close()
