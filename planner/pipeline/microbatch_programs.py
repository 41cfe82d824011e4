"""The programs that run once a micro-batch, and those that prepare the first one."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from shardwright.errors import PlanError
from shardwright.hlo import ArrayShape, Instruction
from shardwright.planner.microbatch import Ahead, Along, Argument, Output, SharedValue, Term
from shardwright.planner.pipeline.layouts import StageLayouts, whole_sharding
from shardwright.planner.pipeline.program_assignment import ProgramAssignment, ProgramId
from shardwright.planner.pipeline.program_writer import ProgramDraft, ProgramWriter
from shardwright.planner.pipeline.step import (
    INDEX,
    PipelineStep,
    ahead_value,
    argument_value,
    array,
    batch_stack_value,
    batch_value,
    micro_dim,
    stack_dims,
    stack_sharding,
    total_value,
    used_value,
)
from shardwright.planner.rewrites.edit import int_list
from shardwright.plans.shardings import TensorSharding
from shardwright.tasks import ProgramKind

_INT = ArrayShape("s32", ())
_SCALAR = TensorSharding(())

#: Neutral literals of booleans, by reduction; other types: see `_neutral_literal`.
_OF_BOOLEANS = {"and": "true", "or": "false", "xor": "false"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """The common result of a step's micro-batches: a sum (or maximum, …) of terms, or an array of their parts.

    value: its name.
    term: producer of one micro-batch's term.
    stage: the stage that computes it.
    kind: reduction, or dimension of the parts.
    shape: as stored.
    sharding: on its stage.
    view_of: its dimensions in the step, if micro-batches have a dimension of their own.
    """

    value: str
    term: Instruction
    stage: int
    kind: Term | Along
    shape: ArrayShape
    sharding: TensorSharding
    view_of: tuple[int, ...] | None = None


def totals_of(step: PipelineStep) -> tuple[Total, ...]:
    """One per output of the micro part, in order; equal totals stand for equal outputs."""
    root = step.micro.module.entry.root
    return tuple(_total(step, shared, term) for shared, term in zip(step.micro.outputs, root.operands, strict=True))


def _total(step: PipelineStep, shared: Output, term: Instruction) -> Total:
    assert isinstance(shared, SharedValue)
    stage = step.stage_of_chunk[program_of_total(step, term).chunk]
    layouts = step.layouts[stage]
    value, kind = total_value(term.name), shared.kind
    if isinstance(kind, Along):
        dims = stack_dims(shared.shape.dimensions, kind, step.micro_batches)
        local = layouts.boundary_sharding(term)
        sharding = stack_sharding(local, kind, dims, layouts.mesh.size(local.dims[kind.dim]))
        shape = ArrayShape(shared.shape.element_type, dims)
        return Total(
            value=value,
            term=term,
            stage=stage,
            kind=kind,
            shape=shape,
            sharding=sharding,
            view_of=shared.shape.dimensions,
        )
    if not isinstance(kind, Term):
        raise PlanError(f"{shared.name} is neither a sum over the micro-batches nor made of their parts")
    sharding = layouts.total(shared, term)
    sharding = sharding if kind.reduction == "add" else TensorSharding(sharding.dims)
    return Total(value=value, term=term, stage=stage, kind=kind, shape=shared.shape, sharding=sharding)


def program_of_total(step: PipelineStep, term: Instruction) -> ProgramId:
    """The program that adds a term; for a term of constants alone, the last one of a micro-batch."""
    return step.program_assignment.of.get(term) or step.program_assignment.programs()[-1]


# ---- contents of programs --------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProgramContent:
    """The instructions of one program in order, and its inputs: values of other programs, or parameters."""

    instructions: tuple[Instruction, ...]
    inputs: tuple[Instruction, ...]


def content_of(step: PipelineStep, home: ProgramId, totals: Sequence[Total]) -> ProgramContent:
    """The content of a program: its own instructions, and the rematerialized values they read."""
    homes, entry = step.program_assignment.of, step.micro.module.entry
    own = {instruction for instruction, at in homes.items() if at == home}
    todo = [operand for instruction in own for operand in instruction.operands]
    todo += [total.term for total in totals if program_of_total(step, total.term) == home]
    inputs: set[Instruction] = set()
    while todo:
        source = todo.pop()
        if source in own or source in inputs:
            continue
        if source in homes or source.opcode == "parameter":
            inputs.add(source)
        else:
            own.add(source)
            todo += source.operands
    order = list(entry)
    return ProgramContent(
        tuple(value for value in order if value in own),
        tuple(value for value in order if value in inputs),
    )


def chunk_programs(step: PipelineStep, totals: Sequence[Total]) -> Iterator[ProgramDraft]:
    """Forward and backward programs, in the order of execution within a micro-batch."""
    contents = {home: content_of(step, home, totals) for home in step.program_assignment.programs()}
    wanted = {value for content in contents.values() for value in content.inputs}
    for home, content in contents.items():
        yield _chunk_program(step, home, content, wanted, totals)


def _chunk_program(
    step: PipelineStep,
    home: ProgramId,
    content: ProgramContent,
    inputs_of_others: set[Instruction],
    totals: Sequence[Total],
) -> ProgramDraft:
    kind = _kind(home, step.program_assignment)
    stage = step.stage_of_chunk[home.chunk]
    layouts = step.layouts[stage]
    program = ProgramWriter(
        name=f"{kind}.{home.chunk}", kind=kind, stage=stage, chunk=home.chunk, source=step.micro.module, layouts=layouts
    )
    for instruction in content.inputs:
        program.stand_in(instruction, _input(step, program, instruction))
    for instruction in content.instructions:
        program.copy(instruction)
    for instruction in content.instructions:
        if instruction in inputs_of_others and step.program_assignment.of.get(instruction) == home:
            program.output(instruction.name, program.of(instruction), layouts.boundary_sharding(instruction))
    for total in dict.fromkeys(totals):
        if program_of_total(step, total.term) == home:
            _add_to(step, program, total)
    return program.finish()


def _kind(home: ProgramId, homes: ProgramAssignment) -> ProgramKind:
    if home.is_delayed:
        return "weight"
    return "backward" if home.is_backward and homes.has_backward else "forward"


def _input(step: PipelineStep, program: ProgramWriter, source: Instruction) -> Instruction:
    """The parameter for a value of another program, or an argument."""
    layouts = program.layouts
    if not isinstance(source.shape, ArrayShape):
        raise PlanError("a tuple cannot go from one stage to another", where=source.name)
    if source.opcode != "parameter":
        return program.parameter(source.name, source.name, source.shape, layouts.boundary_sharding(source), like=source)
    given = step.input_of(step.micro, source)
    if isinstance(given, Argument):
        value, sharding = argument_as_used(step, layouts, program.stage, given)
        return program.parameter(value, source.name, source.shape, sharding, like=source)
    if isinstance(given, Ahead):
        value = ahead_value(given, program.stage)
        return program.parameter(value, source.name, source.shape, layouts.ahead(source), like=source)
    return program.parameter(INDEX, source.name, source.shape, whole_sharding(array(source)), like=source)


def argument_as_used(
    step: PipelineStep, layouts: StageLayouts, stage: int, argument: Argument
) -> tuple[str, TensorSharding]:
    """The value that a micro-batch reads for an argument, and its layout."""
    number = argument.number
    if argument.local:
        along = step.split.batch[number]
        return batch_value(number, stage), micro_batch_sharding(batch_sharding(step, layouts, number), along)
    if number in step.split.batch:  # the whole batch argument, stored separately from its parts
        return argument_value(number), whole_sharding(array(step.arguments[number]))
    used = layouts.argument_in_loop(number)
    return (argument_value(number) if layouts.argument(number) == used else used_value(number, stage)), used


def batch_sharding(step: PipelineStep, layouts: StageLayouts, number: int) -> TensorSharding:
    """The layout of a batch argument, its micro-batches along a separate, unsplit dimension."""
    sharding, at = layouts.argument_in_loop(number), micro_dim(step.split.batch[number])
    if len(sharding.dims) == array(step.arguments[number]).rank:  # of one micro-batch: it has no such dimension
        return TensorSharding((*sharding.dims[:at], (), *sharding.dims[at:]))
    return TensorSharding((*sharding.dims[:at], (), *sharding.dims[at + 1 :]))


def _index(program: ProgramWriter) -> Instruction:
    return program.parameter(INDEX, "micro_batch", _INT, _SCALAR)


# ---- totals ----------------------------------------------------------------------


def _add_to(step: PipelineStep, program: ProgramWriter, total: Total) -> None:
    """Adds this micro-batch's term to the total of those before it, in place."""
    term = program.of(total.term)
    name = total.term.name
    before = program.parameter(total.value, f"{name}.total", total.shape, total.sharding)
    if isinstance(total.kind, Term):
        if array(total.term) != total.shape:
            term = program.make("convert", f"{name}.wide", total.shape, [(term, total.sharding)], total.sharding)
        operands = [(before, total.sharding), (term, total.sharding)]
        updated = program.make(total.kind.reduction, f"{name}.added", total.shape, operands, total.sharding)
    else:
        updated = _write_part(step, program, total, before, term, total.kind)
    program.output(total.value, updated, total.sharding)


def _write_part(
    step: PipelineStep, program: ProgramWriter, total: Total, before: Instruction, term: Instruction, along: Along
) -> Instruction:
    """All micro-batches' parts with this one's in its place."""
    name = total.term.name
    at = micro_dim(along)
    part = ArrayShape(
        total.shape.element_type, tuple(1 if d == at else n for d, n in enumerate(total.shape.dimensions))
    )
    local = micro_batch_sharding(total.sharding, along)
    seen = program.make("reshape", f"{name}.part", part, [(term, local)], total.sharding)
    start = [(index, _SCALAR) for index in _starts(program, name, total.shape.rank, at)]
    operands = [(before, total.sharding), (seen, total.sharding), *start]
    return program.make("dynamic-update-slice", f"{name}.written", total.shape, operands, total.sharding)


def micro_batch_sharding(stacked: TensorSharding, along: Along) -> TensorSharding:
    """The layout of one micro-batch's part, given the layout `stacked` of all."""
    at = micro_dim(along)
    cut = stacked.dims[at - 1] if along.outer > 1 else stacked.dims[at + 1]
    return TensorSharding((*stacked.dims[: along.dim], cut, *stacked.dims[at + 2 :]))


def _starts(program: ProgramWriter, name: str, rank: int, at: int) -> list[Instruction]:
    """Offsets of this micro-batch's part, by dimension."""
    index = _index(program)
    zero = program.make("constant", f"{name}.zero", _INT, [], _SCALAR, payload="0")
    return [index if dim == at else zero for dim in range(rank)]


# ---- before the first micro-batch --------------------------------------------------


def start_programs(
    step: PipelineStep, totals: Sequence[Total], programs: Sequence[ProgramDraft]
) -> Iterator[ProgramDraft]:
    """Per stage, initial totals, arguments resharded to their layout in the micro-batches, and what is made of them."""
    for stage, layouts in enumerate(step.layouts):
        program = ProgramWriter(
            name=f"start.{stage}", kind="start", stage=stage, chunk=None, source=step.micro.module, layouts=layouts
        )
        for total in dict.fromkeys(totals):
            if total.stage == stage:
                program.output(total.value, _initial_total(program, total), total.sharding)
        values_read = {value for draft in programs if draft.stage == stage for value in draft.reads}
        for parameter in step.micro.module.entry.parameters:
            given = step.input_of(step.micro, parameter)
            if not isinstance(given, Argument) or given.local or used_value(given.number, stage) not in values_read:
                continue
            argument, sharding = step.arguments[given.number], layouts.argument(given.number)
            stored = program.parameter(
                argument_value(given.number), argument.name, array(argument), sharding, like=argument
            )
            program.output(used_value(given.number, stage), stored, layouts.argument_in_loop(given.number))
        _make_ahead(step, program, values_read)
        if not program.is_empty:
            yield program.finish()


def _make_ahead(step: PipelineStep, program: ProgramWriter, values_read: Collection[str]) -> None:
    """What the stage's micro-batches read and each would make alike: narrower copies of weights, for example."""
    wanted = [value for value in step.made_ahead if ahead_value(value, program.stage) in values_read]
    needed: set[Instruction] = set()
    todo = [step.made_ahead[value] for value in wanted]
    while todo:
        instruction = todo.pop()
        if instruction not in needed:
            needed.add(instruction)
            todo += instruction.operands
    for instruction in step.ahead.module.entry:
        if instruction not in needed:
            continue
        if instruction.opcode != "parameter":
            program.copy(instruction)
            continue
        given = step.input_of(step.ahead, instruction)
        assert isinstance(given, Argument)
        argument, layouts = step.arguments[given.number], program.layouts
        sharding = layouts.argument(given.number)
        stored = program.parameter(
            argument_value(given.number), argument.name, array(argument), sharding, like=argument
        )
        program.stand_in(instruction, stored)
    for value in wanted:
        made = step.made_ahead[value]
        program.output(ahead_value(value, program.stage), program.of(made), program.layouts.ahead(made))


def _initial_total(program: ProgramWriter, total: Total) -> Instruction:
    """A total before the first micro-batch."""
    name, kind = total.term.name, total.shape.element_type
    scalar = ArrayShape(kind, ())
    literal = _neutral_literal(total.kind.reduction if isinstance(total.kind, Term) else "add", kind)
    if not total.shape.rank:
        return program.make("constant", f"{name}.nothing", scalar, [], _SCALAR, payload=literal)
    one = program.make("constant", f"{name}.nothing", scalar, [], _SCALAR, payload=literal)
    dimensions = int_list("dimensions", ())
    return program.make(
        "broadcast", f"{name}.total", total.shape, [(one, _SCALAR)], total.sharding, attributes=[dimensions]
    )


def _neutral_literal(reduction: str, element_type: str) -> str:
    """The literal of a reduction's neutral element."""
    if element_type == "pred":
        return _OF_BOOLEANS.get(reduction, "false")
    if element_type.startswith("c"):
        return "(1, 0)" if reduction == "multiply" else "(0, 0)"
    if reduction in ("maximum", "minimum") and not element_type.startswith(("f", "bf")):
        return _extreme(reduction, element_type)
    of_numbers = {"multiply": "1", "maximum": "-inf", "minimum": "inf", "and": "-1"}
    return of_numbers.get(reduction, "0")


def _extreme(reduction: str, element_type: str) -> str:
    """The smallest integer of a type for a maximum, the largest for a minimum."""
    bits, signed = int(element_type[1:]), element_type.startswith("s")
    if reduction == "maximum":
        return str(-(1 << (bits - 1)) if signed else 0)
    return str((1 << (bits - 1)) - 1 if signed else (1 << bits) - 1)


# ---- parts of the batch ------------------------------------------------------------


def split_programs(step: PipelineStep, programs: Sequence[ProgramDraft]) -> Iterator[ProgramDraft]:
    """Per stage, one micro-batch's part of the batch arguments that its programs read."""
    for stage, layouts in enumerate(step.layouts):
        values_read = {value for draft in programs if draft.stage == stage for value in draft.reads}
        program = ProgramWriter(
            name=f"split.{stage}", kind="split", stage=stage, chunk=None, source=step.micro.module, layouts=layouts
        )
        for parameter in step.micro.module.entry.parameters:
            given = step.input_of(step.micro, parameter)
            if isinstance(given, Argument) and given.local and batch_value(given.number, stage) in values_read:
                _split(step, program, given.number, parameter)
        if not program.is_empty:
            yield program.finish()


def _split(step: PipelineStep, program: ProgramWriter, number: int, parameter: Instruction) -> None:
    """The part of one batch argument."""
    along, argument = step.split.batch[number], step.arguments[number]
    whole, local = array(argument), array(parameter)
    dims = stack_dims(whole.dimensions, along, step.micro_batches)
    sharding = batch_sharding(step, program.layouts, number)
    value = batch_stack_value(number)
    stacked = program.parameter(
        value, f"{argument.name}.all", ArrayShape(whole.element_type, dims), sharding, like=argument,
        view_of=whole.dimensions,
    )  # fmt: skip
    at = micro_dim(along)
    sizes = tuple(1 if dim == at else size for dim, size in enumerate(dims))
    starts = [(index, _SCALAR) for index in _starts(program, argument.name, len(dims), at)]
    part_slice = program.make(
        "dynamic-slice", f"{argument.name}.taken", ArrayShape(whole.element_type, sizes),
        [(stacked, sharding), *starts], sharding, attributes=[int_list("dynamic_slice_sizes", sizes)],
    )  # fmt: skip
    part = program.make(
        "reshape", parameter.name, local, [(part_slice, sharding)], micro_batch_sharding(sharding, along)
    )
    program.output(batch_value(number, program.stage), part, micro_batch_sharding(sharding, along))
