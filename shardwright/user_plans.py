"""Plans as users hold them: the planner's data, with what can be done with it as methods.

`sw.plan`, `step.plan` and the command line hand them out; the functions behind the methods take any plan,
and are loaded when they are first called.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Literal, overload

from shardwright.plans import pipeline_json, plan_json
from shardwright.plans.pipeline_plan import PipelinePlan as PlannedPipeline
from shardwright.plans.plan import Plan as PlannedProgram
from shardwright.plans.plan_text import encode_plan, plan_to_json

if TYPE_CHECKING:
    from jax.sharding import NamedSharding

    from shardwright.report.proof import Proof


def compile_and_prove(
    plan: PlannedProgram,
    *,
    tolerance: float = 0.02,
    inspect: Literal["compiled", "partition-pass"] = "partition-pass",
    deadline_s: float | None = None,
) -> Proof:
    """Whether XLA's program has the collectives of `plan.collectives`: matched one by one, with source lines.

    tolerance: fraction of the bytes that may differ. inspect: read the output of XLA's partitioner (seconds), or
    the program compiled to the end. XLA runs in a child process, on CPU devices of this machine.

    Raises PlanError if the HLO text is absent, CompilationError if XLA refuses the program, DeadlineError after
    `deadline_s` seconds.
    """
    from shardwright.report.proof import prove
    from shardwright.xla import CompileService

    with CompileService(plan.mesh.device_count) as service:
        program = service.compile(
            plan.require_hlo(), plan, want_executable=False, inspect=inspect, deadline_s=deadline_s
        )
    return prove(plan, program.collectives, tolerance=tolerance)


class Plan(PlannedProgram):
    """A checked parallelization of one HLO module over one mesh, made by `shardwright.plan` or a server.

    `shardwright.plans.plan.Plan` describes its fields.
    """

    __slots__ = ()

    def to_json(self, *, indent: int | None = None) -> str:
        """The plan in JSON (schema: docs/plan-schema.json); without the HLO text, except a rewritten program's."""
        return plan_to_json(self, indent=indent)

    @classmethod
    def from_json(cls, text: str, *, hlo_text: str | None = None) -> Plan:
        """Read `to_json`'s text; raises PlanError naming the wrong field, or if the plan was made for (or rewritten
        from) a program other than `hlo_text`.
        """
        return to_user_plan(plan_json.decode(text, hlo_text))

    def as_dict(self) -> dict[str, Any]:
        """`to_json`'s data."""
        return encode_plan(self)

    def explain(self, *, width: int = 110) -> str:
        """A report in lines of at most `width` columns (80 or more read well): layout per tensor, collectives by cause,
        memory by kind, the search's candidates, segments and certificate.
        """
        from shardwright.report.text import explain_plan

        return explain_plan(self, width=width)

    def emit(self) -> str:
        """StableHLO with Shardy constraints: compiles anywhere, without Shardwright.

        Raises PlanError if the HLO text is absent, UnsupportedProgramError if it leaves constants out.
        """
        from shardwright.xla import emit_stablehlo

        return emit_stablehlo(self.require_hlo(), self)

    prove = compile_and_prove

    def shardings(self, devices: Any = None) -> tuple[tuple[NamedSharding, ...], tuple[NamedSharding, ...]]:
        """(per argument, per output) `NamedSharding`s over `devices` (default `jax.devices()`), for the user's own
        `jax.jit`. Raises PlanError if too few devices are there, or if the plan is not `portable`.
        """
        from shardwright.xla import to_named_shardings

        self.require_portable()
        return to_named_shardings(self, devices)


class PipelinePlan(PlannedPipeline):
    """A checked parallelization of one HLO module over several stages, made by `shardwright.plan` or a server.

    `shardwright.plans.pipeline_plan.PipelinePlan` describes its fields. The plans of its programs are `Plan`s of this
    module.
    """

    def to_json(self, *, indent: int | None = None) -> str:
        """The plan in JSON (schema: docs/pipeline-schema.json), with the text of every program; without the user's."""
        return plan_to_json(self, indent=indent)

    @classmethod
    def from_json(cls, text: str, *, hlo_text: str | None = None) -> PipelinePlan:
        """Read `to_json`'s text; raises PlanError naming the wrong field, or if the plan was made for a program other
        than `hlo_text`.
        """
        return to_user_plan(pipeline_json.decode(text, hlo_text))

    def as_dict(self) -> dict[str, Any]:
        """`to_json`'s data."""
        return encode_plan(self)

    def explain(self, *, width: int = 110) -> str:
        """A report in lines of at most `width` columns: stages, schedule, memory, transfers."""
        from shardwright.report.pipeline import explain_pipeline

        return explain_pipeline(self, width=width)

    def emit(self) -> dict[str, str]:
        """StableHLO with Shardy constraints of every program, by name."""
        from shardwright.xla import emit_stablehlo

        return {program.name: emit_stablehlo(program.plan.require_hlo(), program.plan) for program in self.programs}


@overload
def to_user_plan(plan: PlannedProgram) -> Plan: ...
@overload
def to_user_plan(plan: PlannedPipeline) -> PipelinePlan: ...
def to_user_plan(plan: PlannedProgram | PlannedPipeline) -> Plan | PipelinePlan:
    """A planner's plan, as users hold it."""
    values = {each.name: getattr(plan, each.name) for each in fields(plan)}
    if isinstance(plan, PlannedProgram):
        return Plan(**values)
    programs = tuple(replace(program, plan=to_user_plan(program.plan)) for program in plan.programs)
    return PipelinePlan(**values | {"programs": programs})
