"""Pipelines compute what one device computes: every kind of model and schedule in this process.

`make pipelines` runs the whole grid (`benchmarks/check_pipelines.py`).
"""

from __future__ import annotations

import pytest

from shardwright.cluster import Cluster
from shardwright.config import PlanOptions
from shardwright.planner.pipeline import Choice, Group, Origin, make_pipeline
from shardwright.planner.rewrites.split_loops import split_loops
from shardwright.plans import Mesh
from tests.planner.pipeline import cases
from tests.planner.pipeline.planned import assert_follows_jax, lowered, pipeline


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "2f2b", "zero-bubble"])
def test_schedules(schedule):
    case = cases.mlp(2)
    assert_follows_jax(case, pipeline(case, stages=2, micro_batches=4, schedule=schedule, devices=2))


def test_interleaved_chunks():
    case = cases.mlp(4)
    assert_follows_jax(case, pipeline(case, stages=2, chunks=2, micro_batches=4, schedule="interleaved", devices=2))


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


def test_skip_connections_go_straight_to_where_they_are_read():
    case = cases.unet(4)
    plan = pipeline(case, stages=4, micro_batches=2, schedule="1f1b")
    assert_follows_jax(case, plan)
    routes = {(here.stage, task.peer) for here, task in plan.tasks.tasks() if task.kind == "send"}
    assert {(0, 1), (0, 3), (3, 2), (3, 0)} <= routes


def test_experts_with_a_loss_of_every_layer():
    case = cases.moe(2)
    assert_follows_jax(case, pipeline(case, stages=2, micro_batches=4, schedule="1f1b"))


def test_outputs_of_every_kind():
    case = cases.passed_on()
    plan = pipeline(case, stages=2, micro_batches=4, schedule="1f1b", devices=2)
    assert_follows_jax(case, plan, steps=1)
    examples = next(entry for entry in plan.outputs if entry.output == 3)
    assert (examples.variable.shape, examples.variable.user_shape) == ((4, 4, 8), (16, 8))


def test_scanned_layers_are_stored_in_rows():
    """A loop whose rows are in two stages: each keeps its rows of every stacked array."""
    case = cases.scanned()
    text, module = lowered(case)
    made = split_loops(module, {each.name: (0, 2, 4) for each in module.entry if each.opcode == "while"})
    sides = [parameter.shape for parameter in module.entry.parameters], module.entry.root.shape.leaves
    arguments, outputs = (
        tuple(_origin(piece, side[piece.number].dimensions) for piece in pieces)
        for pieces, side in zip((made.arguments, made.outputs), sides, strict=True)
    )
    choice = Choice(
        module=made.module,
        groups=tuple(Group(first_device=2 * stage, mesh=Mesh.of({"data": 2})) for stage in range(2)),
        chunk_of={**cases.chunk_of(made.module), **made.part_of},
        micro_batches=4,
        schedule="1f1b",
        arguments=arguments,
        outputs=outputs,
    )
    plan = make_pipeline(text, Cluster.local(4), PlanOptions(), choice)
    assert_follows_jax(case, plan)
    assert {(e.stage, e.rows) for e in plan.arguments if e.rows} == {(0, (0, 2)), (1, (2, 4))}


def _origin(piece, dims):
    if piece.start is None:
        return Origin(number=piece.number, name=f"leaf {piece.number}", dims=dims)
    rows = (piece.start, piece.stop)
    return Origin(number=piece.number, name=f"leaf {piece.number}", dims=(rows[1] - rows[0], *dims[1:]), rows=rows)
