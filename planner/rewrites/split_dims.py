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
from shardwright.planner.rewrites.boundary import reshape_variables
from shardwright.planner.rewrites.dim_classes import Required, choose_splits, reachable_computations
from shardwright.planner.rewrites.split_ops import ATTRIBUTES, Splits, on_pieces, start_indices

#: Rounds of splitting: a block of one round may hold several things itself.
MAX_ROUNDS = 4


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


def rewrite(module: Module, required: Required | None = None) -> Rewritten:
    """Split every dimension that is cut into equal blocks, with all that must follow it.

    required: variables whose dimensions are settled because arrays lie so already (their own, where they lie
        as the program was written). The program follows where it can; else the variable is reshaped where it
        enters or leaves. An output that reuses an argument's buffer is stored like the argument.

    Instructions keep their names and metadata; reshapes that are added have names of their own. `module` is
    not changed, and is given back where nothing is to be split.
    Raises PlanError where a required view does not have the variable's elements.
    """
    required = check_required(module, required or Required())
    notes: dict[str, None] = {}
    made = module
    with edit.without_gc():
        for _ in range(MAX_ROUNDS):
            chosen = choose_splits(made, required)
            notes.update(dict.fromkeys(chosen.notes))
            if not chosen.factors:
                break
            made = _Rewriter(made, Splits(factors=chosen.factors)).run()
        made = reshape_variables(made, required)
    return views_between(module, made, tuple(notes))


def views_between(module: Module, made: Module, notes: tuple[str, ...] = ()) -> Rewritten:
    """`made` as a rewrite of `module`: which variables have other dimensions."""
    (parameters, outputs), (new_parameters, new_outputs) = variable_dims(module), variable_dims(made)
    return Rewritten(
        module=made,
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
    """The same, for both sides of each buffer that an argument and an output share."""
    parameters, outputs = dict(required.parameters), dict(required.outputs)
    for output, parameter in edit.flat_aliases(module).items():
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
        planned = set(reachable_computations(self.module))
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
        made = edit.copy_of(old, operands, shape=shape, attributes=attributes, called=self._callees(old))
        return self._emit(edit.check_consistency(made))

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
        made = edit.copy_of(
            old, brought, shape=shape, attributes={**old.attributes, pieces.attribute.name: pieces.attribute}
        )
        return self._reshape(self._emit(edit.check_consistency(made)), self.splits.dimensions(old), old)

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
