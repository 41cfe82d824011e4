"""Pipelines compute what one device computes: every kind of model and schedule in this process.

`make check-programs` runs the whole grid (`oracles/pipeline_programs.py`).
"""

from __future__ import annotations

import pytest

import shardwright as sw
from shardwright.plans.pipeline_plan import PipelinePlan
from tests.planner.pipeline import cases
from tests.planner.pipeline.planned import assert_follows_jax, lower_text, pipeline


@pytest.mark.dear
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "2f2b", "zero-bubble"])
def test_schedules(schedule):
    case = cases.mlp(2)
    assert_follows_jax(case, pipeline(case, stages=2, micro_batches=4, schedule=schedule, devices=2))


@pytest.mark.dear
def test_interleaved_chunks():
    case = cases.mlp(4)
    assert_follows_jax(case, pipeline(case, stages=2, chunks=2, micro_batches=4, schedule="interleaved", devices=2))


@pytest.mark.dear
def test_a_tied_embedding_dropout_and_a_global_norm():
    case = cases.tied(2)
    plan = pipeline(case, stages=2, micro_batches=4, schedule="1f1b")
    assert_follows_jax(case, plan)
    # The table goes to the last stage and its gradient comes back, once a step each.
    table = 64 * 8 * 4
    sent = [plan.tasks.sent_bytes[task.reads[0].value] for _, task in plan.tasks.tasks() if task.kind == "send"]
    assert sorted(size for size in sent if size >= table) == [table, table]
    # Everyone's sum of squares meets on one stage, and the norm goes back.
    assert {program.name for program in plan.programs if program.kind == "apply"} >= {"apply.0.1", "apply.2.1"}


@pytest.mark.dear
def test_skip_connections_go_straight_to_where_they_are_read():
    case = cases.unet(4)
    plan = pipeline(case, stages=4, micro_batches=2, schedule="1f1b")
    assert_follows_jax(case, plan)
    routes = {(here.stage, task.peer) for here, task in plan.tasks.tasks() if task.kind == "send"}
    assert {(0, 1), (0, 3), (3, 2), (3, 0)} <= routes


@pytest.mark.dear
def test_experts_with_a_loss_of_every_layer():
    case = cases.moe(2)
    assert_follows_jax(case, pipeline(case, stages=2, micro_batches=4, schedule="1f1b"))


def test_outputs_of_every_kind():
    case = cases.passed_on()
    plan = pipeline(case, stages=2, micro_batches=4, schedule="1f1b", devices=2)
    assert_follows_jax(case, plan, steps=1)
    examples = next(entry for entry in plan.outputs if entry.output == 3)
    assert (examples.variable.shape, examples.variable.user_shape) == ((4, 4, 8), (16, 8))


@pytest.mark.dear
def test_scanned_layers_are_stored_in_rows():
    """The search splits the loop where stages meet: each keeps its rows of every stacked array."""
    case = cases.scanned()
    plan = sw.plan(lower_text(case)[0], 4, stages=2, micro_batches=4, schedule="1f1b", cache=False)
    assert isinstance(plan, PipelinePlan)
    assert_follows_jax(case, plan)
    rows = {entry.rows: entry.stage for entry in plan.arguments if entry.rows}
    assert sorted(rows.values()) == [0, 1]
    assert sorted(row for pair in rows for row in pair) in ([0, 1, 1, 4], [0, 2, 2, 4], [0, 3, 3, 4])
