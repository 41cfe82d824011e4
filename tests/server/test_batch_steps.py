"""Batches that workers read, as the master orders them: `MasterState` without a network or data."""

from __future__ import annotations

from shardwright.errors import DatasetError
from shardwright.server.master import commands as do
from shardwright.server.master import events as ev
from tests.server.simulation import World, ready_world

BATCH = {"executable_id": "", "batch": ev.BatchStepInfo(output_bytes=(100, 200))}


def reading() -> tuple[World, int]:
    """Step 1 has the workers make arrays 8 and 9, step 2 reads them; the sequence number of step 1."""
    world = ready_world()
    world.step(1, (), (8, 9), **BATCH)
    world.step(2, (8, 9), (10, 11))
    assert world.runs() == [1]
    return world, world.orders[-1].sequence


def test_a_step_waits_until_every_worker_has_its_part() -> None:
    world, sequence = reading()
    assert world.state.sessions["s"].arrays[9] == 200
    world.done(sequence, 0)
    assert world.runs() == [1]
    world.done(sequence, 1)
    assert world.runs() == [1, 2]


def test_a_step_without_the_batch_waits_its_turn() -> None:
    world, sequence = reading()
    world.step(3, (1, 2), (12, 13))
    for node in (0, 1):
        world.done(sequence, node)
    assert world.runs() == [1, 2, 3]


def test_where_one_worker_fails_the_others_stop_and_nobody_runs_what_reads_it() -> None:
    world, sequence = reading()
    world.done(sequence, 0, error=DatasetError("no shard"))
    (abort,) = world.take(do.AbortOnWorkers)
    assert (abort.sequence, abort.nodes) == (sequence, frozenset({1}))
    world.done(sequence, 1)
    assert world.runs() == [1]
    assert [(reply.number, str(reply.error)) for reply in world.take(do.ReplyStep)] == [
        (1, "no shard"),
        (2, "no shard"),
    ]
    released = [order for order in world.orders if isinstance(order, do.ReleaseOnWorkers)]
    assert {array_id for order in released for array_id in order.array_ids} == {8, 9, 10, 11}
    world.step(3, (1, 2), (12, 13))
    assert world.runs() == [1, 3], "what it does not concern goes on"


def test_a_worker_that_reads_long_after_another_failed_is_left_in_peace() -> None:
    world, sequence = reading()
    world.done(sequence, 0, error=DatasetError("no shard"))
    world.passes(10 * world.limits.divergence_s)
    assert not [command for command in world.commands if isinstance(command, do.StartExecutor)]


def test_a_step_is_not_late_while_its_batch_is_read() -> None:
    world, sequence = reading()
    world.passes(world.limits.argument_wait_s + 10)
    for node in (0, 1):
        world.done(sequence, node)
    assert world.runs() == [1, 2]


def test_a_released_batch_is_forgotten() -> None:
    world, sequence = reading()
    world.send(ev.ReleaseRequested(call=9, session_id="s", array_ids=(8, 9), after_step=2))
    for node in (0, 1):
        world.done(sequence, node)
    assert world.runs() == [1, 2]
    assert not world.state.sessions["s"].being_read


def test_a_loss_while_it_is_read() -> None:
    world, _ = reading()
    world.executor_dies(0)
    assert not world.state.sessions["s"].being_read
    assert not world.take(do.ReplyStep), "it is read again, as nobody has seen it"
    world.orders.clear()
    world.executor_dies(1)
    for node in (0, 1):
        world.executor_joins(node)
    world.all_done()
    assert [(reply.number, reply.error) for reply in world.take(do.ReplyStep)] == [(1, None), (2, None)]
