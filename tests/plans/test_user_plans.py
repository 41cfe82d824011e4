"""Plans as users hold them: the planner's data, and methods."""

from __future__ import annotations

import pickle
from dataclasses import replace

import shardwright as sw
from shardwright.plans.plan_text import plan_from_json, plan_to_json
from shardwright.user_plans import PipelinePlan, Plan, to_user_plan
from tests.plans.test_plans import HLO, small_plan
from tests.server.hand_plans import pipeline_plan


def test_a_users_plan_is_the_planners_with_methods() -> None:
    result = replace(small_plan(), hlo_text=HLO)
    plan = to_user_plan(result)
    assert sw.Plan is Plan
    assert plan.require_hlo() == HLO
    assert plan.to_json(indent=1) == plan_to_json(result, indent=1, with_text=True)
    assert Plan.from_json(plan.to_json()).require_hlo() == HLO
    assert Plan.from_json(plan.to_json(), hlo_text=HLO) == plan == to_user_plan(plan_from_json(plan_to_json(result)))
    assert "tiny" in plan.explain()


def test_it_is_copied_pickled_and_compared_like_any_plan() -> None:
    plan = to_user_plan(small_plan())
    changed = replace(plan, origin="elsewhere")
    assert isinstance(changed, Plan)
    assert changed != plan
    assert replace(changed, origin=plan.origin) == plan
    again = pickle.loads(pickle.dumps(plan))
    assert (type(again), again, hash(again)) == (Plan, plan, hash(plan))


def test_a_pipelines_programs_hold_users_plans() -> None:
    result = pipeline_plan(2, "1f1b")
    plan = to_user_plan(result)
    assert all(isinstance(program.plan, Plan) for program in plan.programs)
    assert plan.as_dict() == PipelinePlan.from_json(plan_to_json(result, with_text=True)).as_dict()
    assert PipelinePlan.from_json(plan.to_json()) == plan == pickle.loads(pickle.dumps(plan))
    assert "stage" in plan.explain(width=90)
