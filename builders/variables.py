"""The variables of a training step, with the optimizer's slots of each.

State: the donated arguments; without donation, those with an output of the same type. Variables: state in the backward
slice of another output (the loss); all other state is the optimizer's. A slot belongs to the variable of the same shape
with the same end of its path: `opt_state[0].mu['layer']['w']` to `params['layer']['w']`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwright.builders.reads import Reads
from shardwright.hlo import ArrayShape, Module

_TOKEN = re.compile(r"""\['(?:[^'\\]|\\.)*'\]|\["(?:[^"\\]|\\.)*"\]|\[[^\]]*\]|\.[^.\[\]]+|[^.\[\]]+""")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """One trained array of a step.

    name: of the argument, a path such as `params['layer']['w']`. bytes: of the whole array.
    is_sparse: whether the loss reads it only by lookups (`table[ids]`) at the batch's positions: a step changes few
        rows.
    slots: names of its optimizer's arguments of the same shape.
    """

    name: str
    shape: tuple[int, ...]
    element_type: str
    is_sparse: bool = False
    slots: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        return ArrayShape(self.element_type, self.shape).size_bytes

    def even_dims(self, devices: int) -> tuple[int, ...]:
        """The dimensions divisible by a number of devices, in order."""
        return tuple(dim for dim, size in enumerate(self.shape) if size and size % devices == 0)


def read_variables(module: Module, names: Sequence[str], aliases: Mapping[int, int]) -> tuple[Variable, ...]:
    """The variables of a step, in the order of its arguments.

    names: of the arguments, by flat number. aliases: output → argument updated in place, by flat number.
    """
    positions = [(parameter, leaf) for parameter in module.entry.parameters for leaf in _leaves(parameter.shape)]
    shapes = [leaf for parameter in module.entry.parameters for leaf in parameter.shape.leaves]
    updated = dict(aliases) or _pair_by_type(shapes, module.entry.root.shape.leaves)
    state = set(updated.values())
    others = [number for number in range(len(module.entry.root.shape.leaves)) if number not in updated]
    reads = Reads(module, others)
    trained = [number for number in sorted(state) if reads.has(*positions[number])] or sorted(state)
    slots = _assign_slots(names, shapes, trained, sorted(state))
    owned = {slot for of_one in slots.values() for slot in of_one}
    fed = frozenset(positions[number][0] for number in range(len(positions)) if number not in state)
    return tuple(
        Variable(
            name=names[number],
            shape=shapes[number].dimensions,
            element_type=shapes[number].element_type,
            is_sparse=shapes[number].rank > 1 and reads.is_looked_up(*positions[number], fed),
            slots=tuple(names[slot] for slot in slots[number]),
        )
        for number in trained
        if number not in owned
    )


def _leaves(shape: object) -> list[int | None]:
    """Leaf numbers of a parameter: None of an array."""
    return [None] if isinstance(shape, ArrayShape) else list(range(len(shape.leaves)))  # type: ignore[attr-defined]


def _pair_by_type(arguments: Sequence[ArrayShape], outputs: Sequence[ArrayShape]) -> dict[int, int]:
    """Output → argument of rank 1 and more of the same type, each once, in order."""
    free: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for number in reversed(range(len(arguments))):
        if arguments[number].rank:
            free.setdefault((arguments[number].element_type, arguments[number].dimensions), []).append(number)
    pairs = {}
    for number, output in enumerate(outputs):
        candidates = free.get((output.element_type, output.dimensions))
        if candidates:
            pairs[number] = candidates.pop()
    return pairs


def _assign_slots(
    names: Sequence[str], shapes: Sequence[ArrayShape], trained: Sequence[int], state: Sequence[int]
) -> dict[int, list[int]]:
    """Variable → its slots, by flat number. Each slot goes to the variable with the longest common path suffix."""
    paths = {number: _TOKEN.findall(names[number]) for number in state}
    shape_counts = Counter(shapes[number].dimensions for number in trained)
    slots: dict[int, list[int]] = {number: [] for number in trained}
    trained_set = set(trained)
    for slot in state:
        dims, best, longest = shapes[slot].dimensions, None, 0
        for variable in trained:
            if variable == slot or shapes[variable].dimensions != dims or not dims:
                continue
            common = _count_common_suffix(paths[variable], paths[slot])
            if slot in trained_set and not _is_copy_of(paths[slot], paths[variable]):
                continue
            if len(paths[variable]) == 1 and shape_counts[dims] == 1:
                common = max(common, 1)  # parameters that are one array have no path of their own
            if common > longest:
                best, longest = variable, common
        if best is not None:
            slots[best].append(slot)
    return slots


def _is_copy_of(path: Sequence[str], variable: Sequence[str]) -> bool:
    """Whether a path ends in all of a variable's path behind its root, and is longer."""
    return len(path) > len(variable) > 1 and list(path[1 - len(variable) :]) == list(variable[1:])


def _count_common_suffix(one: Sequence[str], other: Sequence[str]) -> int:
    """Length of the longest common suffix of two paths without their roots."""
    count = 0
    while count < min(len(one), len(other)) - 1 and one[-1 - count] == other[-1 - count]:
        count += 1
    return count
