"""The parts of a step as modules: one micro-batch, and the once part."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.hlo import ArrayShape, Computation, Instruction, Module, TupleShape
from shardwright.planner.gc_pause import gc_paused
from shardwright.planner.graph.inlining import callees_first
from shardwright.planner.microbatch.block import INDEX_SHAPE, Block, Names
from shardwright.planner.microbatch.demand import Demand, Version
from shardwright.planner.microbatch.kinds import WHOLE, Along, local_shape
from shardwright.planner.microbatch.split import SharedValue, StepSplit
from shardwright.planner.microbatch.writer import Writer
from shardwright.planner.rewrites import edit


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """A flat argument of the step. local: one micro-batch's slice of it, not all of it."""

    number: int
    local: bool = False


@dataclass(frozen=True, slots=True)
class Index:
    """The number of the micro-batch, s32[]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """An array computed once, ahead of the micro-batches: the result of instruction `name`."""

    name: str


Input = Argument | Index | Ahead | SharedValue
Output = SharedValue | Ahead | int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartModule:
    """A part of a step as a module of arrays: parameter k is `inputs[k]`, leaf k of the flat root is `outputs[k]`.

    outputs: a micro-batch's terms and parts; the once part's output leaves of the step; what is computed ahead.
    """

    module: Module
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]


def ahead_module(split: StepSplit) -> PartModule:
    """What is computed ahead of the micro-batches, of state."""
    with gc_paused():
        return _AheadPart(split).run()


def micro_module(split: StepSplit, micro_batches: int) -> PartModule:
    """One micro-batch as a module. Raises MicroBatchError for a number that does not divide the batch."""
    split.check(micro_batches)
    with gc_paused():
        return _MicroPart(split, micro_batches).run()


def once_module(split: StepSplit) -> PartModule:
    """The once part, after the last micro-batch, on finished terms and collected parts."""
    with gc_paused():
        return _OncePart(split).run()


# ---- parts by themselves ---------------------------------------------------------


class _Part:
    """A module under construction: parameters in order of first use."""

    def __init__(self, split: StepSplit) -> None:
        self.split = split
        self.block = Block(Names(split.module))
        self.inputs: dict[Input, Instruction] = {}
        self.numbers = argument_numbers(split.module)

    def parameter(self, value: Input, name: str, shape: ArrayShape, like: Instruction | None = None) -> Instruction:
        parameter = self.inputs.get(value)
        if parameter is None:
            parameter = Instruction(name, "parameter", shape, index=len(self.inputs))
            if like is not None and "metadata" in like.attributes:
                parameter.attributes["metadata"] = like.attributes["metadata"]
            self.inputs[value] = self.block.add(parameter)
        return parameter

    def argument(self, version: Version, parts: int) -> Instruction:
        parameter, leaf, kind = version
        value = Argument(number=self.numbers[parameter] + leaf, local=isinstance(kind, Along))
        shape = local_shape(parameter.shape.leaves[leaf], kind, parts)
        return self.inputs.get(value) or self.parameter(value, self.block.names.of(parameter), shape, parameter)

    def finish(self, results: list[Instruction], outputs: tuple[Output, ...]) -> PartModule:
        root = self.block.make("tuple", TupleShape(tuple(value.shape for value in results)), results, "results", "of")
        root.is_root = True
        source = self.split.module
        entry = Computation(
            source.entry.name, self.block.out, root, tuple(self.inputs.values()), True, source.entry.attributes
        )
        header = {name: value for name, value in source.header.items() if name != "input_output_alias"}
        plain = Module(source.name, header, source.computations, source.entry, source.tables)
        module = edit.module_of(plain, callees_first(entry))
        return PartModule(module=module, inputs=tuple(self.inputs), outputs=outputs)


class _AheadPart(_Part):
    def run(self) -> PartModule:
        split = self.split
        demand = Demand(split.micro.labels, split.micro.labeller, split.ahead)
        writer = Writer(demand, 1, self.block, lambda version: self.argument(version, 1), _no_index)
        writer.write()
        results = [writer.value(version) for version in split.ahead]
        return self.finish(results, tuple(Ahead(name=version[0].name) for version in split.ahead))


class _MicroPart(_Part):
    def __init__(self, split: StepSplit, parts: int) -> None:
        super().__init__(split)
        self.parts = parts

    def run(self) -> PartModule:
        micro, ahead = self.split.micro, self.split.ahead
        demand = Demand(micro.labels, micro.labeller, micro.roots, frozenset(ahead)) if ahead else micro
        writer = Writer(demand, self.parts, self.block, self._input, self._index)
        writer.write()
        return self.finish(micro_outputs(self.split, writer, self.block), self.split.shared)

    def _input(self, version: Version) -> Instruction:
        instruction = version[0]
        if version not in self.split.ahead:
            return self.argument(version, self.parts)
        (shape,) = instruction.shape.leaves
        return self.parameter(Ahead(name=instruction.name), self.block.names.of(instruction), shape, instruction)

    def _index(self) -> Instruction:
        return self.inputs.get(Index()) or self.parameter(
            Index(), self.block.names.like("micro_batch", "index"), INDEX_SHAPE
        )


class _OncePart(_Part):
    def run(self) -> PartModule:
        self.shared = {(value.name, value.leaf): value for value in self.split.shared}
        writer = Writer(self.split.once, 1, self.block, self._input, _no_index)
        writer.write()
        results = [writer.value(version) for version in self.split.once.roots]
        return self.finish(results, tuple(range(len(results))))

    def _input(self, version: Version) -> Instruction:
        instruction, leaf, kind = version
        if kind == WHOLE:
            return self.argument(version, 1)
        shared = self.shared[instruction.name, leaf]
        name = self.block.names.of(instruction) if leaf == 0 else self.block.names.like(instruction.name, "done")
        value = self.parameter(shared, name, shared.shape, instruction)
        return narrow(self.block, value, instruction.shape.leaves[leaf], instruction)


def _no_index() -> Instruction:
    raise AssertionError("nothing that runs once reads the number of a micro-batch")


def argument_numbers(module: Module) -> dict[Instruction, int]:
    """The flat number of each parameter's first array leaf."""
    numbers, count = {}, 0
    for parameter in sorted(module.entry.parameters, key=lambda p: p.index):
        numbers[parameter] = count
        count += len(parameter.shape.leaves)
    return numbers


def micro_outputs(split: StepSplit, writer: Writer, block: Block) -> list[Instruction]:
    """A micro-batch's terms and parts, in their accumulation types."""
    outputs = []
    for shared, version in zip(split.shared, split.micro.roots, strict=True):
        value = writer.value(version)
        shape = value.shape
        assert isinstance(shape, ArrayShape)
        if shape.element_type != shared.shape.element_type:
            wide = ArrayShape(shared.shape.element_type, shape.dimensions, (), shape.layout)
            value = block.make("convert", wide, [value], version[0], "wide")
        outputs.append(value)
    return outputs


def narrow(block: Block, value: Instruction, shape: ArrayShape, like: Instruction) -> Instruction:
    """A finished term in the program's type."""
    assert isinstance(value.shape, ArrayShape)
    return value if value.shape.element_type == shape.element_type else block.make("convert", shape, [value], like)
