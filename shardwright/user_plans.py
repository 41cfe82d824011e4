"""Plans as users hold them: the planner's data, with what can be done with it as methods.

`sw.plan`, `step.plan` and the command line hand them out; the functions behind the methods take any plan,
and are loaded when they are first called.
"""

from __future__ import annotations

import warnings
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Literal, overload

from shardwright.errors import CompilationError, PlanError
from shardwright.plans import pipeline_json, plan_json
from shardwright.plans.pipeline_plan import PipelinePlan as PlannedPipeline
from shardwright.plans.plan import Plan as PlannedProgram
from shardwright.plans.plan_text import encode_plan, plan_to_json

if TYPE_CHECKING:
    from shardwright.explicit.answer import OutShardings
    from shardwright.report.proof import Proof
    from shardwright.xla import CompileService
    from shardwright.xla.jax_shardings import PlanShardings


def compile_and_prove(
    plan: PlannedProgram,
    *,
    tolerance: float = 0.02,
    inspect: Literal["compiled", "partition-pass"] = "partition-pass",
    deadline_s: float | None = None,
    on: str | None = None,
    packages: str | None = None,
) -> Proof:
    """Whether XLA's program has the collectives of `plan.collectives`: matched one by one, with source lines.

    tolerance: fraction of the bytes that may differ. inspect: read the output of XLA's partitioner (seconds), or
    the program compiled to the end. XLA runs in a child process, on CPU devices of this machine.
    on: compile to the end for these devices instead, which need not be here: `a100`, `h100` or `tpu-v5e`; the proof
    then has the compiler's memory, too. packages: the folder with that compiler; default: `SHARDWRIGHT_GPU_PACKAGES`
    or `SHARDWRIGHT_TPU_PACKAGES`, a checkout's `build/`, what is installed.

    Raises PlanError if the HLO text is absent or the plan is for another platform than `on`, OptionError if `on` is
    unknown or has no machine of the plan's size, PlatformError with the command that installs its packages where they
    are missing, CompilationError if XLA refuses the program, DeadlineError after `deadline_s` seconds.
    """
    from shardwright.xla import CompileService

    if on is not None:
        return _prove_on(on, plan, plan.mesh.device_count, tolerance, deadline_s, packages)
    with CompileService(plan.mesh.device_count) as service:
        return _prove_here(service, plan, tolerance, inspect, deadline_s)


def prove_programs(
    plan: PlannedPipeline,
    *,
    tolerance: float = 0.02,
    inspect: Literal["compiled", "partition-pass"] = "partition-pass",
    deadline_s: float | None = None,
    on: str | None = None,
    packages: str | None = None,
) -> dict[str, Proof]:
    """`compile_and_prove` of every program of a pipeline, by name; `deadline_s` is each one's.

    on: the devices of the pipeline, of which each program takes its stage's number.
    """
    from shardwright.xla import CompileService

    if on is None:
        with CompileService(max(program.plan.mesh.device_count for program in plan.programs)) as service:
            return {
                program.name: _prove_here(service, program.plan, tolerance, inspect, deadline_s)
                for program in plan.programs
            }
    return {
        program.name: _prove_on(on, program.plan, plan.device_count, tolerance, deadline_s, packages)
        for program in plan.programs
    }


def _prove_here(
    service: CompileService,
    plan: PlannedProgram,
    tolerance: float,
    inspect: Literal["compiled", "partition-pass"],
    deadline_s: float | None,
) -> Proof:
    """The proof by this machine's compiler."""
    from shardwright.report.proof import prove

    program = service.compile(plan.require_hlo(), plan, want_executable=False, inspect=inspect, deadline_s=deadline_s)
    return prove(plan, program.collectives, tolerance=tolerance)


def _prove_on(
    on: str, plan: PlannedProgram, device_count: int, tolerance: float, deadline_s: float | None, packages: str | None
) -> Proof:
    """The proof by the compiler of devices that are not here. device_count: of the machine, the plan's or more."""
    from shardwright.report.memory import compare_memory
    from shardwright.report.proof import prove
    from shardwright.xla import CompileService
    from shardwright.xla.compilers import find_compiler

    compiler = find_compiler(on, device_count, packages)
    platform = compiler.compiler.platform
    _require_platform(plan, platform, on)
    with CompileService(device_count, children=1, compiler=compiler) as service:
        try:
            program = service.compile(plan.require_hlo(), plan, want_executable=False, deadline_s=deadline_s)
        except CompilationError as error:
            remedy = (
                error.remedy or f"lower the program for {platform}, if it is not: `sw.lower(…, platform={platform!r})`"
            )
            raise type(error)(error.message, where=error.where or on, remedy=remedy) from None
    assert program.memory is not None
    memory = compare_memory(
        plan,
        arguments_bytes=program.memory.argument_bytes,
        outputs_bytes=program.memory.output_bytes,
        aliased_bytes=program.memory.alias_bytes,
        temporaries_bytes=program.memory.temporary_bytes,
    )
    return prove(plan, program.collectives, tolerance=tolerance, on=on, memory=memory)


def _require_platform(plan: PlannedProgram, platform: str, on: str) -> None:
    """Raises PlanError for a plan by a profile of another platform: its program's text is another."""
    from shardwright.cost import platform_of_profile

    planned = platform_of_profile(plan.hardware)
    if planned in (None, platform):
        return
    raise PlanError(
        f"the plan is for {planned} (hardware {plan.hardware}), the compiler of {on} takes programs for {platform}: "
        "their text and their prices differ",
        where=plan.module_name,
        remedy=f"lower the step for {platform} and plan it for a cluster whose hardware is {on}",
    )


class Plan(PlannedProgram):
    """A checked parallelization of one HLO module over one mesh, made by `shardwright.plan` or a server.

    `shardwright.plans.plan.Plan` describes its fields.
    """

    __slots__ = ()

    def to_json(self, *, indent: int | None = None) -> str:
        """The plan in JSON (schema: docs/plan-schema.json), with its program's HLO text if that is there."""
        return plan_to_json(self, indent=indent, with_text=True)

    @classmethod
    def from_json(cls, text: str, *, hlo_text: str | None = None) -> Plan:
        """Read `to_json`'s text; raises PlanError naming the wrong field, or if the plan was made for (or rewritten
        from) a program other than `hlo_text`.
        """
        return to_user_plan(plan_json.decode(text, hlo_text))

    def as_dict(self) -> dict[str, Any]:
        """`to_json`'s data."""
        return encode_plan(self, with_text=True)

    def explain(self, *, width: int = 110) -> str:
        """A report in lines of at most `width` columns (80 or more read well): layout per tensor, collectives by cause,
        memory by kind, the search's candidates, segments and certificate.
        """
        from shardwright.report.text import explain_plan

        return explain_plan(self, width=width)

    def emit(self) -> str:
        """StableHLO with Shardy constraints: compiles anywhere, without Shardwright; attention is cuDNN's calls where
        the plan's devices have them.

        Raises PlanError if the HLO text is absent, UnsupportedProgramError if it leaves constants out.
        """
        from shardwright.xla import emit_stablehlo

        return emit_stablehlo(self.require_hlo(), self)

    prove = compile_and_prove

    def shardings(self, devices: Any = None, *, arguments: Any = None, results: Any = None) -> PlanShardings:
        """(of the arguments, of the results) `NamedSharding`s over `devices` (default `jax.devices()`), for the user's
        own `jax.jit(function, in_shardings=…, out_shardings=…)`.

        Of a step's plan they are pytrees: a tuple of the positional arguments without the static ones, and the result.
        Of others they are flat, unless `arguments`, a tuple of positional arguments or their types, and `results`, a
        result or its types (`jax.eval_shape`), give their structure.

        Warns where the plan runs attention as fused kernels that the function itself writes out.

        Raises PlanError if too few devices are there (`partition_specs` needs none), if the plan is not `portable`,
        if an argument is passed by keyword alone, or if the plan has more or fewer arrays than `arguments` and
        `results`.
        """
        from shardwright.xla.jax_shardings import to_named_shardings, with_call

        self.require_portable()
        _warn_of_attention(self)
        return to_named_shardings(with_call(self, arguments, results), devices)

    def partition_specs(self, *, arguments: Any = None, results: Any = None) -> PlanShardings:
        """The same as `PartitionSpec`s over the axes of `mesh`, whatever devices are here."""
        from shardwright.xla.jax_shardings import to_partition_specs, with_call

        self.require_portable()
        _warn_of_attention(self)
        return to_partition_specs(with_call(self, arguments, results))

    def out_shardings(self, *, arguments: Any = None, results: Any = None) -> OutShardings:
        """What is to be written into the step, by source line, so that `jax.jit` under a mesh of Explicit axes runs
        the plan: `out_sharding=` of calls, `jax.sharding.reshard`; its `str()` is ready to paste. No device is needed.

        arguments, results: as of `shardings`. Raises PlanError if the plan computes otherwise than the function, pads
        an array or has no HLO text, or like `shardings`.
        """
        from shardwright.explicit.derive import find_out_shardings
        from shardwright.xla.jax_shardings import with_call

        _warn_of_attention(self)
        return find_out_shardings(with_call(self, arguments, results))


def _warn_of_attention(plan: PlannedProgram) -> None:
    """Warns the caller's caller that `jax.jit` of the function has no kernels where it writes attention out."""
    places = list(dict.fromkeys(note.place or plan.module_name for note in plan.attention if note.replaced))
    if places:
        more = f" and {len(places) - 1} more places" if len(places) > 1 else ""
        warnings.warn(
            f"jax.jit computes the attention at {places[0]}{more} as the function writes it, not as the fused kernels "
            'that the plan counts on, and takes more time and memory: write implementation="cudnn" there, or compile '
            "plan.emit()",
            stacklevel=3,
        )


class PipelinePlan(PlannedPipeline):
    """A checked parallelization of one HLO module over several stages, made by `shardwright.plan` or a server.

    `shardwright.plans.pipeline_plan.PipelinePlan` describes its fields. The plans of its programs are `Plan`s of this
    module.
    """

    def to_json(self, *, indent: int | None = None) -> str:
        """The plan in JSON (schema: docs/pipeline-schema.json), with the text of every program; of the user's, if it is
        there.
        """
        return plan_to_json(self, indent=indent, with_text=True)

    @classmethod
    def from_json(cls, text: str, *, hlo_text: str | None = None) -> PipelinePlan:
        """Read `to_json`'s text; raises PlanError naming the wrong field, or if the plan was made for a program other
        than `hlo_text`.
        """
        return to_user_plan(pipeline_json.decode(text, hlo_text))

    def as_dict(self) -> dict[str, Any]:
        """`to_json`'s data."""
        return encode_plan(self, with_text=True)

    def explain(self, *, width: int = 110) -> str:
        """A report in lines of at most `width` columns: stages, schedule, memory, transfers."""
        from shardwright.report.pipeline import explain_pipeline

        return explain_pipeline(self, width=width)

    def emit(self) -> dict[str, str]:
        """StableHLO with Shardy constraints of every program, by name."""
        from shardwright.xla import emit_stablehlo

        return {program.name: emit_stablehlo(program.plan.require_hlo(), program.plan) for program in self.programs}

    prove = prove_programs


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
