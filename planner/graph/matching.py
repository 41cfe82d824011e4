"""Which instructions of two programs are the same, and which differ.

Names and numbers of instructions, and their order, change with every edit; what an instruction computes, and what its
result is used for, does not. Instructions are therefore paired in rounds, each by a key that says less than the one
before:

1. computed alike from the arguments, and used alike up to the results;
2. computed alike; or used alike;
3. of one kind (opcode, shapes, attributes), at one place of the user's code (`op_name`);
4. rounds 1 to 3 with sizes left out, for another batch or width.

Pairs of rounds 1 to 3 are the same instruction; those of round 4 play the same part. Of several with one key the first
is paired with the first. A change of one instruction leaves all others to rounds 1 and 2: those before it are computed
as before, those behind it are used as before. Linear in the size of the programs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardwright.hlo import ArrayShape, Instruction, Module, format_shape

#: Attributes that say nothing of a computation.
_NO_PART = frozenset({"metadata", "sharding", "frontend_attributes"})

#: Attributes that hold sizes.
_SIZES = frozenset({
    "slice", "slice_sizes", "dynamic_slice_sizes", "window", "padding", "backend_config", "fft_length",
    "feature_group_count", "batch_group_count", "iota_dimension",
})  # fmt: skip

_Key = Callable[[Instruction], Hashable]


@dataclass(frozen=True, slots=True, kw_only=True)
class Matching:
    """Pairs of instructions of two programs.

    partners: instruction of the new program → name of the old one that is the same, or plays the same part.
    changed: instructions of the new program that no old one is the same as, in text order.
    dropped: instructions of the old program that no new one is paired with, in text order.
    """

    partners: dict[Instruction, str]
    changed: tuple[Instruction, ...]
    dropped: tuple[Instruction, ...] = ()


def match_instructions(old: Module, new: Module) -> Matching:
    """Pair the instructions of two programs: see the module."""
    numbers: dict[Hashable, int] = {}
    partners: dict[Instruction, Instruction] = {}
    free_old, free_new = [*old.instructions()], [*new.instructions()]
    changed = tuple(free_new)
    for kind in (_exact_kind, _outline_kind):
        keys = _Keys(kind, numbers, (old, new))
        for key in (keys.whole, keys.computed.get, keys.used.get, keys.place):
            _pair(free_old, free_new, key, partners)
            free_old = _without(free_old, partners.values())
            free_new = _without(free_new, partners)
        if kind is _exact_kind:
            changed = tuple(free_new)
    names = {instruction: partner.name for instruction, partner in partners.items()}
    return Matching(partners=names, changed=changed, dropped=tuple(free_old))


def match_names(old: Mapping[str, str], new: Module) -> Matching:
    """Pair by name and opcode, where nothing else is known of the old program. old: opcodes by name."""
    alike = {each: each.name for each in new.instructions() if old.get(each.name) == each.opcode}
    return Matching(partners=alike, changed=tuple([each for each in new.instructions() if each not in alike]))


def describe(instruction: Instruction) -> str:
    """`dot.3, f32[8,16] dot`, as messages name it."""
    return f"{instruction.name}, {_shape_text(instruction)} {instruction.opcode}"


def _pair(
    old: Sequence[Instruction], new: Sequence[Instruction], key: _Key, partners: dict[Instruction, Instruction]
) -> None:
    by_key: dict[Hashable, list[Instruction]] = {}
    for instruction in reversed(old):
        by_key.setdefault(key(instruction), []).append(instruction)
    for instruction in new:
        candidates = by_key.get(key(instruction))
        if candidates:
            partners[instruction] = candidates.pop()


def _without(instructions: Sequence[Instruction], paired: Iterable[Instruction]) -> list[Instruction]:
    left_out = set(paired)
    return [instruction for instruction in instructions if instruction not in left_out]


class _Keys:
    """Keys of the instructions of some modules under one notion of their kind.

    computed / used: numbers, equal for instructions computed alike from the arguments / used alike.
    """

    def __init__(self, kind: _Key, numbers: dict[Hashable, int], modules: Iterable[Module]) -> None:
        self._kind = kind
        self._numbers = numbers
        self.computed: dict[Instruction, int] = {}
        self.used: dict[Instruction, int] = {}
        for module in modules:
            self._number_computed(module)
            self._number_used(module)

    def whole(self, instruction: Instruction) -> Hashable:
        return self.computed[instruction], self.used[instruction]

    def place(self, instruction: Instruction) -> Hashable:
        _, _, scopes = instruction.op_name.partition("/")  # `jit(step)` before it is the function's name
        return self._kind(instruction), scopes

    def _number(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _number_computed(self, module: Module) -> None:
        for computation in module.computations:  # what is called stands before its callers
            for instruction in computation.instructions:
                operands = tuple([self.computed[operand] for operand in instruction.operands])
                callees = [callee for group in instruction.called.values() for callee in group]
                called = tuple([self.computed.get(callee.root, -1) for callee in callees])
                key = (self._kind, self._kind(instruction), operands, called)
                self.computed[instruction] = self._number(key)

    def _number_used(self, module: Module) -> None:
        for computation in module.computations:
            readers: dict[Instruction, list[tuple[int, int]]] = {}
            for instruction in reversed(computation.instructions):
                uses = tuple(sorted(readers.get(instruction, ())))
                is_root = instruction is computation.root
                number = self._number((self._kind, "used", self._kind(instruction), uses, is_root))
                self.used[instruction] = number
                for position, operand in enumerate(instruction.operands):
                    readers.setdefault(operand, []).append((number, position))


def _exact_kind(instruction: Instruction) -> Hashable:
    """All but operands, names, and what is called."""
    return (
        instruction.opcode,
        format_shape(instruction.shape),
        instruction.payload,
        instruction.index,
        _texts(instruction, _NO_PART),
    )


def _outline_kind(instruction: Instruction) -> Hashable:
    """The same without sizes."""
    leaves = [
        (leaf.element_type, leaf.rank) if isinstance(leaf, ArrayShape) else ("", 0) for leaf in instruction.shape.leaves
    ]
    return (
        instruction.opcode,
        tuple(leaves),
        instruction.index,
        _texts(instruction, _NO_PART | _SIZES),
    )


def _texts(instruction: Instruction, left_out: frozenset[str]) -> tuple[str, ...]:
    """Its attributes; of those that name a computation the name of the attribute alone."""
    return tuple(
        [
            name if name in instruction.called else f"{name}={attribute.text}"
            for name, attribute in instruction.attributes.items()
            if name not in left_out
        ]
    )


def _shape_text(instruction: Instruction) -> str:
    text = format_shape(instruction.shape)
    return text if len(text) <= 60 else f"{text[:57]}…"
