"""Writes the versions a part of the step needs, computation by computation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from shardwright.hlo import ArrayShape, Computation, Instruction, TupleShape
from shardwright.planner.graph.inlining import with_callee_names
from shardwright.planner.microbatch.block import Block, Region, is_first, offset, slice_micro_batch
from shardwright.planner.microbatch.demand import Demand, EmitMode, Recipe, Version
from shardwright.planner.microbatch.kinds import SUM, WHOLE, Along, local_shape
from shardwright.planner.microbatch.shapes import local_attributes
from shardwright.planner.rewrites import edit
from shardwright.planner.rules.linear import is_zero


class Writer:
    """Writes one computation's versions into a block.

    demand: the versions.
    parts: the number of micro-batches.
    input_of: the instruction of an input version.
    index: the s32[] number of the micro-batch.
    """

    def __init__(
        self,
        demand: Demand,
        parts: int,
        block: Block,
        input_of: Callable[[Version], Instruction],
        index: Callable[[], Instruction],
    ) -> None:
        self._demand = demand
        self._parts = parts
        self._block = block
        self._given = input_of
        self._index = index
        self._made: dict[Version, Instruction] = {}
        self._tuples: dict[Version, tuple[Instruction, int]] = {}  # results not taken out of their tuple yet
        self._is_first: Instruction | None = None

    def write(self) -> None:
        for instruction in self._demand.labels.computation.instructions:
            for recipe in self._demand.recipes.get(instruction, ()):
                _WRITE[recipe.mode](self, instruction, recipe)

    def value(self, version: Version) -> Instruction:
        """The instruction written for a version."""
        version = self._demand.version(*version)
        if version not in self._made:
            holder, leaf = self._tuples[version]
            self._made[version] = self._block.element(holder, leaf, version[0])
        return self._made[version]

    # ---- recipes -----------------------------------------------------------------
    def _copy(self, instruction: Instruction, recipe: Recipe) -> None:
        leaves = self._leaves(instruction, recipe)
        operands = self._operands(instruction, recipe)
        attributes = local_attributes(instruction, operands, leaves[0]) if leaves else dict(instruction.attributes)
        copy = edit.copy_of(
            instruction,
            operands,
            name=self._block.names.of(instruction),
            shape=edit.with_leaves(instruction.shape, iter(leaves)),
            attributes=attributes,
            is_root=False,
        )
        self._register(self._block.add(edit.check_consistency(copy)), recipe)

    def _hand_in(self, instruction: Instruction, recipe: Recipe) -> None:
        for version in recipe.results:
            self._made[version] = self._given(version)

    def _cut(self, instruction: Instruction, recipe: Recipe) -> None:
        (version,) = recipe.results
        _, leaf, kind = version
        assert isinstance(kind, Along)
        self._made[version] = slice_micro_batch(
            self._block, self.value((instruction, leaf, WHOLE)), kind, self._parts, self._index(), instruction
        )

    def _count(self, instruction: Instruction, recipe: Recipe) -> None:
        """The local iota plus the number of elements in earlier micro-batches."""
        (version,) = recipe.results
        kind, shape, block = version[2], instruction.shape, self._block
        assert isinstance(shape, ArrayShape)
        assert isinstance(kind, Along)
        local = local_shape(shape, kind, self._parts)
        counted = block.add(edit.copy_of(instruction, (), name=block.names.of(instruction), shape=local, is_root=False))
        first = offset(block, self._index(), local.dimensions[kind.dim], instruction)
        if shape.element_type != "s32":
            first = block.make("convert", ArrayShape(shape.element_type, ()), [first], instruction)
        first = block.spread(first, local, instruction)
        self._made[version] = block.make("add", local, [counted, first], instruction)

    def _first(self, instruction: Instruction, recipe: Recipe) -> None:
        (version,) = recipe.results
        value = self.value((instruction, version[1], WHOLE))
        if not is_zero(instruction):
            block, shape = self._block, value.shape
            assert isinstance(shape, ArrayShape)
            zeros = block.zeros(shape, instruction)
            if self._is_first is None:
                self._is_first = is_first(block, self._index())
            value = block.make("select", shape, [self._is_first, value, zeros], instruction)
        self._made[version] = value

    def _own(self, instruction: Instruction, recipe: Recipe) -> None:
        """A sum's term times the number of micro-batches; other terms unchanged."""
        (version,) = recipe.results
        kind = self._demand.labels.kinds[instruction][version[1]]
        value = self.value((instruction, version[1], kind))
        if kind == SUM:
            shape = value.shape
            assert isinstance(shape, ArrayShape)
            count = self._block.constant(shape.element_type, str(self._parts))
            count = self._block.spread(count, shape, instruction)
            value = self._block.make("multiply", shape, [value, count], instruction)
        self._made[version] = value

    def _barrier(self, instruction: Instruction, recipe: Recipe) -> None:
        leaves = [leaf for operand in instruction.operands for leaf in range(len(operand.shape.leaves))]
        owners = [operand for operand in instruction.operands for _ in operand.shape.leaves]
        values = [self.value((owners[leaf], leaves[leaf], kind)) for _, leaf, kind in recipe.results]
        block = self._block
        held = block.tuple(values, instruction)
        barrier = edit.copy_of(instruction, (held,), name=block.names.of(instruction), shape=held.shape, is_root=False)
        block.add(barrier)
        for position, version in enumerate(recipe.results):
            self._tuples[version] = (barrier, position)

    def _control(self, instruction: Instruction, recipe: Recipe) -> None:
        if instruction.opcode == "while":
            self._loop(instruction, recipe)
        else:
            self._conditional(instruction, recipe)

    # ---- control flow ------------------------------------------------------------
    def _loop(self, loop: Instruction, recipe: Recipe) -> None:
        """The loop with regions of its own; it carries one flat tuple, with the index last in case of use."""
        start = self._flat(loop.operands, recipe)
        regions = [self._region(demand) for demand in recipe.regions]
        (condition, (tested,)), (body, results) = regions
        if condition.needs_index or body.needs_index:
            start.append(self._index())
            results = [*results, body.index()]
        carried = self._block.tuple(start, loop)
        shape = carried.shape
        assert isinstance(shape, TupleShape)
        root = body.block.tuple(results, loop)
        called = {"condition": (condition.finish(shape, tested),), "body": (body.finish(shape, root),)}
        self._call(loop, [carried], shape, called, recipe)

    def _conditional(self, choice: Instruction, recipe: Recipe) -> None:
        flat = self._flat(choice.operands, recipe)
        operands, position = [flat[0]], 1
        shape = TupleShape(self._leaves(choice, recipe))
        called: dict[str, tuple[Computation, ...]] = {}
        names = [name for name in choice.called for _ in choice.called[name]]
        for name, demand in zip(names, recipe.regions, strict=True):
            region, results = self._region(demand)
            count = sum(len(parameter.shape.leaves) for parameter in demand.labels.computation.parameters)
            values = flat[position : position + count]
            position += count
            operands.append(self._block.tuple([*values, *([self._index()] if region.needs_index else [])], choice))
            entered = operands[-1].shape
            assert isinstance(entered, TupleShape)
            called[name] = (*called.get(name, ()), region.finish(entered, region.block.tuple(results, choice)))
        self._call(choice, operands, shape, called, recipe)

    def _region(self, demand: Demand) -> tuple[Region, list[Instruction]]:
        """A control flow computation, written, and the leaves of its result."""
        source = demand.labels.computation
        first: dict[Instruction, int] = {}
        count = 0
        for parameter in source.parameters:
            first[parameter] = count
            count += len(parameter.shape.leaves)
        region = Region(self._block.names, source.name, index_at=count)

        def input_of(version: Version) -> Instruction:
            parameter, leaf, kind = version
            shape = local_shape(parameter.shape.leaves[leaf], kind, self._parts)
            name = region.block.names.like(parameter.name, "element")
            return region.element(first[parameter] + leaf, shape, name)

        writer = Writer(demand, self._parts, region.block, input_of, region.index)
        writer.write()
        return region, [writer.value(version) for version in demand.roots]

    def _call(
        self,
        instruction: Instruction,
        operands: Sequence[Instruction],
        shape: TupleShape,
        called: Mapping[str, tuple[Computation, ...]],
        recipe: Recipe,
    ) -> None:
        name = self._block.names.of(instruction)
        call = edit.copy_of(instruction, operands, name=name, shape=shape, called=dict(called), is_root=False)
        for attribute, callees in called.items():
            call.attributes[attribute] = with_callee_names(instruction.attributes[attribute], callees)
        self._block.add(call)
        for leaf, version in enumerate(recipe.results):
            self._tuples[version] = (call, leaf)

    # ---- operands and results ------------------------------------------------------
    def _leaves(self, instruction: Instruction, recipe: Recipe) -> tuple[ArrayShape, ...]:
        return tuple(
            local_shape(shape, kind, self._parts)
            for shape, (_, _, kind) in zip(instruction.shape.leaves, recipe.results, strict=True)
        )

    def _flat(self, operands: Iterable[Instruction], recipe: Recipe) -> list[Instruction]:
        kinds = iter(recipe.operands)
        values = []
        for operand in operands:
            for leaf in range(len(operand.shape.leaves)):
                kind = next(kinds)
                assert kind is not None
                values.append(self.value((operand, leaf, kind)))
        return values

    def _operands(self, instruction: Instruction, recipe: Recipe) -> list[Instruction]:
        """The operands, with their tuples rebuilt."""
        flat = iter(self._flat(instruction.operands, recipe))
        operands = []
        for operand in instruction.operands:
            values = [next(flat) for _ in operand.shape.leaves]
            is_array = isinstance(operand.shape, ArrayShape)
            operands.append(values[0] if is_array else self._block.tuple(values, operand))
        return operands

    def _register(self, instruction: Instruction, recipe: Recipe) -> None:
        for leaf, version in enumerate(recipe.results):
            if isinstance(instruction.shape, TupleShape):
                self._tuples[version] = (instruction, leaf)
            else:
                self._made[version] = instruction


_WRITE: dict[EmitMode, Callable[[Writer, Instruction, Recipe], None]] = {
    EmitMode.COPY: Writer._copy,
    EmitMode.GIVEN: Writer._hand_in,
    EmitMode.CUT: Writer._cut,
    EmitMode.COUNT: Writer._count,
    EmitMode.FIRST: Writer._first,
    EmitMode.OWN: Writer._own,
    EmitMode.BARRIER: Writer._barrier,
    EmitMode.CONTROL: Writer._control,
}
