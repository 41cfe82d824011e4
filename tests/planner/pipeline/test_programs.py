"""What the programs of a pipeline are: texts that XLA reads, collectives that are there, values that fit together."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jsonschema
import pytest

from shardwright.errors import PlanCheckError, PlanError
from shardwright.planner.pipeline import check_pipeline
from shardwright.plans import pipeline_json
from shardwright.plans.pipeline_plan import PipelinePlan
from shardwright.plans.plan_text import plan_from_json, plan_to_json
from shardwright.report.pipeline import explain_pipeline
from shardwright.report.proof import prove
from shardwright.xla import canonical_hlo
from shardwright.xla.compiling import compile_planned
from tests.planner.pipeline import cases
from tests.planner.pipeline.planned import pipeline


@pytest.fixture(scope="module")
def plan() -> PipelinePlan:
    """Two stages on two devices each, which split the batch."""
    return pipeline(cases.mlp(2), stages=2, micro_batches=4, schedule="1f1b", devices=2)


def test_gradients_are_reduced_once_a_step(plan):
    """Micro-batches add up partial sums, stored as stacks of their terms; the update reduces them."""
    backward, update = plan.program["backward.0"], plan.program["apply.0.0"]
    assert not backward.plan.collectives
    totals = [v for v in backward.plan.parameters if v.name.startswith("total.")]
    assert totals
    assert all(v.is_stacked and v.alias is not None for v in totals)
    assert [each.kind for each in update.plan.collectives] == ["all-reduce", "all-reduce"]


@pytest.mark.dear
def test_every_program_has_the_collectives_that_it_says(plan):
    reducing = pipeline(cases.passed_on(), stages=2, micro_batches=4, schedule="1f1b", devices=2)
    kinds = {each.kind for program in reducing.programs for each in program.plan.collectives}
    assert kinds == {"all-reduce", "all-gather"}
    assert any(entry.partial for program in reducing.programs for entry in program.plan.instructions)
    for program in (*plan.programs, *reducing.programs):
        compiled = compile_planned(program.plan.require_hlo(), program.plan, want_executable=False)
        assert prove(program.plan, compiled.collectives).holds, program.name


def test_every_program_is_read_by_xla(plan):
    for program in plan.programs:
        assert canonical_hlo(program.plan.require_hlo())


def test_source_lines_survive(plan):
    assert "cases.py" in plan.program["forward.0"].plan.require_hlo()


def test_1f1b_holds_as_many_micro_batches_as_there_are_stages(plan):
    """Of what forward saves for backward, on the first stage."""
    saved = {value for value in plan.program["forward.0"].writes if plan.value[value, 0].scope == "micro_batch"}
    live, most = set(), 0
    for task in plan.tasks.stages[0]:
        live.update(buffer for buffer in task.writes if buffer.value in saved)
        most = max(most, len({buffer.micro_batch for buffer in live}))
        live.difference_update(task.frees)
    assert most == 2


def test_json_brings_the_plan_back(plan):
    text = plan_to_json(plan)
    again = plan_from_json(text, hlo_text=plan.hlo_text)
    assert again == plan
    assert all(program.plan.hlo_text for program in again.programs)
    one = plan.programs[0].plan
    assert plan_from_json(plan_to_json(one)) == one


def test_json_fits_the_schemas(plan):
    data = json.loads(plan_to_json(plan))
    docs = Path(__file__).resolve().parents[3] / "docs"
    jsonschema.validate(data, json.loads((docs / "pipeline-schema.json").read_text()))
    for program in data["programs"]:
        jsonschema.validate(program["plan"], json.loads((docs / "plan-schema.json").read_text()))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("pipeline",), "2.0", "format 2.0"),
        (("stages", 0, "mesh"), "x", "a list"),
        (("values", 0, "stage"), 7, "a stage below 2"),
        (("programs", 3, "plan", "hlo_sha256"), "0", "64 hexadecimal digits"),
        (("arguments", 0, "rows"), [2, 2], "the first row"),
        (("more",), 1, "not known"),
    ],
)
def test_json_that_is_wrong_is_refused(plan, path, value, message):
    data = json.loads(plan_to_json(plan))
    at = data
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    with pytest.raises(PlanError, match=message):
        plan_from_json(json.dumps(data))


def test_another_program_is_refused(plan):
    with pytest.raises(PlanError, match="not the program"):
        pipeline_json.decode(plan_to_json(plan), hlo_text="HloModule other")


def test_explained(plan):
    text = explain_pipeline(plan, width=90)
    assert max(map(len, text.splitlines())) <= 90
    for part in ("2 stages on 4 devices, 4 micro-batches, 1f1b", "Schedule", "Sent between stages", "all-reduce"):
        assert part in text


def test_why_stages_are_uneven_stands_below_them(plan):
    reason = "stages take unequal time: 5 equal layers do not divide over 2 stages"
    text = explain_pipeline(dataclasses.replace(plan, notes=(reason, "another note")), width=110)
    assert text.count(reason) == 1
    assert text.index("Stages") < text.index(reason) < text.index("Schedule") < text.index("- another note")


def _with_program(plan: PipelinePlan, which: str, /, **changes) -> PipelinePlan:
    programs = tuple(dataclasses.replace(p, **changes) if p.name == which else p for p in plan.programs)
    return dataclasses.replace(plan, programs=programs)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda p: _with_program(p, "forward.0", stage=1), "no program forward.0"),
        (
            lambda p: _with_program(p, "forward.0", reads=("a", *p.program["forward.0"].reads[1:])),
            "no value of stage 0",
        ),
        (lambda p: _with_program(p, "forward.0", writes=()), "0 values for"),
        (lambda p: _with_program(p, "start.1", name="start.0"), "two programs"),
        (lambda p: dataclasses.replace(p, values=p.values[1:]), "no value of stage"),
        (
            lambda p: dataclasses.replace(p, stages=(p.stages[0], dataclasses.replace(p.stages[1], first_device=1))),
            "device 1 is of stage 0 and of stage 1",
        ),
        (
            lambda p: dataclasses.replace(p, outputs=(dataclasses.replace(p.outputs[0], stage=1), *p.outputs[1:])),
            "which stage 1 has not",
        ),
    ],
)
def test_what_does_not_fit_together_is_found(plan, broken, message):
    with pytest.raises(PlanCheckError, match=message):
        check_pipeline(broken(plan))


def test_a_chunk_that_there_is_not():
    with pytest.raises(PlanError, match=r"chunk [23] of a pipeline of 2 chunks"):
        pipeline(cases.mlp(4), stages=2, micro_batches=4, schedule="1f1b")
