"""PipelinePlan ↔ JSON (schema: docs/pipeline-schema.json): plans of programs, each with its text, and what joins them.

`pipeline` holds the format's version and tells such a plan from one of a single program. Reading accepts any minor
version of the major number; keys that are not known are refused, except from a later minor version.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, cast

from shardwright.errors import PlanError
from shardwright.json_reader import ObjectReader, format_value
from shardwright.plans.pipeline_plan import (
    PIPELINE_FORMAT,
    ArgumentEntry,
    OutputEntry,
    PipelineCandidate,
    PipelinePlan,
    PipelineProgram,
    PipelineStage,
    PipelineValue,
)
from shardwright.plans.plan import MemorySummary, VariablePlan
from shardwright.plans.plan_json import decode_data, read_json
from shardwright.plans.plan_json import encode as encode_plan
from shardwright.plans.plan_json.reading import (
    digest_of,
    read_attention,
    read_digest,
    read_mesh,
    read_own_text,
    read_sharding,
    read_variable,
    version_of,
)
from shardwright.plans.plan_json.writing import Table, encode_mesh, encode_sharding, encode_text, encode_variable
from shardwright.plans.shardings import TensorSharding
from shardwright.tasks import ProgramKind, Scope, TaskGraph

_KINDS = ("start", "split", "forward", "backward", "weight", "accumulate", "apply")
_SCOPES = ("step", "micro_batch")


def is_pipeline(data: Any) -> bool:
    """Whether JSON data is a PipelinePlan's, not a Plan's."""
    return isinstance(data, dict) and "pipeline" in data


# ---- writing ---------------------------------------------------------------


def encode(plan: PipelinePlan, *, with_text: bool = False) -> dict[str, Any]:
    """The plan as plain lists, dicts, strings and numbers; without the user's HLO text, unless asked for."""
    tables = [Table() for _ in plan.stages]  # shardings, per stage
    values, arguments, outputs = (
        [
            {**_encode_entry(entry), "variable": encode_variable(entry.variable, tables[entry.stage])}
            for entry in entries
        ]
        for entries in (plan.values, plan.arguments, plan.outputs)
    )
    return {
        "pipeline": PIPELINE_FORMAT,
        "module_name": plan.module_name,
        "hlo_sha256": plan.hlo_sha256,
        **({"program_sha256": plan.program_sha256} if plan.program_sha256 else {}),
        **(encode_text(plan.hlo_text) if with_text else {}),
        "hardware": plan.hardware,
        "origin": plan.origin,
        "micro_batches": plan.micro_batches,
        "schedule": plan.schedule,
        "step_s": plan.step_s,
        "bubble_fraction": plan.bubble_fraction,
        "planning_s": plan.planning_s,
        **({"attention": [asdict(note) for note in plan.attention]} if plan.attention else {}),
        "notes": list(plan.notes),
        "stages": [_encode_stage(stage, table) for stage, table in zip(plan.stages, tables, strict=True)],
        "values": values,
        "arguments": arguments,
        "outputs": outputs,
        "candidates": [
            {
                "stages": candidate.stages,
                "mesh": encode_mesh(candidate.mesh),
                "micro_batches": candidate.micro_batches,
                "schedule": candidate.schedule,
                "step_s": candidate.step_s,
                "bubble_fraction": candidate.bubble_fraction,
                "note": candidate.note,
            }
            for candidate in plan.candidates
        ],
        "tasks": plan.tasks.as_dict(),
        "programs": [
            {
                "name": program.name,
                "kind": program.kind,
                "stage": program.stage,
                "chunk": program.chunk,
                "reads": list(program.reads),
                "writes": list(program.writes),
                "plan": encode_plan(program.plan),
            }
            for program in plan.programs
        ],
    }


def _encode_entry(entry: PipelineValue | ArgumentEntry | OutputEntry) -> dict[str, Any]:
    """All but the variable."""
    if isinstance(entry, PipelineValue):
        return {"name": entry.name, "stage": entry.stage, "scope": entry.scope}
    rows = None if entry.rows is None else list(entry.rows)
    common = {"stage": entry.stage, "value": entry.value, "rows": rows}
    if isinstance(entry, ArgumentEntry):
        return {"argument": entry.argument, **common}
    return {"output": entry.output, **common, "alias": entry.alias}


def _encode_stage(stage: PipelineStage, shardings: Table) -> dict[str, Any]:
    return {
        "number": stage.number,
        "first_device": stage.first_device,
        "mesh": encode_mesh(stage.mesh),
        "chunks": list(stage.chunks),
        "busy_s": stage.busy_s,
        "memory": {
            "arguments_bytes": stage.memory.arguments_bytes,
            "outputs_bytes": stage.memory.outputs_bytes,
            "temporaries_bytes": stage.memory.temporaries_bytes,
        },
        "shardings": [encode_sharding(sharding) for sharding in shardings.entries],
    }


# ---- reading ---------------------------------------------------------------


def decode(text: str, hlo_text: str | None = None) -> PipelinePlan:
    """Read `encode`'s JSON. Raises PlanError naming the wrong field, or if the plan was made for a program other than
    `hlo_text`.
    """
    data = read_json(text)
    if not is_pipeline(data):
        raise PlanError("this is no plan of a pipeline", where="plan.pipeline", remedy="read it with Plan.from_json")
    written = data["pipeline"]
    current = version_of(PIPELINE_FORMAT)
    if not isinstance(written, str) or not re.fullmatch(r"\d{1,6}\.\d{1,6}", written):
        raise PlanError(
            f'expected a version such as "{PIPELINE_FORMAT}", found {format_value(written)}', where="plan.pipeline"
        )
    if version_of(written)[0] != current[0]:
        raise PlanError(
            f"the plan has format {written}; this version of Shardwright reads {current[0]}.x",
            where="plan.pipeline",
            remedy="plan the program again, or use the version of Shardwright that wrote it",
        )
    reader = ObjectReader(data, "plan", refuse_unknown=version_of(written) <= current)
    reader.take("pipeline")
    digest = reader.text("hlo_sha256")
    program_digest = read_digest(reader, "program_sha256") if reader.has("program_sha256") else ""
    own_text = read_own_text(reader, digest)
    if hlo_text is not None and digest_of(hlo_text) != digest:
        raise PlanError(
            "the HLO text is not the program this plan was made for",
            where="plan.hlo_sha256",
            remedy="pass the text the plan was made from, or plan this program again",
        )
    plan = _read_plan(reader, digest, own_text if hlo_text is None else hlo_text)
    return replace(plan, program_sha256=program_digest)


def _read_plan(reader: ObjectReader, digest: str, hlo_text: str | None) -> PipelinePlan:
    rows = reader.objects("stages", _read_stage)
    stages = _StageTable(rows)
    plan = PipelinePlan(
        module_name=reader.text("module_name"),
        hlo_sha256=digest,
        hardware=reader.text("hardware"),
        origin=reader.text("origin"),
        stages=tuple(stage for stage, _ in rows),
        programs=reader.objects("programs", stages.program),
        values=reader.objects("values", stages.value),
        arguments=reader.objects("arguments", stages.argument),
        outputs=reader.objects("outputs", stages.output),
        tasks=TaskGraph.from_dict(reader.take("tasks"), "plan.tasks"),
        micro_batches=reader.integer("micro_batches", least=1),
        schedule=reader.text("schedule"),
        step_s=reader.number("step_s"),
        bubble_fraction=reader.number("bubble_fraction"),
        candidates=reader.objects("candidates", _read_candidate),
        attention=read_attention(reader),
        notes=reader.texts("notes"),
        planning_s=reader.number("planning_s"),
        hlo_text=hlo_text,
    )
    reader.finish()
    return plan


def _read_stage(row: ObjectReader) -> tuple[PipelineStage, tuple[TensorSharding, ...]]:
    memory, mesh = row.object("memory"), read_mesh(row, "mesh")
    stage = PipelineStage(
        number=row.integer("number"),
        first_device=row.integer("first_device"),
        mesh=mesh,
        chunks=row.integers("chunks"),
        busy_s=row.number("busy_s"),
        memory=MemorySummary(
            arguments_bytes=memory.integer("arguments_bytes"),
            outputs_bytes=memory.integer("outputs_bytes"),
            temporaries_bytes=memory.integer("temporaries_bytes"),
        ),
    )
    memory.finish()
    return stage, row.objects("shardings", lambda inner: read_sharding(inner, mesh))


class _StageTable:
    """Reads rows that name a stage, and shardings by their position in its table."""

    def __init__(self, stages: Sequence[tuple[PipelineStage, tuple[TensorSharding, ...]]]) -> None:
        self._meshes = [stage.mesh for stage, _ in stages]
        self._shardings = [shardings for _, shardings in stages]

    def _number(self, row: ObjectReader) -> int:
        stage = row.integer("stage")
        if stage >= len(self._shardings):
            raise row.wrong("stage", f"a stage below {len(self._shardings)}", stage)
        return stage

    def _variable(self, row: ObjectReader, stage: int) -> VariablePlan:
        inner = row.object("variable")
        variable = read_variable(inner, self._shardings[stage], self._meshes[stage])
        inner.finish()
        return variable

    def value(self, row: ObjectReader) -> PipelineValue:
        stage = self._number(row)
        return PipelineValue(
            name=row.text("name"),
            stage=stage,
            scope=cast(Scope, _one_of(row, "scope", _SCOPES)),
            variable=self._variable(row, stage),
        )

    def argument(self, row: ObjectReader) -> ArgumentEntry:
        stage = self._number(row)
        return ArgumentEntry(
            argument=row.integer("argument"),
            stage=stage,
            value=row.text("value"),
            variable=self._variable(row, stage),
            rows=_read_rows(row),
        )

    def output(self, row: ObjectReader) -> OutputEntry:
        stage = self._number(row)
        return OutputEntry(
            output=row.integer("output"),
            stage=stage,
            value=row.text("value"),
            variable=self._variable(row, stage),
            alias=None if row.take("alias") is None else row.integer("alias"),
            rows=_read_rows(row),
        )

    def program(self, row: ObjectReader) -> PipelineProgram:
        name = row.text("name")
        try:
            plan = decode_data(row.take("plan"))
        except PlanError as error:
            raise PlanError(error.message, where=f"{name}: {error.where}", remedy=error.remedy) from None
        return PipelineProgram(
            name=name,
            kind=cast(ProgramKind, _one_of(row, "kind", _KINDS)),
            stage=self._number(row),
            chunk=None if row.take("chunk") is None else row.integer("chunk"),
            reads=row.texts("reads"),
            writes=row.texts("writes"),
            plan=plan,
        )


def _read_rows(row: ObjectReader) -> tuple[int, int] | None:
    if row.take("rows") is None:
        return None
    rows = row.integers("rows")
    if len(rows) != 2 or rows[0] >= rows[1]:
        raise row.wrong("rows", "the first row and the one after the last", list(rows))
    return rows[0], rows[1]


def _read_candidate(row: ObjectReader) -> PipelineCandidate:
    return PipelineCandidate(
        stages=row.integer("stages", least=1),
        mesh=read_mesh(row, "mesh"),
        micro_batches=row.integer("micro_batches", least=1),
        schedule=row.text("schedule"),
        step_s=None if row.take("step_s") is None else row.number("step_s"),
        bubble_fraction=row.number("bubble_fraction"),
        note=row.text("note"),
    )


def _one_of(row: ObjectReader, key: str, choices: tuple[str, ...]) -> str:
    found = row.text(key)
    if found not in choices:
        raise row.wrong(key, f"one of {', '.join(choices)}", found)
    return found
