"""Either kind of plan ↔ JSON."""

from __future__ import annotations

import json
from typing import Any

from shardwright.plans import pipeline_json, plan_json
from shardwright.plans.pipeline_plan import PipelinePlan
from shardwright.plans.plan import Plan


def encode_plan(plan: Plan | PipelinePlan, *, with_text: bool = False) -> dict[str, Any]:
    """The plan as JSON data (schemas: docs/plan-schema.json, docs/pipeline-schema.json).

    with_text: with the HLO text it was made for, if that is there; else only a rewritten program's.
    """
    encode = pipeline_json.encode if isinstance(plan, PipelinePlan) else plan_json.encode
    return encode(plan, with_text=with_text)  # type: ignore[arg-type]


def plan_to_json(plan: Plan | PipelinePlan, *, indent: int | None = None, with_text: bool = False) -> str:
    """`encode_plan`'s data as text."""
    return json.dumps(encode_plan(plan, with_text=with_text), indent=indent)


def plan_from_json(text: str, *, hlo_text: str | None = None) -> Plan | PipelinePlan:
    """Read `plan_to_json`'s text.

    Raises PlanError naming the wrong field, or if the plan was made for a program other than `hlo_text`.
    """
    decode = pipeline_json.decode if pipeline_json.is_pipeline(plan_json.read_json(text)) else plan_json.decode
    return decode(text, hlo_text)
