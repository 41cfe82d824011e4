"""Arguments that workers read themselves: no plan counts their arrival."""

from __future__ import annotations

import jax
import pytest

from shardwright.clusters.cluster import Cluster
from shardwright.options.plan_options import PlanOptions
from shardwright.planner.planning import plan_step
from shardwright.plans.plan import Plan
from tests.planner.pipeline import cases, planned

CASE = cases.mlp()


def batch_numbers() -> tuple[int, ...]:
    """Flat numbers of what is no state."""
    _, arguments, donated = CASE
    return tuple(
        range(
            sum(len(jax.tree.leaves(arguments[number])) for number in donated),
            len(jax.tree.leaves(arguments)),
        )
    )


def communication_s(local: tuple[int, ...]) -> tuple[float, float]:
    """Of a plan: seconds a step outside the compute, and of these what is no collective."""
    text, _ = planned.lower_text(CASE)
    options = PlanOptions(force="data", stages=1, micro_batches=1, local_arguments=local)
    plan = plan_step(text, Cluster.local(4), options)
    assert isinstance(plan, Plan)
    return plan.cost.communication_s, plan.cost.communication_s - sum(c.time_s for c in plan.collectives)


def test_a_program() -> None:
    x, y = batch_numbers()
    sent_s, arrival_s = communication_s(())
    assert arrival_s > 0
    local_s, rest_s = communication_s((x, y))
    assert rest_s == pytest.approx(0, abs=1e-12)
    assert local_s == pytest.approx(sent_s - arrival_s)
    half_s, _ = communication_s((x,))
    assert local_s < half_s < sent_s


def test_a_pipeline() -> None:
    x, y = batch_numbers()

    def arrivals_s(*local: int) -> list[float]:
        plan = planned.pipeline(
            CASE, stages=2, micro_batches=4, schedule="1f1b", options=PlanOptions(local_arguments=local)
        )
        return [sum(task.time_s for task in tasks if task.kind == "input") for tasks in plan.tasks.stages]

    first_s, last_s = arrivals_s()
    assert first_s > 0
    assert last_s > 0
    assert arrivals_s(x) == [0, last_s]
    assert arrivals_s(x, y) == [0, 0]
