"""Reshapes of arguments at entry and outputs at exit, for variables with other storage dimensions."""

from __future__ import annotations

from shardwright.errors import PlanError
from shardwright.hlo import ArrayShape, Instruction, Module
from shardwright.planner.rewrites import edit
from shardwright.planner.rewrites.dim_classes import Required, Views


def reshape_variables(module: Module, required: Required) -> Module:
    """The program with its variables in the dimensions of `required`, and reshapes to the program's own.

    Raises PlanError for a variable inside a tuple that cannot be opened.
    """
    entry, names = module.entry, edit.Names(module)
    parameters = [(parameter, leaf) for parameter in entry.parameters for leaf in parameter.shape.leaves]
    stored = {
        parameters[leaf][0]: wanted
        for leaf, wanted in required.parameters.items()
        if parameters[leaf][1].dimensions != wanted
    }
    outputs = {
        leaf: wanted for leaf, wanted in required.outputs.items() if entry.root.shape.leaves[leaf].dimensions != wanted
    }
    if not stored and not outputs:
        return module
    new_values: dict[Instruction, Instruction] = {}
    out: list[Instruction] = []
    for old in entry:
        new = edit.copy_of(old, [new_values[operand] for operand in old.operands])
        out.append(new)
        if old in stored:
            new = _entering(new, stored[old], out, names)
        new_values[old] = new
    root = _leaving(new_values[entry.root], outputs, out, names) if outputs else new_values[entry.root]
    rebuilt = edit.computation_of(entry, out, root)
    return edit.module_of(module, [rebuilt if c is entry else c for c in module.computations])


def _entering(
    parameter: Instruction, dimensions: tuple[int, ...], out: list[Instruction], names: edit.Names
) -> Instruction:
    """The argument in its stored dimensions; the program reads a reshape of it."""
    shape = parameter.shape
    if not isinstance(shape, ArrayShape):
        raise PlanError(
            f"argument {parameter.index} is a tuple: the arrays in it are stored otherwise than the program reads them",
            where=parameter.name,
            remedy="hand the arrays over as arguments of their own",
        )
    parameter.shape = ArrayShape(shape.element_type, dimensions)
    out.append(edit.reshape_to(parameter, shape.dimensions, names.like(parameter.name, "logical")))
    return out[-1]


def _leaving(root: Instruction, outputs: Views, out: list[Instruction], names: edit.Names) -> Instruction:
    """The root with some outputs in their stored dimensions."""
    if isinstance(root.shape, ArrayShape):
        out.append(edit.reshape_to(root, outputs[0], names.like(root.name, "stored")))
        return out[-1]
    if root.opcode != "tuple" or len(root.operands) != len(root.shape.leaves):
        raise PlanError(
            f"{root.opcode} {root.name} hands on arrays that are stored otherwise than it makes them",
            where=root.name,
            remedy="return the arrays in one flat tuple",
        )
    operands = list(root.operands)
    for leaf, dimensions in outputs.items():
        out.append(edit.reshape_to(operands[leaf], dimensions, names.like(operands[leaf].name, "stored")))
        operands[leaf] = out[-1]
    leaves = iter([operand.shape.leaves[0] for operand in operands])
    out.remove(root)
    out.append(edit.copy_of(root, operands, shape=edit.with_leaves(root.shape, leaves)))
    return out[-1]
