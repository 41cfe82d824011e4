"""Moves sums with summands from different chunks to the end of the step: once a step, not once a micro-batch.

The gradient of a tied embedding is a sum of two terms: of the lookup in the first chunk and of the product in the last
one. Added per micro-batch, one of them would pass through the whole pipeline every time. Instead each chunk
accumulates its own term, and the once part adds the two sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwright.hlo import ArrayShape, Instruction, TupleShape
from shardwright.planner.microbatch import Input, PartModule, SharedValue, StepSplit, Term
from shardwright.planner.pipeline.program_assignment import ProgramId, readers
from shardwright.planner.rewrites.edit import computation_of, copy_of, module_of

#: Sums that may be postponed until after the last micro-batch.
_SUMS = frozenset({"add", "subtract"})

_SUM = Term()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """A step's parts. moved: instructions moved from the micro part to the once part."""

    micro: PartModule
    once: PartModule
    moved: frozenset[Instruction] = frozenset()


def defer_cross_stage_sums(split: StepSplit, parts: StepParts, homes: Mapping[Instruction, ProgramId]) -> StepParts:
    """The parts with such sums in the once part. homes: programs of the micro part's instructions."""
    sums = _Sums(split, parts.micro, homes)
    moved = {shared: top for shared, top in _accumulator_sums(parts.micro) if sums.spans_chunks(top)}
    if not moved:
        return parts
    removed = frozenset(inner for top in moved.values() for inner in sums.inside(top))
    terms = {shared: sums.terms(top) for shared, top in moved.items()}
    return StepParts(
        micro=_remove_sums(parts.micro, removed, terms),
        once=_add_sums(parts.once, moved, terms, removed),
        moved=removed,
    )


def _accumulator_sums(micro: PartModule) -> Iterator[tuple[SharedValue, Instruction]]:
    """Each accumulator with the value it accumulates."""
    for shared, result in zip(micro.outputs, micro.module.entry.root.operands, strict=True):
        if isinstance(shared, SharedValue) and shared.kind == _SUM and result.name == shared.name:
            yield shared, result


class _Sums:
    """Trees of sums without other readers."""

    def __init__(self, split: StepSplit, micro: PartModule, homes: Mapping[Instruction, ProgramId]) -> None:
        self._split = split
        self._homes = homes
        self._users = readers(micro.module.entry)

    def spans_chunks(self, value: Instruction) -> bool:
        """Whether a value is a sum of terms from different chunks."""
        return (
            value.opcode in _SUMS
            and len(self._users[value]) == 1
            and all(operand in self._homes and self._is_term(operand) for operand in value.operands)
            and len({self._homes[operand].chunk for operand in value.operands}) > 1
        )

    def _is_term(self, value: Instruction) -> bool:
        return self._split.kinds.get(value.name) == (_SUM,)

    def terms(self, value: Instruction) -> list[Instruction]:
        """The summands, each once."""
        if not self.spans_chunks(value):
            return [value]
        return list(dict.fromkeys(term for operand in value.operands for term in self.terms(operand)))

    def inside(self, value: Instruction) -> list[Instruction]:
        """The sums themselves."""
        if not self.spans_chunks(value):
            return []
        return [value, *(inner for operand in value.operands for inner in self.inside(operand))]


def _plain(value: Instruction) -> ArrayShape:
    (leaf,) = value.shape.leaves
    return ArrayShape(leaf.element_type, leaf.dimensions)


def _to_shared(term: Instruction) -> SharedValue:
    return SharedValue(name=term.name, leaf=0, kind=_SUM, shape=_plain(term))


def _remove_sums(
    micro: PartModule, inner_sums: frozenset[Instruction], terms: Mapping[SharedValue, Sequence[Instruction]]
) -> PartModule:
    """The micro part with the summands in place of the sums."""
    entry = micro.module.entry
    outputs: dict[SharedValue | int, Instruction] = {}
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


def _add_sums(
    once: PartModule,
    moved: Mapping[SharedValue, Instruction],
    terms: Mapping[SharedValue, Sequence[Instruction]],
    inner_sums: frozenset[Instruction],
) -> PartModule:
    """The once part with the sums of the chunks' accumulated terms."""
    entry = once.module.entry
    inputs: dict[Input, Instruction] = {}
    copies: dict[Instruction, Instruction] = {}
    for parameter in sorted(entry.parameters, key=lambda parameter: parameter.index):
        given = once.inputs[parameter.index]
        if given not in moved:
            copies[parameter] = inputs[given] = copy_of(parameter, (), index=len(inputs))
    sums: list[Instruction] = []
    for parameter in entry.parameters:
        shared = once.inputs[parameter.index]
        if isinstance(shared, SharedValue) and shared in moved:
            for term in terms[shared]:
                if _to_shared(term) not in inputs:
                    inputs[_to_shared(term)] = Instruction(term.name, "parameter", _plain(term), index=len(inputs))
            copies[parameter] = _write_sum(moved[shared], inner_sums, inputs, sums)
    rest = []
    for instruction in entry:
        if instruction not in copies:
            copies[instruction] = copy_of(instruction, [copies[operand] for operand in instruction.operands])
            rest.append(copies[instruction])
    computations = [computation for computation in once.module.computations if computation is not entry]
    new_entry = computation_of(entry, [*inputs.values(), *sums, *rest], copies[entry.root])
    return PartModule(
        module=module_of(once.module, [*computations, new_entry]), inputs=tuple(inputs), outputs=once.outputs
    )


def _write_sum(
    value: Instruction, inner_sums: frozenset[Instruction], inputs: Mapping[Input, Instruction], sums: list[Instruction]
) -> Instruction:
    """A sum in the once part; appended to `sums` after its operands."""
    if value not in inner_sums:
        return inputs[_to_shared(value)]
    new_sum = copy_of(value, [_write_sum(operand, inner_sums, inputs, sums) for operand in value.operands])
    sums.append(new_sum)
    return new_sum
