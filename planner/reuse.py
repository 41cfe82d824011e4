"""A plan that was found before, run again instead of a search.

For the same program, whatever its names and source lines, on as many devices of the same hardware the plan runs as it
is: read, checked against the program, and no search. For a changed program, or on other hardware, its decisions are
carried over to the instructions that are the same or play the same part (`constraints.carried`), the others are
searched on the plan's mesh, and all is priced anew. The notes of such a plan say what differs and how much was taken
over. A pipeline of a changed program is planned anew, with the stages, micro-batches and schedule of the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import TypeVar

from shardwright.attention import read_call
from shardwright.clusters.cluster import Cluster
from shardwright.cost import HardwareProfile, bytes_with_margin, hardware_profile
from shardwright.cost.profiles import memory_limit_bytes
from shardwright.errors import AnnotationError, MemoryBudgetError, PlanCheckError, PlanError
from shardwright.hlo import Instruction, Module, parse
from shardwright.options.plan_options import PlanOptions
from shardwright.planner.cache.keys import program_digest
from shardwright.planner.cache.relabel import ProgramNames, Relabeler, RelabelError
from shardwright.planner.clock import Clock
from shardwright.planner.constraints.carried import CarriedPlan
from shardwright.planner.graph.dataflow import build_dataflow
from shardwright.planner.graph.matching import Matching, describe, match_instructions
from shardwright.planner.graph.names import argument_names, output_names
from shardwright.planner.graph.source import Source
from shardwright.planner.pipeline.check import check_pipeline
from shardwright.planner.planning import plan_step
from shardwright.planner.plans.verify import check_plan
from shardwright.planner.search.search import plan as plan_single_program
from shardwright.planner.tuning import MIN_TAKEN
from shardwright.plans.pipeline_plan import PipelinePlan
from shardwright.plans.plan import TAKEN_OVER, InstructionPlan, Plan, VariablePlan
from shardwright.plans.plan_text import plan_from_json
from shardwright.progress import PlanProgress
from shardwright.units import format_bytes

_AnyPlan = TypeVar("_AnyPlan", bound=Plan | PipelinePlan)

#: Instructions that a note names, at most.
_MAX_NAMED = 3

#: Instructions that compute nothing.
_VALUES = frozenset({"parameter", "constant", "tuple", "get-tuple-element"})

_PLAN_ANEW = "leave plan= out, and this program is planned for these devices"


def run_again(
    source: Source,
    cluster: Cluster,
    options: PlanOptions,
    *,
    progress: Callable[[PlanProgress], None] | None = None,
    clock: Clock | None = None,
) -> Plan | PipelinePlan:
    """The plan of `options.plan_json`, for a program that it may have been made for.

    Raises PlanError on a plan for another number of devices, of another program altogether, or that is damaged;
    MemoryBudgetError where it needs more memory than there is; otherwise like `plan_step`.
    """
    request = _Request(
        source=source, cluster=cluster, options=options, progress=progress, clock=clock or Clock(options.deadline_s)
    )
    plan = request.run(plan_from_json(options.plan_json))
    return replace(plan, planning_s=request.clock.elapsed_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """The arguments of `run_again`; its methods are the ways that a plan may take."""

    source: Source
    cluster: Cluster
    options: PlanOptions
    progress: Callable[[PlanProgress], None] | None
    clock: Clock

    def run(self, plan: Plan | PipelinePlan) -> Plan | PipelinePlan:
        _require_devices(plan, self.cluster)
        is_same = _is_same_program(plan, self.source)
        is_priced = plan.hardware == self.profile.name
        if isinstance(plan, PipelinePlan):
            return self._check_pipeline(plan) if is_same and is_priced else self._search_stages(plan, is_same=is_same)
        again = self._rename(plan) if is_same and is_priced else None
        return self._carry(plan, is_same=is_same) if again is None else again

    @property
    def profile(self) -> HardwareProfile:
        return hardware_profile(self.cluster.hardware)

    # ---- as it is ------------------------------------------------------------------

    def _rename(self, plan: Plan) -> Plan | None:
        """The plan in the program's names, checked; None where it is not certain what something is called now."""
        text, module = self.source.text, self.source.module
        if plan.original_sha256:
            planned = parse(plan.require_hlo())
            again = replace(plan, original_sha256=sha256(text.encode()).hexdigest())
        elif _digest(text) == plan.hlo_sha256:
            planned, again = module, replace(plan, hlo_text=text)
        elif plan.hlo_text is None:
            return None
        else:
            try:
                again, planned = self._relabeler(plan).relabel(plan, module, text)
            except RelabelError:
                return None
        again = self._name_variables(again)
        self._check(again, planned)
        return again

    def _relabeler(self, plan: Plan) -> Relabeler:
        old, new = parse(plan.require_hlo()), self.source.module
        names = [variable.name for variable in plan.parameters], [variable.name for variable in plan.outputs]
        return Relabeler(ProgramNames.of(old, *names), ProgramNames.of(new, *self._variable_names()))

    def _variable_names(self) -> tuple[Sequence[str], Sequence[str]]:
        flow = build_dataflow(self.source.module)
        arguments = argument_names(flow, self.options.argument_names)
        return arguments, output_names(flow, self.options.output_names)

    def _name_variables(self, plan: Plan) -> Plan:
        arguments, outputs = self._variable_names()
        return replace(plan, parameters=_renamed(plan.parameters, arguments), outputs=_renamed(plan.outputs, outputs))

    def _check(self, plan: Plan, planned: Module) -> None:
        """Raises PlanError where the plan does not hold for its program, MemoryBudgetError where it does not fit."""
        flow = build_dataflow(self.source.module)
        for variables, nodes in ((plan.parameters, flow.parameters), (plan.outputs, flow.outputs)):
            shapes = [flow.nodes[node].shapes[0] for node in nodes]
            if [(each.element_type, each.user_shape) for each in variables] != [
                (shape.element_type, shape.dimensions) for shape in shapes
            ]:
                raise PlanError("its variables are not the program's", where="plan", remedy=_PLAN_ANEW)
        _require_known_options(plan, self.profile)
        try:
            check_plan(planned, plan)
        except PlanCheckError as error:
            raise _damaged(error) from None
        self._require_memory(bytes_with_margin(plan.memory, self.profile))

    def _require_memory(self, needed_bytes: int, where: str = "plan") -> None:
        limit_bytes = memory_limit_bytes(self.options, self.cluster, self.profile)
        if needed_bytes > limit_bytes:
            raise MemoryBudgetError(
                f"the plan needs {format_bytes(needed_bytes)} a device and may take {format_bytes(limit_bytes)}",
                where=where,
                remedy=_PLAN_ANEW,
            )

    # ---- changed -------------------------------------------------------------------

    def _carry(self, plan: Plan, *, is_same: bool) -> Plan:
        carried = CarriedPlan(plan=plan, module=parse(plan.hlo_text) if plan.hlo_text is not None else None)
        options = replace(
            self.options,
            plan_json="",
            mesh=plan.mesh.sizes,
            effort="fast",
            stages=1,
            micro_batches=plan.micro_batches,
            rewrites="auto" if plan.original_sha256 else "none",
            fused_attention=_fused_attention(plan, [carried.module] if carried.module else [], self.profile),
            bucket_bytes=_bucket_bytes(plan, self.profile),
            offload="optimizer" if plan.is_offloaded else "none",
        )
        try:
            new_plan = self._plan(options, carried)
        except MemoryBudgetError:
            raise
        except (PlanError, AnnotationError) as error:
            new_plan = self._plan(options, None)
            return _add_note(new_plan, f"its mesh only, for its decisions do not hold here: {error.message}")
        notes = [_compare(carried, new_plan, is_same=is_same)]
        if plan.hardware != self.profile.name:
            notes.append(f"it was made for {plan.hardware!r}; memory and time are those of {self.profile.name!r} now")
        return _add_note(new_plan, "; ".join(notes))

    def _plan(self, options: PlanOptions, carried: CarriedPlan | None) -> Plan:
        return plan_single_program(
            self.source, self.cluster, options, progress=self.progress, clock=self.clock, carried=carried
        )

    # ---- pipelines -------------------------------------------------------------------

    def _check_pipeline(self, plan: PipelinePlan) -> PipelinePlan:
        try:
            check_pipeline(plan)
            for program in plan.programs:
                _require_known_options(program.plan, self.profile)
                check_plan(parse(program.plan.require_hlo()), program.plan, is_piece=True)
        except PlanCheckError as error:
            raise _damaged(error) from None
        for stage in plan.stages:
            self._require_memory(bytes_with_margin(stage.memory, self.profile), f"plan, stage {stage.number}")
        text = self.source.text
        return replace(plan, hlo_text=text, hlo_sha256=_digest(text))

    def _search_stages(self, plan: PipelinePlan, *, is_same: bool) -> Plan | PipelinePlan:
        """A pipeline of the same shape: which instruction is of which stage is searched anew."""
        meshes = {stage.mesh for stage in plan.stages}
        programs = [parse(program.plan.require_hlo()) for program in plan.programs]
        options = replace(
            self.options,
            plan_json="",
            stages=len(plan.stages),
            micro_batches=plan.micro_batches,
            schedule=plan.schedule,
            fused_attention=_fused_attention(plan, programs, self.profile),
            mesh=meshes.pop().sizes if len(meshes) == 1 else None,
        )
        kept = f"{len(plan.stages)} stages, {plan.micro_batches} micro-batches and the schedule {plan.schedule}"
        notes = [f"{kept}; which instruction is of which stage is searched anew"]
        if not is_same and plan.hlo_text is not None:
            notes.append(_describe_changes(match_instructions(parse(plan.hlo_text), self.source.module)))
        if plan.hardware != self.profile.name:
            notes.append(f"it was made for {plan.hardware!r}")
        new_plan = plan_step(self.source, self.cluster, options, progress=self.progress, clock=self.clock)
        return _add_note(new_plan, "; ".join(notes))


# ---- whether it is the program's ---------------------------------------------------------


def _require_devices(plan: Plan | PipelinePlan, cluster: Cluster) -> None:
    """Raises PlanError on a plan for another number of devices."""
    count = plan.device_count if isinstance(plan, PipelinePlan) else plan.mesh.device_count
    if count != cluster.device_count:
        over = f"in {len(plan.stages)} stages" if isinstance(plan, PipelinePlan) else f"over {plan.mesh}"
        raise PlanError(
            f"the plan is for {count} devices, {over}; there are {cluster.device_count}",
            where="plan",
            remedy=_PLAN_ANEW,
        )


def _is_same_program(plan: Plan | PipelinePlan, source: Source) -> bool:
    original = plan.original_sha256 if isinstance(plan, Plan) else ""
    if _digest(source.text) == (original or plan.hlo_sha256):
        return True
    return bool(plan.program_sha256) and plan.program_sha256 == program_digest(source.module).hex()


def _require_known_options(plan: Plan, profile: HardwareProfile) -> None:
    """Raises PlanError on an option of XLA's that no plan sets: a file may come from anywhere."""
    names = {option for _, option in profile.combiner_options} | {profile.compiler.hiding_option}
    for name, value in plan.compile_options.items():
        is_flag = name == profile.compiler.hiding_option
        if name not in names or type(value) is not (bool if is_flag else int):
            raise PlanError(
                f"plans for {profile.name!r} do not set {name}={value!r}",
                where="plan.compile_options",
                remedy="give a plan as the planner wrote it",
            )


def _damaged(error: PlanCheckError) -> PlanError:
    return PlanError(
        f"the plan does not hold for its program: {error.message}",
        where="plan",
        remedy="give the file as it was written, or leave plan= out",
    )


# ---- what is said of it --------------------------------------------------------------------


def _compare(carried: CarriedPlan, new_plan: Plan, *, is_same: bool) -> str:
    """How much was taken over, and what differs. Raises PlanError on a plan that says little of this program."""
    module = parse(new_plan.require_hlo())
    matching = carried.match(module)
    old = {entry.name: entry for entry in carried.plan.instructions}
    new = {entry.name: entry for entry in new_plan.instructions}
    computing = [each for each in module.instructions() if each.name in new and each.opcode not in _VALUES]
    partners = [(new[each.name], old.get(matching.partners.get(each, ""))) for each in computing]
    if sum(partner is not None for _, partner in partners) < MIN_TAKEN * len(computing):
        known = sum(partner is not None for _, partner in partners)
        raise PlanError(
            f"the plan is of another program, {carried.plan.module_name}: it says something of {known} of "
            f"{len(computing)} instructions",
            where="plan",
            remedy=_PLAN_ANEW,
        )
    taken = sum(partner is not None and _decision(entry) == _decision(partner) for entry, partner in partners)
    said = f"what it decides of {taken} of {len(computing)} instructions"
    if taken < len(computing):
        said += "; the others were searched on its mesh"
    return said if is_same else f"{said}; {_describe_changes(matching)}"


def _decision(entry: InstructionPlan) -> tuple[object, ...]:
    return entry.operands, entry.result, entry.partial


def _describe_changes(matching: Matching) -> str:
    """`2 instructions differ: dot.3, f32[8,16] dot, …; 1 is gone: …`."""
    changed = [each for each in matching.changed if each.opcode != "tuple"]
    parts = []
    if changed:
        verb = "differs" if len(changed) == 1 else "differ"
        parts.append(f"{_count(changed)} {verb} from its program: {_list(changed)}")
    if matching.dropped:
        verb = "is" if len(matching.dropped) == 1 else "are"
        parts.append(f"{_count(matching.dropped)} {verb} gone: {_list(matching.dropped)}")
    return "; ".join(parts) or "its program has the same instructions in another order"


def _count(instructions: Sequence[Instruction]) -> str:
    return f"{len(instructions)} instruction{'' if len(instructions) == 1 else 's'}"


def _list(instructions: Sequence[Instruction]) -> str:
    named = [describe(each) for each in instructions[:_MAX_NAMED]]
    more = len(instructions) - _MAX_NAMED
    return "; ".join(named) + (f"; and {more} more" if more > 0 else "")


def _add_note(plan: _AnyPlan, note: str) -> _AnyPlan:
    return replace(plan, notes=(*plan.notes, f"{TAKEN_OVER}: {note}"))


def _fused_attention(plan: Plan | PipelinePlan, programs: Iterable[Module], profile: HardwareProfile) -> str:
    """The option that the plan was made under, as far as its programs and its notes show it."""
    if not any(note.replaced or note.reason for note in plan.attention):
        return "off"
    calls = [call for module in programs for each in module.instructions() if (call := read_call(each))]
    needs_on = profile.attention is None or any(call.element_type == "f32" for call in calls)
    return "on" if needs_on and any(note.replaced for note in plan.attention) else "auto"


def _bucket_bytes(plan: Plan, profile: HardwareProfile) -> int | None:
    """The bucket that the plan was made for."""
    values = [plan.compile_options.get(option) for _, option in profile.combiner_options]
    return next((value for value in values if isinstance(value, int)), None)


def _renamed(variables: tuple[VariablePlan, ...], names: Sequence[str]) -> tuple[VariablePlan, ...]:
    return tuple(replace(variable, name=name) for variable, name in zip(variables, names, strict=False))


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()
