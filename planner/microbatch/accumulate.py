"""The whole step as one program: an accumulating loop over micro-batches, then the once part."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.hlo import ArrayShape, Computation, Instruction, Module, Shape, TupleShape
from shardwright.planner.gc_pause import gc_paused
from shardwright.planner.graph.inlining import callees_first
from shardwright.planner.microbatch.block import INDEX_SHAPE, Block, Names, Region, is_first
from shardwright.planner.microbatch.demand import Demand, Version
from shardwright.planner.microbatch.kinds import SUM, WHOLE, Along, local_shape
from shardwright.planner.microbatch.modules import argument_numbers, micro_outputs, narrow
from shardwright.planner.microbatch.split import SharedValue, StepSplit
from shardwright.planner.microbatch.writer import Writer
from shardwright.planner.rewrites import edit

#: Where the loop carries the number of the micro-batch.
_INDEX = 0


def accumulate_step(split: StepSplit, micro_batches: int) -> Module:
    """The whole step as one module: an accumulating loop over micro-batches, then the once part.

    An argument with the batch has two dimensions in place of the cut one, `[micro_batches, rest]`: the same elements,
    row-major. The rest equals `split.module`, the result for one micro-batch.
    Raises MicroBatchError for a number of micro-batches that does not divide the batch.
    """
    split.check(micro_batches)
    if micro_batches == 1:
        return split.module
    with gc_paused():
        return _AccumulatedStep(split, micro_batches).run()


class _AccumulatedStep:
    def __init__(self, split: StepSplit, parts: int) -> None:
        self.split = split
        self.micro = split.micro
        self.parts = parts
        self.names = Names(split.module)
        self.block = Block(self.names)
        self.numbers = argument_numbers(split.module)
        self.arguments: list[Instruction] = []  # by flat number, as they are stored
        self.sizes: list[ArrayShape] = []  # by flat number, as the program has them
        self.start: list[Instruction] = []  # initial values of the loop
        self.carried: dict[int, int] = {}  # flat argument -> its carried element
        self.ahead: dict[Version, int] = {}  # value computed before the loop -> its carried element
        self.shared: dict[tuple[str, int], Instruction] = {}
        self.body = Region(self.names, "micro_batch", index_at=_INDEX)

    def run(self) -> Module:
        parameters = self._enter()
        self.start.append(self.block.constant("s32", "0"))
        self._before()
        self._loop()
        once = Writer(self.split.once, 1, self.block, self._read_once, self._no_index)
        once.write()
        root = self._pack(self.split.module.entry.root.shape, iter([once.value(v) for v in self.split.once.roots]))
        root.is_root = True
        source = self.split.module
        entry = Computation(source.entry.name, self.block.out, root, parameters, True, source.entry.attributes)
        return edit.module_of(source, callees_first(entry))

    # ---- arguments -----------------------------------------------------------------
    def _enter(self) -> tuple[Instruction, ...]:
        """The arguments and their leaves; batch arguments have a dimension for micro-batches."""
        parameters = []
        for old in self.split.module.entry.parameters:
            first = self.numbers[old]
            stored = [self._shape_in_storage(first + leaf, shape) for leaf, shape in enumerate(old.shape.leaves)]
            shape = edit.with_leaves(old.shape, iter(stored))
            parameter = self.block.add(edit.copy_of(old, (), name=self.names.of(old), shape=shape))
            parameters.append(parameter)
            self.sizes += old.shape.leaves
            self.arguments += self._leaves(parameter)
        return tuple(parameters)

    def _shape_in_storage(self, number: int, shape: ArrayShape) -> ArrayShape:
        along = self.split.batch.get(number)
        return (
            shape if along is None else ArrayShape(shape.element_type, _dims_by_micro_batch(shape, along, self.parts))
        )

    def _leaves(self, value: Instruction) -> list[Instruction]:
        if not isinstance(value.shape, TupleShape):
            return [value]
        leaves = []
        for number in range(len(value.shape.elements)):
            leaves += self._leaves(self.block.element(value, number, value))
        return leaves

    # ---- before the loop ---------------------------------------------------------------
    def _before(self) -> None:
        """Values computed ahead of the micro-batches: of the whole batch (the number of tokens), and of state."""
        micro, batch = self.split.micro, self.split.batch
        arguments = {
            (parameter, leaf, WHOLE)
            for parameter, first in self.numbers.items()
            for leaf in range(len(parameter.shape.leaves))
            if first + leaf in batch
        }
        roots = (*micro.computable_ahead(arguments), *self.split.ahead)
        self.micro = Demand(micro.labels, micro.labeller, micro.roots, frozenset(roots)) if roots else micro
        writer = Writer(Demand(micro.labels, micro.labeller, roots), 1, self.block, self._read_once, self._no_index)
        writer.write()
        for version in roots:
            self.ahead[version] = len(self.start)
            self.start.append(writer.value(version))

    # ---- the loop --------------------------------------------------------------------
    def _loop(self) -> None:
        body, block = self.body, self.body.block
        index = body.index()
        writer = Writer(self.micro, self.parts, block, self._read_micro, body.index)
        writer.write()
        values = micro_outputs(self.split, writer, block)
        one = block.constant("s32", "1")
        results = [block.make("add", INDEX_SHAPE, [index, one], "micro_batch", "next")]
        results += [
            body.element(at, self.start[at].shape, self.names.like("micro_batch", "kept"))
            for at in range(1, len(self.start))
        ]
        results += [
            self._accumulate_value(shared, value) for shared, value in zip(self.split.shared, values, strict=True)
        ]
        carried = self.block.tuple(self.start, "micro_batches")
        shape = carried.shape
        assert isinstance(shape, TupleShape)
        called: dict[str, tuple[Computation, ...]] = {
            "condition": (self._condition(shape),),
            "body": (body.finish(shape, block.tuple(results, "micro_batch")),),
        }
        loop = self.block.make("while", shape, [carried], "micro_batches", "loop", **edit.callee_attributes(called))
        loop.called = called
        for at, shared in enumerate(self.split.shared, start=len(shape.elements) - len(self.split.shared)):
            self.shared[shared.name, shared.leaf] = self.block.element(loop, at, shared.name)

    def _condition(self, shape: TupleShape) -> Computation:
        region = Region(self.names, "more_micro_batches", index_at=_INDEX)
        limit = region.block.constant("s32", str(self.parts))
        direction = edit.attribute("direction", "LT")
        operands = [region.index(), limit]
        root = region.block.make("compare", ArrayShape("pred", ()), operands, "more", direction=direction)
        return region.finish(shape, root)

    def _read_micro(self, version: Version) -> Instruction:
        """An input of the loop's body: an argument, this micro-batch's slice of it, or a value computed ahead."""
        parameter, leaf, kind = version
        if version in self.ahead:
            at = self.ahead[version]
            return self.body.element(at, self.start[at].shape, self.names.like(parameter.name, "ahead"))
        number = self.numbers[parameter] + leaf
        block, stored = self.body.block, self.arguments[number].shape
        assert isinstance(stored, ArrayShape)
        if number not in self.carried:
            self.carried[number] = len(self.start)
            self.start.append(self.arguments[number])
        value = self.body.element(self.carried[number], stored, parameter)
        if not isinstance(kind, Along):
            return block.reshape(value, self.sizes[number].dimensions, parameter)
        zero = block.constant("s32", "0")
        starts = [self.body.index() if dim == kind.dim else zero for dim in range(stored.rank)]
        slice_sizes = [1 if dim == kind.dim else size for dim, size in enumerate(stored.dimensions)]
        sizes = edit.int_list("dynamic_slice_sizes", slice_sizes)
        shape = ArrayShape(stored.element_type, tuple(slice_sizes))
        value = block.make("dynamic-slice", shape, [value, *starts], parameter, dynamic_slice_sizes=sizes)
        return block.reshape(value, local_shape(self.sizes[number], kind, self.parts).dimensions, parameter)

    def _accumulate_value(self, shared: SharedValue, value: Instruction) -> Instruction:
        """The loop's next accumulator: previous terms plus this one, or previous parts and this one."""
        block, at, name = self.body.block, len(self.start), shared.name
        if isinstance(shared.kind, Along):
            return self._write_slice(shared.kind, shared, value)
        self.start.append(self.block.zeros(shared.shape, name))
        before = self.body.element(at, shared.shape, self.names.like(name, "before"))
        added = block.make(shared.kind.reduction, shared.shape, [before, value], name, "sum")
        if shared.kind == SUM:
            return added
        first = is_first(block, self.body.index())
        return block.make("select", shared.shape, [first, value, added], name, "sum")

    def _write_slice(self, kind: Along, shared: SharedValue, value: Instruction) -> Instruction:
        block, at, name = self.body.block, len(self.start), shared.name
        dimensions = _dims_by_micro_batch(shared.shape, kind, self.parts)
        stored = ArrayShape(shared.shape.element_type, dimensions)
        self.start.append(self.block.zeros(stored, name))
        before = self.body.element(at, stored, self.names.like(name, "before"))
        position = kind.dim + (kind.outer > 1)
        part = block.reshape(value, (*dimensions[:position], 1, *dimensions[position + 1 :]), name)
        zero = block.constant("s32", "0")
        starts = [self.body.index() if dim == position else zero for dim in range(stored.rank)]
        return block.make("dynamic-update-slice", stored, [before, part, *starts], name, "collected")

    # ---- after the loop --------------------------------------------------------------
    def _read_once(self, version: Version) -> Instruction:
        instruction, leaf, kind = version
        if kind == WHOLE:
            number = self.numbers[instruction] + leaf
            return self.block.reshape(self.arguments[number], self.sizes[number].dimensions, instruction)
        shape = instruction.shape.leaves[leaf]
        value = self.block.reshape(self.shared[instruction.name, leaf], shape.dimensions, instruction)
        return narrow(self.block, value, shape, instruction)

    def _no_index(self) -> Instruction:
        raise AssertionError("nothing that runs once reads the number of a micro-batch")

    def _pack(self, shape: Shape, leaves: Iterator[Instruction]) -> Instruction:
        """The result in the program's structure."""
        if not isinstance(shape, TupleShape):
            return next(leaves)
        values = [self._pack(element, leaves) for element in shape.elements]
        return self.block.make("tuple", TupleShape(tuple(v.shape for v in values)), values, "results", "of")


def _dims_by_micro_batch(shape: ArrayShape, along: Along, parts: int) -> tuple[int, ...]:
    """Dimensions with one over the micro-batches: `[..., outer, parts, rest, ...]`, without an outer of one."""
    dims, dim = shape.dimensions, along.dim
    outer = (along.outer,) if along.outer > 1 else ()
    return (*dims[:dim], *outer, parts, dims[dim] // along.outer // parts, *dims[dim + 1 :])
