"""The programs that run once, after the last micro-batch: sums reduced, updates, outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwright.errors import PlanError
from shardwright.hlo import ArrayShape, Instruction
from shardwright.planner.microbatch import Along, Argument
from shardwright.planner.pipeline.argument_placement import ArgumentPlacement, place_arguments
from shardwright.planner.pipeline.layouts import StageLayouts, whole_sharding
from shardwright.planner.pipeline.microbatch_programs import Total
from shardwright.planner.pipeline.program_assignment import readers
from shardwright.planner.pipeline.program_writer import ProgramDraft, ProgramWriter
from shardwright.planner.pipeline.step import PipelineStep, argument_value, array, output_value, sum_value
from shardwright.planner.pipeline.update_waves import UpdateProgramId, UpdateWaves, assign_waves
from shardwright.plans.shardings import TensorSharding


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePrograms:
    """The once part as programs.

    stage_of_argument: the stage of every argument that is replaced each step.
    outputs: per output of the step, its value and the stage that has it.
    """

    programs: tuple[ProgramDraft, ...]
    stage_of_argument: Mapping[int, int]
    outputs: tuple[tuple[str, int], ...]


def make_update_programs(step: PipelineStep, totals: Sequence[Total]) -> UpdatePrograms:
    """The update programs of a step. totals: one per output of the micro part, in order."""
    return _UpdateSplitter(step, totals).run()


class _UpdateSplitter:
    def __init__(self, step: PipelineStep, totals: Sequence[Total]) -> None:
        self._step = step
        self._entry = step.once.module.entry
        micro_totals = dict(zip(step.micro.outputs, totals, strict=True))
        self._totals: dict[Instruction, Total] = {
            parameter: micro_totals[given]
            for parameter in self._entry.parameters
            if (given := step.input_of(step.once, parameter)) in micro_totals
        }
        self._owners: ArgumentPlacement = place_arguments(step, self._totals)
        self._phases: UpdateWaves = assign_waves(self._entry, self._owners.stages, self._totals)
        self._users = readers(self._entry)
        self._reduced: dict[Instruction, UpdateProgramId] = {
            parameter: place
            for parameter, total in self._totals.items()
            if total.sharding.unreduced and (place := self._reducing_place(parameter, total)) is not None
        }
        self._outputs = [self._output(number, result) for number, result in enumerate(self._entry.root.operands)]
        self._handed_out = {value for value, _ in self._outputs}
        self._parameters: dict[int, list[Instruction]] = {}
        for parameter in self._entry.parameters:
            number = self._argument(parameter)
            if number is not None:
                self._parameters.setdefault(number, []).append(parameter)

    def run(self) -> UpdatePrograms:
        written = (at for _, at in self._outputs if isinstance(at, UpdateProgramId))
        places = sorted({*self._phases.of.values(), *self._reduced.values(), *written})
        contents = self._contents(places)
        users_of: dict[Instruction, set[UpdateProgramId]] = {}
        for place, (_, inputs) in contents.items():
            for value_read in inputs:
                users_of.setdefault(value_read, set()).add(place)
        programs = [self._program(place, *contents[place], users_of) for place in places]
        return UpdatePrograms(
            programs=tuple(programs),
            stage_of_argument=self._owners.stage_of_argument,
            outputs=tuple((value, at.stage if isinstance(at, UpdateProgramId) else at) for value, at in self._outputs),
        )

    # ---- placement -----------------------------------------------------------
    def _reducing_place(self, parameter: Instruction, total: Total) -> UpdateProgramId | None:
        """The program that reduces a partial sum for several others; None: its one reader reduces it itself."""
        places = [self._phases.of[user] for user in self._users[parameter] if user in self._phases.of]
        is_output = parameter in self._entry.root.operands
        if not is_output and set(places) <= {UpdateProgramId(place.wave, total.stage) for place in places[:1]}:
            return None
        phases = [place.wave - (place.stage != total.stage) for place in places]
        return UpdateProgramId(max(0, min(phases, default=0)), total.stage)

    def _output(self, number: int, result: Instruction) -> tuple[str, UpdateProgramId | int]:
        """The value of an output, and the program that writes it, or the stage that has it anyway."""
        step = self._step
        if result in self._totals:
            total = self._totals[result]
            return (
                (output_value(number), self._reduced[result]) if result in self._reduced else (total.value, total.stage)
            )
        if result.opcode == "parameter":
            given = step.input_of(step.once, result)
            assert isinstance(given, Argument)
            return argument_value(given.number), self._owners.stages.get(result, 0)
        stage = self._owners.stage_of_argument[step.aliases[number]] if number in step.aliases else 0
        return output_value(number), self._phases.of.get(result, UpdateProgramId(self._phases.last, stage))

    # ---- contents --------------------------------------------------------------
    def _contents(
        self, places: Sequence[UpdateProgramId]
    ) -> dict[UpdateProgramId, tuple[list[Instruction], list[Instruction]]]:
        """Per program (its instructions, its inputs from other programs), both in order."""
        own: dict[UpdateProgramId, set[Instruction]] = {place: set() for place in places}
        given: dict[UpdateProgramId, list[Instruction]] = {place: [] for place in places}
        for instruction, place in self._phases.of.items():
            own[place].add(instruction)
        for result, (_, at) in zip(self._entry.root.operands, self._outputs, strict=True):
            if isinstance(at, UpdateProgramId):
                given[at].append(result)
        for parameter, place in self._reduced.items():
            given[place].append(parameter)
        order = {instruction: i for i, instruction in enumerate(self._entry)}
        contents = {place: self._content(place, own[place], given[place]) for place in places}
        return {place: (sorted(instructions, key=order.__getitem__), sorted(inputs, key=order.__getitem__))
                for place, (instructions, inputs) in contents.items()}  # fmt: skip

    def _content(
        self, place: UpdateProgramId, own: set[Instruction], outputs: Sequence[Instruction]
    ) -> tuple[set[Instruction], set[Instruction]]:
        """The instructions of a program, unplaced ones included, and its inputs from other programs.

        own: instructions placed there. outputs: its further outputs.
        """
        todo = [*outputs, *(operand for instruction in own for operand in instruction.operands)]
        inputs: set[Instruction] = set()
        while todo:
            value = todo.pop()
            if value in own or value in inputs:
                continue
            if value.opcode == "parameter" or self._phases.of.get(value, place) != place:
                inputs.add(value)
            else:
                own.add(value)
                todo += value.operands
        return own, inputs

    def _program(
        self,
        place: UpdateProgramId,
        instructions: Sequence[Instruction],
        inputs: Sequence[Instruction],
        readers: Mapping[Instruction, set[UpdateProgramId]],
    ) -> ProgramDraft:
        """readers: per instruction, the programs that read it and do not compute it."""
        step = self._step
        layouts = step.layouts[place.stage]
        program = ProgramWriter(
            name=place.name, kind="apply", stage=place.stage, chunk=None, source=step.once.module, layouts=layouts
        )
        for instruction in inputs:
            program.stand_in(instruction, self._input(program, place, instruction))
        for instruction in instructions:
            sharding = self._met_sharding(instruction, layouts)
            program.copy(instruction) if sharding is None else program.copy_in(instruction, sharding)
        for instruction in instructions:
            if readers.get(instruction, set()) - {place} and self._phases.of.get(instruction) == place:
                program.output(instruction.name, program.of(instruction), layouts.boundary_sharding(instruction))
        for parameter, at in self._reduced.items():
            if at == place and self._is_read_apart(parameter, place):
                sharding = self._sum_sharding(parameter, layouts)
                program.output(sum_value(self._totals[parameter].value), program.of(parameter), sharding)
        reuses = {}
        for number, (value, where) in enumerate(self._outputs):
            if where != place:
                continue
            result = self._entry.root.operands[number]
            sharding = layouts.output(number)
            program.output(value, program.of(result), sharding)
            donated = self._argument_to_donate(number, place, readers)
            if donated is not None and layouts.argument(donated) == sharding:
                reuses[value] = argument_value(donated)
        return program.finish(reuses)

    def _is_read_apart(self, parameter: Instruction, place: UpdateProgramId) -> bool:
        return any(self._phases.of.get(user, place) != place for user in self._users[parameter])

    def _argument_to_donate(
        self, output: int, place: UpdateProgramId, readers: Mapping[Instruction, set[UpdateProgramId]]
    ) -> int | None:
        """The argument whose buffer an output may reuse: kept by this stage, and last read here."""
        number = self._step.aliases.get(output)
        if number is None or self._owners.stage_of_argument[number] != place.stage:
            return None
        if argument_value(number) in self._handed_out:
            return None  # as it came, too
        reading = [at for parameter in self._parameters.get(number, ()) for at in readers.get(parameter, ())]
        here = [at for at in reading if at.stage == place.stage]
        return number if here and max(here) == place and place in here else None

    def _argument(self, parameter: Instruction) -> int | None:
        if parameter.opcode != "parameter":
            return None
        given = self._step.input_of(self._step.once, parameter)
        return given.number if isinstance(given, Argument) else None

    # ---- values --------------------------------------------------------------------
    def _input(self, program: ProgramWriter, place: UpdateProgramId, source: Instruction) -> Instruction:
        layouts = program.layouts
        if not isinstance(source.shape, ArrayShape):
            raise PlanError("a tuple cannot go from one program to another", where=source.name)
        if source.opcode != "parameter":
            return program.parameter(
                source.name, source.name, source.shape, layouts.boundary_sharding(source), like=source
            )
        if source in self._totals:
            return self._total(program, place, source, self._totals[source])
        number = self._argument(source)
        assert number is not None
        stored = layouts.argument(number)
        sharding = whole_sharding(array(source)) if number in self._step.split.batch else stored
        return program.parameter(argument_value(number), source.name, source.shape, sharding, like=source)

    def _total(self, program: ProgramWriter, place: UpdateProgramId, source: Instruction, total: Total) -> Instruction:
        layouts = program.layouts
        if isinstance(total.kind, Along):
            return self._whole(program, source, total)
        if source in self._reduced and self._reduced[source] != place:
            sharding = self._sum_sharding(source, layouts)
            return program.parameter(sum_value(total.value), source.name, total.shape, sharding, like=source)
        sharding = total.sharding if place.stage == total.stage else self._sum_sharding(source, layouts)
        return program.parameter(total.value, source.name, total.shape, sharding, like=source)

    def _met_sharding(self, value: Instruction, layouts: StageLayouts) -> TensorSharding | None:
        """The layout of what meets in a sum of several stages' terms: as the sum is read; None: of no such sum.

        Each stage reduces its own term to that, and only parts go from stage to stage.
        """
        top = self._step.meeting.get(value)
        if top is None:
            return None
        for user in self._users[top]:
            if user.opcode != "tuple":
                return TensorSharding(layouts.consumer_sharding(user, user.operands.index(top)).dims)
        return layouts.output(self._entry.root.operands.index(top))

    def _sum_sharding(self, parameter: Instruction, layouts: StageLayouts) -> TensorSharding:
        """The layout of a reduced sum: that of its first reader on the stage."""
        met = self._met_sharding(parameter, layouts)
        if met is not None:
            return met
        for user in self._users[parameter]:
            place = self._phases.of.get(user)
            if place is not None and self._step.layouts[place.stage] is layouts and user.opcode != "tuple":
                used = layouts.consumer_sharding(user, user.operands.index(parameter))
                return TensorSharding(used.dims)
        return TensorSharding(self._totals[parameter].sharding.dims)

    def _whole(self, program: ProgramWriter, source: Instruction, total: Total) -> Instruction:
        """An array of all micro-batches' parts, without their dimension."""
        stacked = program.parameter(total.value, f"{source.name}.all", total.shape, total.sharding, like=source)
        uncut = TensorSharding(tuple(() for _ in total.sharding.dims))
        return program.make(
            "reshape", source.name, array(source), [(stacked, uncut)], TensorSharding.replicated(array(source).rank)
        )
