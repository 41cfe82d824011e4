"""Dimensions of several concatenated values become two.

A fused weight `[d, 3d]` holds q, k and v side by side. A sharding of its second dimension cuts across them, and XLA
gathers and permutes to undo that. In the form `[d, 3, d]` the last dimension splits freely, and with it those of q, k
and v. `dim_classes` finds these dimensions and their followers from the slices, pads and concatenates of the program,
without knowledge of models. Row-major, a split dimension is the same memory: arguments and outputs only change their
shape, the stored *view* of a variable.

The search's sharding rules are unchanged: they see a program with more dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from shardwright.errors import PlanError
from shardwright.hlo import ArrayShape, Computation, Instruction, Module
from shardwright.hlo.entry import flat_aliases
from shardwright.planner.rewrites import edit
from shardwright.planner.rewrites.boundary import reshape_variables
from shardwright.planner.rewrites.dim_classes import Required, choose_splits, reachable_computations
from shardwright.planner.rewrites.split_ops import ATTRIBUTES, Splits, on_pieces, start_indices
from shardwright.planner.tuning import MAX_SPLIT_ROUNDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewritten:
    """A program equal to the original, but for the shapes of some arguments and outputs.

    module: the program.
    parameters: per changed array leaf of an argument, its new dimensions; row-major the same elements.
    outputs: the same for outputs.
    notes: dimensions not rewritten, with reasons.
    """

    module: Module
    parameters: Mapping[int, tuple[int, ...]]
    outputs: Mapping[int, tuple[int, ...]]
    notes: tuple[str, ...] = ()

    @property
    def changed(self) -> bool:
        """Whether the storage of any variable differs from the original program's."""
        return bool(self.parameters or self.outputs)


def rewrite(module: Module, required: Required | None = None) -> Rewritten:
    """Split every dimension cut into equal blocks, with all its followers.

    required: fixed dimensions of variables with existing arrays (their own, for arrays stored in the program's form).
        The program follows in all possible places; else the variable is reshaped at its entry or exit. An output in an
        argument's buffer has the argument's storage.

    Instructions keep their names and metadata; added reshapes have names of their own. `module` is not changed, and is
    returned in case of no split.
    Raises PlanError for a required view without the variable's elements.
    """
    required = check_required(module, required or Required())
    notes: dict[str, None] = {}
    rewritten = module
    with edit.without_gc():
        for _ in range(MAX_SPLIT_ROUNDS):
            chosen = choose_splits(rewritten, required)
            notes.update(dict.fromkeys(chosen.notes))
            if not chosen.factors:
                break
            rewritten = _Rewriter(rewritten, Splits(factors=chosen.factors)).run()
        rewritten = reshape_variables(rewritten, required)
    return views_between(module, rewritten, tuple(notes))


def views_between(module: Module, new_module: Module, notes: tuple[str, ...] = ()) -> Rewritten:
    """`new_module` as a rewrite of `module`: the variables with other dimensions."""
    (parameters, outputs), (new_parameters, new_outputs) = variable_dims(module), variable_dims(new_module)
    return Rewritten(
        module=new_module,
        parameters=_diff(parameters, new_parameters),
        outputs=_diff(outputs, new_outputs),
        notes=notes,
    )


def variable_dims(module: Module) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Dimensions of the array leaves of the entry's parameters, and of its result."""
    parameters = [leaf.dimensions for parameter in module.entry.parameters for leaf in parameter.shape.leaves]
    return parameters, [leaf.dimensions for leaf in module.entry.root.shape.leaves]


def _diff(before: list[tuple[int, ...]], after: list[tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
    return {leaf: new for leaf, (old, new) in enumerate(zip(before, after, strict=True)) if old != new}


def check_required(module: Module, required: Required) -> Required:
    """The same requirements, for both sides of each buffer an argument and an output share."""
    parameters, outputs = dict(required.parameters), dict(required.outputs)
    for output, parameter in flat_aliases(module).items():
        if parameter in parameters:
            outputs[output] = parameters[parameter]
        elif output in outputs:
            parameters[parameter] = outputs[output]
    argument_dims, output_dims = variable_dims(module)
    for kind, dims, views in (("argument", argument_dims, parameters), ("output", output_dims, outputs)):
        for leaf, wanted in views.items():
            if not 0 <= leaf < len(dims) or prod(dims[leaf]) != prod(wanted):
                has = list(dims[leaf]) if 0 <= leaf < len(dims) else "not there"
                raise PlanError(
                    f"{kind} {leaf} is {has} in the program and cannot be stored as {list(wanted)}",
                    where=f"{kind} {leaf}",
                    remedy="give the dimensions in which an array of as many elements lies",
                )
    return Required(parameters=parameters, outputs=outputs)


class _Rewriter:
    """One round: rewrites every reachable control flow computation with its dimensions split."""

    def __init__(self, module: Module, splits: Splits) -> None:
        self.module = module
        self.splits = splits
        self.names = edit.Names(module)
        self.split_values = {value for value, _, _ in splits.factors}
        self.made: dict[Instruction, Instruction] = {}  # old value → new value, in its new shape
        self.computations: dict[Computation, Computation] = {}
        self.out: list[Instruction] = []

    def run(self) -> Module:
        planned = set(reachable_computations(self.module))
        computations = [  # callees come before their callers
            self._computation(computation) if computation in planned else computation
            for computation in self.module.computations
        ]
        return edit.module_of(self.module, computations)

    def _computation(self, computation: Computation) -> Computation:
        self.out = []
        for instruction in computation:
            self.made[instruction] = self._instruction(instruction)
        rewritten = edit.computation_of(computation, self.out, self.made[computation.root])
        self.computations[computation] = rewritten
        return rewritten

    def _instruction(self, old: Instruction) -> Instruction:
        operands = [self.made[operand] for operand in old.operands]
        if not (old in self.split_values or any(operand in self.split_values for operand in old.operands)):
            return self._emit(edit.copy_of(old, operands, called=self._callees(old)))
        if old.opcode in ("slice", "pad", "concatenate"):
            return self._cut_or_joined(old, operands)
        if old.opcode == "constant" or (old.opcode == "iota" and self._counts_along(old)):
            whole = self._emit(edit.copy_of(old, operands))
            return self._reshape(whole, self.splits.dimensions(old), old)
        if old.opcode.startswith("dynamic-"):
            operands = start_indices(self.splits, old, operands)
        attributes = dict(old.attributes)
        if old.opcode in ATTRIBUTES:
            attributes.update({a.name: a for a in ATTRIBUTES[old.opcode](self.splits, old)})
        shape = self.splits.shape(old)
        copy = edit.copy_of(old, operands, shape=shape, attributes=attributes, called=self._callees(old))
        return self._emit(edit.check_consistency(copy))

    def _counts_along(self, iota: Instruction) -> bool:
        return (iota, 0, iota.get("iota_dimension")) in self.splits.factors

    def _callees(self, old: Instruction) -> dict[str, tuple[Computation, ...]]:
        if not old.called:
            return old.called
        return {
            name: tuple(self.computations.get(callee, callee) for callee in callees)
            for name, callees in old.called.items()
        }

    def _cut_or_joined(self, old: Instruction, operands: list[Instruction]) -> Instruction:
        pieces = on_pieces(self.splits, old)
        brought = [
            self._reshape(operand, dimensions, operand)
            for operand, dimensions in zip(operands, pieces.operands, strict=True)
        ]
        shape = self.splits.shape(old)
        assert isinstance(shape, ArrayShape)
        if shape.dimensions != pieces.result:
            shape = ArrayShape(shape.element_type, pieces.result)
        copy = edit.copy_of(
            old, brought, shape=shape, attributes={**old.attributes, pieces.attribute.name: pieces.attribute}
        )
        return self._reshape(self._emit(edit.check_consistency(copy)), self.splits.dimensions(old), old)

    def _reshape(self, value: Instruction, dimensions: tuple[int, ...], like: Instruction) -> Instruction:
        """The value in these dimensions: itself, or a reshape of it."""
        assert isinstance(value.shape, ArrayShape)
        if value.shape.dimensions == dimensions:
            return value
        return self._emit(
            edit.check_consistency(edit.reshape_to(value, dimensions, self.names.like(like.name, "split")))
        )

    def _emit(self, instruction: Instruction) -> Instruction:
        self.out.append(instruction)
        return instruction
