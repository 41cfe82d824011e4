"""A plan of a program whose dimensions were written as two, said of the program as it was before.

Where nothing that cuts or joins such a dimension is split within its pieces, the plan needs no second dimension: the
same shards are blocks of the whole one. XLA then sees the products, slices and concatenates that were written, which it
fuses better: between `[…, 3, d]` and its pieces it puts kernels that transpose and copy. What is moved stays what it
was, and so does what the plan costs.

Every array is read in its new dimensions, group by group (`reshape_groups`). A whole dimension is split as its first
part is, or as another one where no instruction looks at the pieces.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from math import prod

from shardwright.hlo import Instruction, Module
from shardwright.planner.rewrites.dim_classes import reachable_computations
from shardwright.planner.rewrites.split_dims import variable_dims
from shardwright.planner.rules.data_movement import reshape_groups
from shardwright.plans import InstructionPlan, Plan, SegmentPlan, VariablePlan
from shardwright.shardings import Mesh, TensorSharding, ValueSharding

#: Opcodes for which it matters where in a dimension an element is. All others treat the elements of a dimension alike.
_PLACED = frozenset({
    "slice", "pad", "concatenate", "gather", "scatter", "dynamic-slice", "dynamic-update-slice", "reverse", "sort",
    "iota", "reduce-window", "custom-call", "constant",
})  # fmt: skip


class _NotExpressibleError(Exception):
    """Something is split within pieces that are cut apart."""


def undo_split_dims(module: Module, plan: Plan, written: Module) -> Plan | None:
    """The same plan of the program before its dimensions were split; None where it cannot be said of that.

    module: the program that `plan` is of, a rewrite of `written`. Whether the plan is legal is left to its checker.
    """
    try:
        return _SplitUndo(module, plan, written).run()
    except _NotExpressibleError:
        return None


@dataclass(slots=True)
class _SplitUndo:
    module: Module
    plan: Plan
    written: Module
    _entries: dict[str, InstructionPlan] = field(init=False)
    _split: dict[str, Instruction] = field(init=False)  # of the module, by name
    _known: dict[tuple[tuple[int, ...], tuple[int, ...], TensorSharding, bool], TensorSharding] = field(init=False)

    def __post_init__(self) -> None:
        self._entries = {entry.name: entry for entry in self.plan.instructions}
        self._split = {each.name: each for computation in reachable_computations(self.module) for each in computation}
        self._known = {}

    def run(self) -> Plan:
        computations = reachable_computations(self.written)
        values = {each.name: each for computation in computations for each in computation}
        instructions = tuple(map(self._entry, values.values()))
        arguments, outputs = variable_dims(self.written)
        text = self.written.to_text()
        return replace(
            self.plan,
            instructions=instructions,
            parameters=self._variables(self.plan.parameters, arguments),
            outputs=self._variables(self.plan.outputs, outputs),
            collectives=tuple(
                replace(each, instruction=self._reader(each.instruction, values)) for each in self.plan.collectives
            ),
            segments=tuple(self._segment(each, values) for each in self.plan.segments),
            hlo_sha256=sha256(text.encode()).hexdigest(),
            hlo_text=text,
        )

    def _entry(self, old: Instruction) -> InstructionPlan:
        made = self._split.get(old.name)
        entry = self._entries.get(old.name)
        if made is None or entry is None:
            raise _NotExpressibleError
        count = len(old.operands)  # a dynamic slice has a start more for each new dimension: all lie alike
        operands = list(zip(old.operands, made.operands[:count], entry.operands[:count], strict=True))
        if old.shape == made.shape and all(before.shape == after.shape for before, after, _ in operands):
            return entry
        is_alike = _is_alike(old)
        return replace(
            entry,
            operands=tuple(self._value(before, after, lies, is_alike) for before, after, lies in operands),
            result=self._value(old, made, entry.result, is_alike),
            shared=self._value(old, made, entry.shared, is_alike) if entry.shared else (),
        )

    def _value(self, old: Instruction, made: Instruction, lies: ValueSharding, is_alike: bool) -> ValueSharding:
        leaves = zip(old.shape.leaves, made.shape.leaves, lies, strict=True)
        return tuple(self._array(before.dimensions, after.dimensions, each, is_alike) for before, after, each in leaves)

    def _array(
        self, whole: tuple[int, ...], parts: tuple[int, ...], lies: TensorSharding, is_alike: bool
    ) -> TensorSharding:
        if whole == parts:
            return lies
        key = whole, parts, lies, is_alike
        if key not in self._known:
            self._known[key] = _merge_dims(whole, parts, lies, self.plan.mesh, is_alike)
        return self._known[key]

    def _variables(self, variables: tuple[VariablePlan, ...], dims: list[tuple[int, ...]]) -> tuple[VariablePlan, ...]:
        return tuple(self._variable(each, dims[number]) for number, each in enumerate(variables))

    def _variable(self, variable: VariablePlan, dims: tuple[int, ...]) -> VariablePlan:
        if variable.shape == dims:
            return variable
        if variable.is_padded or variable.is_stacked:
            raise _NotExpressibleError
        return VariablePlan.from_sharding(
            variable.number,
            variable.name,
            variable.element_type,
            dims,
            self._array(dims, variable.shape, variable.sharding, True),
            self.plan.mesh,
            alias=variable.alias,
            view_of=None if variable.view_of == dims else variable.view_of,
        )

    def _reader(self, name: str, values: Mapping[str, Instruction]) -> str:
        """The instruction itself, or in place of a reshape that is gone what it is of."""
        while name not in values:
            reshape = self._split.get(name)
            if reshape is None or reshape.opcode != "reshape":
                raise _NotExpressibleError
            (operand,) = reshape.operands
            name = operand.name
        return name

    def _segment(self, segment: SegmentPlan, values: Mapping[str, Instruction]) -> SegmentPlan:
        """A value between segments that was reshaped for them alone is as it was."""
        boundary = []
        for name, lies in segment.boundary:
            old, made = values.get(self._reader(name, values)), self._split[name]
            assert old is not None, "a value of the program"
            whole, parts = (value.shape.leaves[0].dimensions for value in (old, made))
            boundary.append((old.name, self._array(whole, parts, lies, True)))
        return replace(segment, boundary=tuple(boundary))


def _is_alike(instruction: Instruction) -> bool:
    """Whether an instruction treats the elements of each dimension alike."""
    if instruction.opcode not in ("reshape", "bitcast"):
        return instruction.opcode not in _PLACED
    before, after = (
        [size for size in value.shape.leaves[0].dimensions if size > 1]
        for value in (instruction.operands[0], instruction)
    )
    return before == after


def _merge_dims(
    whole: tuple[int, ...], parts: tuple[int, ...], lies: TensorSharding, mesh: Mesh, is_alike: bool
) -> TensorSharding:
    """How an array of dimensions `whole` lies that lies as `lies` in dimensions `parts`."""
    dims: list[tuple[str, ...]] = [()] * len(whole)
    left = {number for number, axes in enumerate(lies.dims) if axes}
    for joined, several in reshape_groups(whole, parts):
        split = [number for number in several if lies.dims[number]]
        if not split:
            continue
        if len(joined) != 1 or len(split) > 1 or not (is_alike or split[0] == several[0]):
            raise _NotExpressibleError
        axes = lies.dims[split[0]]
        if len(several) > 1 and parts[split[0]] % mesh.size(axes):
            raise _NotExpressibleError
        dims[joined[0]] = axes
        left -= {split[0]}
    if left or prod(whole) == 0:
        raise _NotExpressibleError
    return replace(lies, dims=tuple(dims))
