"""Translate a plan of a program with split dimensions back to the original program.

A plan without a sharding inside the pieces of a cut or joined dimension needs no second dimension: the same shards are
blocks of the whole one. XLA then sees the original products, slices and concatenates, with better fusion: between
`[…, 3, d]` and its pieces it inserts transposing and copying kernels. The plan's moves and cost stay the same.

Every array is read in its new dimensions, group by group (`reshape_groups`). A whole dimension has the sharding of its
first part, or of another part for instructions blind to the pieces.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from math import prod

from shardwright.hlo import Instruction, Module
from shardwright.planner.rewrites.dim_classes import reachable_computations
from shardwright.planner.rewrites.split_dims import variable_dims
from shardwright.planner.rules.data_movement import reshape_groups
from shardwright.plans.plan import InstructionPlan, Plan, SegmentPlan, VariablePlan
from shardwright.plans.shardings import Mesh, TensorSharding, ValueSharding

#: Opcodes sensitive to an element's position in a dimension. All others treat the elements of a dimension alike.
_PLACED = frozenset({
    "slice", "pad", "concatenate", "gather", "scatter", "dynamic-slice", "dynamic-update-slice", "reverse", "sort",
    "iota", "reduce-window", "custom-call", "constant",
})  # fmt: skip


class _NotExpressibleError(Exception):
    """A sharding inside pieces that are cut apart."""


def undo_split_dims(module: Module, plan: Plan, written: Module) -> Plan | None:
    """The same plan for the program before its dimensions were split; None: not expressible there.

    module: the program of `plan`, a rewrite of `written`. The plan's legality is left to its checker.
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
        self._split = {
            instruction.name: instruction
            for computation in reachable_computations(self.module)
            for instruction in computation
        }
        self._known = {}

    def run(self) -> Plan:
        computations = reachable_computations(self.written)
        values = {instruction.name: instruction for computation in computations for instruction in computation}
        instructions = tuple(map(self._entry, values.values()))
        arguments, outputs = variable_dims(self.written)
        text = self.written.to_text()
        return replace(
            self.plan,
            instructions=instructions,
            parameters=self._variables(self.plan.parameters, arguments),
            outputs=self._variables(self.plan.outputs, outputs),
            collectives=tuple(
                replace(collective, instruction=self._reader(collective.instruction, values))
                for collective in self.plan.collectives
            ),
            segments=tuple(self._segment(segment, values) for segment in self.plan.segments),
            hlo_sha256=sha256(text.encode()).hexdigest(),
            hlo_text=text,
        )

    def _entry(self, old: Instruction) -> InstructionPlan:
        split = self._split.get(old.name)
        entry = self._entries.get(old.name)
        if split is None or entry is None:
            raise _NotExpressibleError
        count = len(old.operands)  # a dynamic slice has a start more for each new dimension: all lie alike
        operands = list(zip(old.operands, split.operands[:count], entry.operands[:count], strict=True))
        if old.shape == split.shape and all(before.shape == after.shape for before, after, _ in operands):
            return entry
        is_alike = _is_alike(old)
        return replace(
            entry,
            operands=tuple(self._value(before, after, sharding, is_alike) for before, after, sharding in operands),
            result=self._value(old, split, entry.result, is_alike),
            shared=self._value(old, split, entry.shared, is_alike) if entry.shared else (),
        )

    def _value(
        self, old: Instruction, instruction: Instruction, shardings: ValueSharding, is_alike: bool
    ) -> ValueSharding:
        leaves = zip(old.shape.leaves, instruction.shape.leaves, shardings, strict=True)
        return tuple(
            self._array(before.dimensions, after.dimensions, sharding, is_alike) for before, after, sharding in leaves
        )

    def _array(
        self, whole: tuple[int, ...], parts: tuple[int, ...], sharding: TensorSharding, is_alike: bool
    ) -> TensorSharding:
        if whole == parts:
            return sharding
        key = whole, parts, sharding, is_alike
        if key not in self._known:
            self._known[key] = _merge_dims(whole, parts, sharding, self.plan.mesh, is_alike)
        return self._known[key]

    def _variables(self, variables: tuple[VariablePlan, ...], dims: list[tuple[int, ...]]) -> tuple[VariablePlan, ...]:
        return tuple(self._variable(variable, dims[number]) for number, variable in enumerate(variables))

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
        """The instruction itself; for a removed reshape, its operand."""
        while name not in values:
            reshape = self._split.get(name)
            if reshape is None or reshape.opcode != "reshape":
                raise _NotExpressibleError
            (operand,) = reshape.operands
            name = operand.name
        return name

    def _segment(self, segment: SegmentPlan, values: Mapping[str, Instruction]) -> SegmentPlan:
        """Removes the reshapes of values between segments."""
        boundary = []
        for name, sharding in segment.boundary:
            old, split = values[self._reader(name, values)], self._split[name]
            is_reshaped = old.shape != split.shape
            boundary.append((old.name, self._boundary(old, split, sharding) if is_reshaped else sharding))
        return replace(segment, boundary=tuple(boundary))

    def _boundary(self, old: Instruction, split: Instruction, sharding: TensorSharding) -> TensorSharding:
        """The sharding of a reshaped value: of the first array of its rank, where the value has several."""
        for before, after in zip(old.shape.leaves, split.shape.leaves, strict=True):
            if after.rank == len(sharding.dims):
                with suppress(_NotExpressibleError):
                    return self._array(before.dimensions, after.dimensions, sharding, True)
        raise _NotExpressibleError


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
    whole: tuple[int, ...], parts: tuple[int, ...], sharding: TensorSharding, mesh: Mesh, is_alike: bool
) -> TensorSharding:
    """The sharding in dimensions `whole` of an array with `sharding` in dimensions `parts`."""
    dims: list[tuple[str, ...]] = [()] * len(whole)
    unmerged = {number for number, axes in enumerate(sharding.dims) if axes}
    for joined, several in reshape_groups(whole, parts):
        split = [number for number in several if sharding.dims[number]]
        if not split:
            continue
        if len(joined) != 1 or len(split) > 1 or not (is_alike or split[0] == several[0]):
            raise _NotExpressibleError
        axes = sharding.dims[split[0]]
        if len(several) > 1 and parts[split[0]] % mesh.size(axes):
            raise _NotExpressibleError
        dims[joined[0]] = axes
        unmerged -= {split[0]}
    if unmerged or prod(whole) == 0:
        raise _NotExpressibleError
    return replace(sharding, dims=tuple(dims))
