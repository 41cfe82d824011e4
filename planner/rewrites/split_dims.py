"""Dimensions that hold several things side by side are written as two.

A fused weight `[d, 3d]` holds q, k and v side by side; what splits its second
dimension over devices cuts across them, and XLA gathers and permutes to undo
that. Written as `[d, 3, d]` the last dimension splits freely, and with it those
of q, k and v. Which dimensions, and which others must follow, is found by
`classes` from the slices, pads and concatenates of the program; nothing is known
of models. A split dimension is row-major the same memory as before, so that
arguments and outputs only change their shape: the stored *view* of a variable.

The search's sharding rules are untouched: they see a program with more dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from shardwright.errors import PlanError
from shardwright.hlo import ArrayShape, Computation, Instruction, Module
from shardwright.planner.rewrites import edit
from shardwright.planner.rewrites.classes import Required, choose, planned_computations
from shardwright.planner.rewrites.split_ops import ATTRIBUTES, Splits, on_pieces, start_indices

#: Rounds of splitting: a block of one round may hold several things itself.
MOST_ROUNDS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewritten:
    """A program equal to the one given, but for the shapes of some arguments and outputs.

    parameters / outputs: per array leaf that changed, its dimensions now; row-major the same elements.
    notes: what could not be rewritten, and why.
    """

    module: Module
    parameters: Mapping[int, tuple[int, ...]]
    outputs: Mapping[int, tuple[int, ...]]
    notes: tuple[str, ...] = ()

    @property
    def changed(self) -> bool:
        """Whether any variable is stored otherwise than the program was written with."""
        return bool(self.parameters or self.outputs)


def rewrite(module: Module, required_views: Required | None = None) -> Rewritten:
    """Split every dimension that is cut into equal blocks, with all that must follow it.

    required_views: per array leaf of the entry's parameters that is stored already, the dimensions in which
        it is (its own, where it lies as the program was written). Followed where the program can; else the
        argument is reshaped where it enters, and an output in its buffer where it leaves.

    Instructions keep their names and metadata; reshapes that are added have names of their own. `module` is
    not changed, and is given back where nothing is to be split.
    Raises PlanError where a required view does not have the argument's elements.
    """
    required = dict(required_views or {})
    _check_required(module, required)
    notes: dict[str, None] = {}
    made = module
    for _ in range(MOST_ROUNDS):
        chosen = choose(made, required)
        notes.update(dict.fromkeys(chosen.notes))
        if not chosen.factors:
            break
        made = _Rewriter(made, Splits(factors=chosen.factors)).run()
    made = _bring_to(made, required)
    return Rewritten(
        module=made,
        parameters=_changed(_parameter_dims(module), _parameter_dims(made)),
        outputs=_changed(_output_dims(module), _output_dims(made)),
        notes=tuple(notes),
    )


def _parameter_dims(module: Module) -> list[tuple[int, ...]]:
    return [leaf.dimensions for parameter in module.entry.parameters for leaf in parameter.shape.leaves]


def _output_dims(module: Module) -> list[tuple[int, ...]]:
    return [leaf.dimensions for leaf in module.entry.root.shape.leaves]


def _changed(before: list[tuple[int, ...]], after: list[tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
    return {leaf: new for leaf, (old, new) in enumerate(zip(before, after, strict=True)) if old != new}


def _check_required(module: Module, required: Required) -> None:
    dims = _parameter_dims(module)
    for leaf, wanted in required.items():
        if not 0 <= leaf < len(dims) or prod(dims[leaf]) != prod(wanted):
            has = list(dims[leaf]) if 0 <= leaf < len(dims) else "not there"
            raise PlanError(
                f"argument {leaf} is {has} in the program and cannot be stored as {list(wanted)}",
                where=f"argument {leaf}",
                remedy="give the dimensions in which an array of as many elements lies",
            )


class _Rewriter:
    """One round: every computation that control flow reaches is written anew with its dimensions split."""

    def __init__(self, module: Module, splits: Splits) -> None:
        self.module = module
        self.splits = splits
        self.names = edit.Names(module)
        self.split_values = {value for value, _, _ in splits.factors}
        self.made: dict[Instruction, Instruction] = {}  # old value → new value, in its new shape
        self.computations: dict[Computation, Computation] = {}
        self.out: list[Instruction] = []

    def run(self) -> Module:
        planned = set(planned_computations(self.module))
        made = [  # callees come before their callers
            self._computation(computation) if computation in planned else computation
            for computation in self.module.computations
        ]
        return edit.module_of(self.module, made)

    def _computation(self, computation: Computation) -> Computation:
        self.out = []
        for instruction in computation:
            self.made[instruction] = self._instruction(instruction)
        made = edit.computation_of(computation, self.out, self.made[computation.root])
        self.computations[computation] = made
        return made

    def _instruction(self, old: Instruction) -> Instruction:
        operands = [self.made[operand] for operand in old.operands]
        if not (old in self.split_values or any(operand in self.split_values for operand in old.operands)):
            return self._emit(edit.copy_of(old, operands, called=self._called(old)))
        if old.opcode in ("slice", "pad", "concatenate"):
            return self._cut_or_joined(old, operands)
        if old.opcode == "constant" or (old.opcode == "iota" and self._counts_along(old)):
            whole = self._emit(edit.copy_of(old, operands))
            return self._shaped(whole, self.splits.dimensions(old), old)
        if old.opcode.startswith("dynamic-"):
            operands = start_indices(self.splits, old, operands)
        attributes = dict(old.attributes)
        if old.opcode in ATTRIBUTES:
            attributes.update({a.name: a for a in ATTRIBUTES[old.opcode](self.splits, old)})
        return self._emit(
            edit.copy_of(old, operands, shape=self.splits.shape(old), attributes=attributes, called=self._called(old))
        )

    def _counts_along(self, iota: Instruction) -> bool:
        return (iota, 0, iota.get("iota_dimension")) in self.splits.factors

    def _called(self, old: Instruction) -> dict[str, tuple[Computation, ...]]:
        if not old.called:
            return old.called
        return {
            name: tuple(self.computations.get(callee, callee) for callee in callees)
            for name, callees in old.called.items()
        }

    def _cut_or_joined(self, old: Instruction, operands: list[Instruction]) -> Instruction:
        pieces = on_pieces(self.splits, old)
        brought = [
            self._shaped(operand, dimensions, operand)
            for operand, dimensions in zip(operands, pieces.operands, strict=True)
        ]
        shape = self.splits.shape(old)
        assert isinstance(shape, ArrayShape)
        if shape.dimensions != pieces.result:
            shape = ArrayShape(shape.element_type, pieces.result)
        made = edit.copy_of(
            old, brought, shape=shape, attributes={**old.attributes, pieces.attribute.name: pieces.attribute}
        )
        return self._shaped(self._emit(made), self.splits.dimensions(old), old)

    def _shaped(self, value: Instruction, dimensions: tuple[int, ...], like: Instruction) -> Instruction:
        """The value in these dimensions: itself, or a reshape of it."""
        assert isinstance(value.shape, ArrayShape)
        if value.shape.dimensions == dimensions:
            return value
        return self._emit(edit.reshape_to(value, dimensions, self.names.like(like.name, "split")))

    def _emit(self, instruction: Instruction) -> Instruction:
        self.out.append(instruction)
        return instruction


def _bring_to(module: Module, required: Required) -> Module:
    """Reshape arguments that are stored otherwise than the program reads them, and what leaves in their buffers."""
    wanted = {leaf: dims for leaf, dims in required.items() if _parameter_dims(module)[leaf] != dims}
    if not wanted:
        return module
    entry, names = module.entry, edit.Names(module)
    leaves = 0
    stored: dict[Instruction, tuple[int, ...]] = {}
    for parameter in entry.parameters:
        if isinstance(parameter.shape, ArrayShape) and leaves in wanted:
            stored[parameter] = wanted[leaves]
        leaves += len(parameter.shape.leaves)
    if len(stored) < len(wanted):
        raise PlanError(
            "an argument inside a tuple is stored otherwise than the program reads it",
            where=module.name,
            remedy="hand the arrays over as arguments of their own",
        )
    made: dict[Instruction, Instruction] = {}
    out: list[Instruction] = []
    for old in entry:
        new = edit.copy_of(old, [made[operand] for operand in old.operands])
        if old in stored:
            new.shape = ArrayShape(old.shape.leaves[0].element_type, stored[old])
            out.append(new)
            new = edit.reshape_to(new, old.shape.leaves[0].dimensions, names.like(old.name, "logical"))
        out.append(new)
        made[old] = new
    aliases = {output: wanted[leaf] for output, leaf in edit.flat_aliases(module).items() if leaf in wanted}
    root = _stored_outputs(made[entry.root], aliases, out, names)
    rebuilt = edit.computation_of(entry, out, root)
    return edit.module_of(module, [rebuilt if c is entry else c for c in module.computations])


def _stored_outputs(
    root: Instruction, aliases: Mapping[int, tuple[int, ...]], out: list[Instruction], names: edit.Names
) -> Instruction:
    """The root with the outputs of `aliases` in these dimensions; reshapes go before it."""
    if not aliases:
        return root
    if isinstance(root.shape, ArrayShape):
        out.append(edit.reshape_to(root, aliases[0], names.like(root.name, "stored")))
        return out[-1]
    if root.opcode != "tuple" or len(root.operands) != len(root.shape.leaves):
        raise PlanError(
            f"{root.opcode} {root.name} hands on arrays that are stored otherwise than it makes them",
            where=root.name,
            remedy="return the arrays in one flat tuple",
        )
    out.pop()
    operands = list(root.operands)
    for leaf, dimensions in aliases.items():
        out.append(edit.reshape_to(operands[leaf], dimensions, names.like(operands[leaf].name, "stored")))
        operands[leaf] = out[-1]
    leaves = iter([operand.shape.leaves[0] for operand in operands])
    out.append(edit.copy_of(root, operands, shape=edit.with_leaves(root.shape, leaves)))
    return out[-1]
