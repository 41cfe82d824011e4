"""Sums whose summands are made in different chunks are added up once a step, not once a micro-batch.

The gradient of a tied embedding is a sum of two: of the lookup in the first chunk and of the product in the last one.
Added for every micro-batch, one of them would go through the whole pipeline every time; instead each chunk adds up its
own, and the two sums meet in the once part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwright.hlo import ArrayShape, Instruction, TupleShape
from shardwright.planner.microbatch import Input, PartModule, SharedValue, StepSplit, Term
from shardwright.planner.pipeline.program_assignment import ProgramId, readers
from shardwright.planner.rewrites.edit import computation_of, copy_of, module_of

#: What adds up just as well after the last micro-batch.
_SUMS = frozenset({"add", "subtract"})

_SUM = Term()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """A step's parts. moved: instructions of the micro part that the once part has taken over."""

    micro: PartModule
    once: PartModule
    moved: frozenset[Instruction] = frozenset()


def defer_cross_stage_sums(split: StepSplit, parts: StepParts, homes: Mapping[Instruction, ProgramId]) -> StepParts:
    """The parts with such sums in the once part. homes: of the micro part's instructions."""
    sums = _Sums(split, parts.micro, homes)
    moved = {shared: top for shared, top in _accumulator_sums(parts.micro) if sums.spans_chunks(top)}
    if not moved:
        return parts
    taken = frozenset(each for top in moved.values() for each in sums.inside(top))
    terms = {shared: sums.terms(top) for shared, top in moved.items()}
    return StepParts(
        micro=_remove_sums(parts.micro, taken, terms), once=_add_sums(parts.once, moved, terms, taken), moved=taken
    )


def _accumulator_sums(micro: PartModule) -> Iterator[tuple[SharedValue, Instruction]]:
    """What each accumulator adds up."""
    for shared, made in zip(micro.outputs, micro.module.entry.root.operands, strict=True):
        if isinstance(shared, SharedValue) and shared.kind == _SUM and made.name == shared.name:
            yield shared, made


class _Sums:
    """Trees of sums that nothing else reads."""

    def __init__(self, split: StepSplit, micro: PartModule, homes: Mapping[Instruction, ProgramId]) -> None:
        self._split = split
        self._homes = homes
        self._users = readers(micro.module.entry)

    def spans_chunks(self, value: Instruction) -> bool:
        """Whether it is a sum of what different chunks make."""
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
        return [value, *(each for operand in value.operands for each in self.inside(operand))]


def _plain(value: Instruction) -> ArrayShape:
    (leaf,) = value.shape.leaves
    return ArrayShape(leaf.element_type, leaf.dimensions)


def _to_shared(term: Instruction) -> SharedValue:
    return SharedValue(name=term.name, leaf=0, kind=_SUM, shape=_plain(term))


def _remove_sums(
    micro: PartModule, taken: frozenset[Instruction], terms: Mapping[SharedValue, Sequence[Instruction]]
) -> PartModule:
    """The micro part with the summands in place of the sums."""
    entry = micro.module.entry
    outputs: dict[SharedValue | int, Instruction] = {}
    for shared, made in zip(micro.outputs, entry.root.operands, strict=True):
        if isinstance(shared, SharedValue) and shared in terms:
            outputs.update({_to_shared(term): term for term in terms[shared]})
        else:
            outputs[shared] = made
    shape = TupleShape(tuple(made.shape for made in outputs.values()))
    root = copy_of(entry.root, tuple(outputs.values()), shape=shape)
    instructions = [each for each in entry if each not in taken and each is not entry.root]
    computations = [each for each in micro.module.computations if each is not entry]
    made_entry = computation_of(entry, [*instructions, root], root)
    return PartModule(
        module=module_of(micro.module, [*computations, made_entry]), inputs=micro.inputs, outputs=tuple(outputs)
    )


def _add_sums(
    once: PartModule,
    moved: Mapping[SharedValue, Instruction],
    terms: Mapping[SharedValue, Sequence[Instruction]],
    taken: frozenset[Instruction],
) -> PartModule:
    """The once part with the sums, of what each chunk added up."""
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
            copies[parameter] = _write_sum(moved[shared], taken, inputs, sums)
    rest = []
    for each in entry:
        if each not in copies:
            copies[each] = copy_of(each, [copies[operand] for operand in each.operands])
            rest.append(copies[each])
    computations = [each for each in once.module.computations if each is not entry]
    made = computation_of(entry, [*inputs.values(), *sums, *rest], copies[entry.root])
    return PartModule(module=module_of(once.module, [*computations, made]), inputs=tuple(inputs), outputs=once.outputs)


def _write_sum(
    value: Instruction, taken: frozenset[Instruction], inputs: Mapping[Input, Instruction], sums: list[Instruction]
) -> Instruction:
    """A sum as the once part computes it; appended to `sums` behind what it adds."""
    if value not in taken:
        return inputs[_to_shared(value)]
    made = copy_of(value, [_write_sum(operand, taken, inputs, sums) for operand in value.operands])
    sums.append(made)
    return made
