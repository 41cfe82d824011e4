"""Moves sums with summands from different chunks to the end of the step: once a step, not once a micro-batch.

The gradient of a tied embedding is a sum of two terms: of the lookup in the first chunk and of the product in the last
one. Added per micro-batch, one of them would pass through the whole pipeline every time. Instead each chunk
accumulates its own term, and the once part adds the two sums.

Whatever is linear in the terms may stand between them and the accumulator (`rules.linear`): in mixed precision the sum
of two bfloat16 terms is converted. It goes to the once part with the sums, in single precision if terms are narrower.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shardwright.hlo import ArrayShape, Instruction, TupleShape
from shardwright.planner.microbatch import NARROW, Input, Output, PartModule, SharedValue, StepSplit, Term
from shardwright.planner.pipeline.program_assignment import ProgramId, find_cheap_values, readers
from shardwright.planner.rewrites.edit import computation_of, copy_of, module_of
from shardwright.planner.rules.linear import linear_ways

#: May be between the terms and an accumulator where they are linear: no more work on the sum than on a term.
_MOVED = frozenset(
    {"add", "broadcast", "concatenate", "convert", "copy", "divide", "multiply", "negate", "pad", "reshape", "subtract",
     "transpose"}
)  # fmt: skip

#: Linear in their operands element by element: sums of them lie as their result does.
_ELEMENTWISE = frozenset({"add", "convert", "copy", "negate", "subtract"})

_SUM = Term()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """A step's parts.

    moved: instructions moved from the micro part to the once part.
    meeting: of the once part, instructions and parameters of sums that meet there → the sum that they lead to, where
        all between is element by element.
    """

    micro: PartModule
    once: PartModule
    moved: frozenset[Instruction] = frozenset()
    meeting: Mapping[Instruction, Instruction] = field(default_factory=dict)


def defer_cross_stage_sums(split: StepSplit, parts: StepParts, homes: Mapping[Instruction, ProgramId]) -> StepParts:
    """The parts with such sums in the once part. homes: programs of the micro part's instructions."""
    sums = _Sums(split, parts.micro, homes)
    moved = {shared: top for shared, top in _accumulator_sums(parts.micro) if sums.spans_chunks(top)}
    if not moved:
        return parts
    removed = frozenset(inner for top in moved.values() for inner in sums.inside(top))
    terms = {shared: sums.terms(top) for shared, top in moved.items()}
    once = _OnceSums(parts.once, removed, sums.cheap)
    return StepParts(
        micro=_remove_sums(parts.micro, removed, terms),
        once=once.run(moved),
        moved=removed,
        meeting=once.meeting,
    )


def _accumulator_sums(micro: PartModule) -> Iterator[tuple[SharedValue, Instruction]]:
    """Each accumulator with the value it accumulates."""
    for shared, result in zip(micro.outputs, micro.module.entry.root.operands, strict=True):
        if isinstance(shared, SharedValue) and shared.kind == _SUM:
            yield shared, result


class _Sums:
    """Trees of what is linear in sums, without other readers. cheap: values of constants alone."""

    def __init__(self, split: StepSplit, micro: PartModule, homes: Mapping[Instruction, ProgramId]) -> None:
        self._split = split
        self._homes = homes
        self._users = readers(micro.module.entry)
        self._tops = {
            result: shared.name
            for shared, result in zip(micro.outputs, micro.module.entry.root.operands, strict=True)
            if isinstance(shared, SharedValue)
        }
        self.cheap = find_cheap_values(micro.module.entry)
        self._operands: dict[Instruction, tuple[Instruction, ...] | None] = {}
        for instruction in micro.module.entry:
            self._operands[instruction] = self._find_summed(instruction)

    def spans_chunks(self, value: Instruction) -> bool:
        """Whether a value is linear in terms from different chunks alone."""
        return self._operands[value] is not None

    def terms(self, value: Instruction) -> list[Instruction]:
        """The terms, each once: the values nearest to `value` that one chunk makes."""
        operands = self._operands[value]
        if operands is None:
            return [value]
        return list(dict.fromkeys(term for operand in operands for term in self.terms(operand)))

    def inside(self, value: Instruction) -> list[Instruction]:
        """What is between the terms and `value`, which is of it."""
        operands = self._operands[value]
        if operands is None:
            return []
        return [value, *(inner for operand in operands for inner in self.inside(operand))]

    def _find_summed(self, value: Instruction) -> tuple[Instruction, ...] | None:
        """The operands that a value is linear in, if terms of several chunks are among what these are made of."""
        if len(self._users[value]) != 1 or value.opcode not in _MOVED:
            return None
        positions = frozenset(i for i, operand in enumerate(value.operands) if operand not in self.cheap)
        operands = tuple(value.operands[i] for i in sorted(positions))
        if not operands or not all(self._is_term(operand) for operand in operands):
            return None
        if not any(way.operands == positions for way in linear_ways(value)):
            return None
        chunks = {self._homes[term].chunk for operand in operands for term in self.terms(operand)}
        return operands if len(chunks) > 1 else None

    def _is_term(self, value: Instruction) -> bool:
        return value in self._homes and self._split.kinds.get(self._tops.get(value, value.name)) == (_SUM,)


def _wide(shape: ArrayShape) -> ArrayShape:
    """The shape in its accumulation type."""
    return ArrayShape("f32" if shape.element_type in NARROW else shape.element_type, shape.dimensions)


def _plain(value: Instruction) -> ArrayShape:
    (leaf,) = value.shape.leaves
    return ArrayShape(leaf.element_type, leaf.dimensions)


def _to_shared(term: Instruction) -> SharedValue:
    return SharedValue(name=term.name, leaf=0, kind=_SUM, shape=_wide(_plain(term)))


def _remove_sums(
    micro: PartModule, inner_sums: frozenset[Instruction], terms: Mapping[SharedValue, Sequence[Instruction]]
) -> PartModule:
    """The micro part with the terms in place of the sums."""
    entry = micro.module.entry
    outputs: dict[Output, Instruction] = {}
    for shared, value in zip(micro.outputs, entry.root.operands, strict=True):
        if isinstance(shared, SharedValue) and shared in terms:
            outputs.update({_to_shared(term): term for term in terms[shared]})
        else:
            outputs[shared] = value
    shape = TupleShape(tuple(value.shape for value in outputs.values()))
    root = copy_of(entry.root, tuple(outputs.values()), shape=shape)
    instructions = [
        instruction for instruction in entry if instruction not in inner_sums and instruction is not entry.root
    ]
    computations = [computation for computation in micro.module.computations if computation is not entry]
    made_entry = computation_of(entry, [*instructions, root], root)
    return PartModule(
        module=module_of(micro.module, [*computations, made_entry]), inputs=micro.inputs, outputs=tuple(outputs)
    )


class _OnceSums:
    """Writes sums into the once part. inner: what is moved there; cheap: what that may read besides terms."""

    def __init__(self, once: PartModule, inner: frozenset[Instruction], cheap: Collection[Instruction]) -> None:
        self._once = once
        self._inner = inner
        self._cheap = cheap
        self._inputs: dict[Input, Instruction] = {}
        self._sums: list[Instruction] = []
        self._made: dict[Instruction, Instruction] = {}
        self._names = {instruction.name for instruction in once.module.entry}
        self.meeting: dict[Instruction, Instruction] = {}

    def run(self, moved: Mapping[SharedValue, Instruction]) -> PartModule:
        """The once part. moved: accumulators that are no more → what they accumulated."""
        entry = self._once.module.entry
        copies: dict[Instruction, Instruction] = {}
        for parameter in sorted(entry.parameters, key=lambda parameter: parameter.index):
            given = self._once.inputs[parameter.index]
            if given not in moved:
                copies[parameter] = self._inputs[given] = copy_of(parameter, (), index=len(self._inputs))
            else:
                self._names.discard(parameter.name)
        for parameter in entry.parameters:
            shared = self._once.inputs[parameter.index]
            if isinstance(shared, SharedValue) and shared in moved:
                copies[parameter] = self._write_top(moved[shared])
        rest = []
        for instruction in entry:
            if instruction not in copies:
                copies[instruction] = copy_of(instruction, [copies[operand] for operand in instruction.operands])
                rest.append(copies[instruction])
        computations = [computation for computation in self._once.module.computations if computation is not entry]
        new_entry = computation_of(entry, [*self._inputs.values(), *self._sums, *rest], copies[entry.root])
        module = module_of(self._once.module, [*computations, new_entry])
        return PartModule(module=module, inputs=tuple(self._inputs), outputs=self._once.outputs)

    def _write_top(self, top: Instruction) -> Instruction:
        before = len(self._sums)
        made = self._write(top)
        inner = self._sums[before:]
        if all(instruction.opcode in _ELEMENTWISE for instruction in inner):
            values = {*inner, *(operand for instruction in inner for operand in instruction.operands)}
            self.meeting |= dict.fromkeys(values, made)
        return made

    def _write(self, value: Instruction) -> Instruction:
        """A value in the once part, in its accumulation type; appended to the sums after its operands."""
        if value in self._made:
            return self._made[value]
        if value in self._cheap:
            made = self._add(copy_of(value, [self._write_cheap(operand) for operand in value.operands]))
            made = self._convert(made, _wide(_plain(value)))
        elif value not in self._inner:
            shared = _to_shared(value)
            if shared not in self._inputs:
                index = len(self._inputs)
                name = self._free(value.name)
                self._inputs[shared] = Instruction(name, "parameter", shared.shape, index=index)
                self._names.add(name)
            return self._inputs[shared]
        else:
            operands = [self._write(operand) for operand in value.operands]
            shape = _wide(_plain(value))
            if value.opcode == "convert" and _plain(operands[0]) == shape:
                made = operands[0]
            else:
                made = self._add(copy_of(value, operands, shape=shape))
        self._made[value] = made
        return made

    def _write_cheap(self, value: Instruction) -> Instruction:
        return self._add(copy_of(value, [self._write_cheap(operand) for operand in value.operands]))

    def _convert(self, value: Instruction, shape: ArrayShape) -> Instruction:
        if _plain(value) == shape:
            return value
        return self._add(Instruction(self._free(f"{value.name}.wide"), "convert", shape, (value,)))

    def _add(self, instruction: Instruction) -> Instruction:
        if instruction.name in self._names:
            instruction = copy_of(instruction, instruction.operands, name=self._free(instruction.name))
        self._names.add(instruction.name)
        self._sums.append(instruction)
        return instruction

    def _free(self, name: str) -> str:
        """The name, or a similar one that is not taken."""
        while name in self._names:
            name = f"{name}.once"
        return name
