"""Writes placements into a program: arguments that lie on the host, moved in for their update and back.

Every reader of such an argument reads a copy of it on the device (`device`), and the output in its place is a copy on
the host (`host`). Where the compiler moves them is its affair: XLA:GPU reads an argument on the host out of the kernel
that updates it, and begins to move a result back as soon as it is there.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.hlo import ArrayShape, Instruction, Module
from shardwright.placements import DEVICE, HOST, place
from shardwright.planner.rewrites import edit


def keep_on_host(module: Module, state: Mapping[int, int]) -> Module:
    """`module` with some arguments, and the outputs in their place, on the host; `module` itself without any.

    module: with flat variables (`has_flat_variables`). state: number of an argument → that of its output.
    """
    if not state:
        return module
    entry, names = module.entry, edit.Names(module)
    argument_of = {state[parameter.index]: parameter for parameter in entry.parameters if parameter.index in state}
    new_values: dict[Instruction, Instruction] = {}
    out: list[Instruction] = []
    for old in entry:
        operands = [new_values[operand] for operand in old.operands]
        if old is entry.root:
            for output, parameter in argument_of.items():
                operands[output] = place(operands[output], HOST, names.like(parameter.name, "host"))
                out.append(operands[output])
        new = edit.copy_of(old, operands)
        out.append(new)
        if old.opcode == "parameter" and old.index in state:
            new = place(new, DEVICE, names.like(old.name, "device"))
            out.append(new)
        new_values[old] = new
    rebuilt = edit.computation_of(entry, out, new_values[entry.root])
    return edit.module_of(module, [rebuilt if c is entry else c for c in module.computations])


def has_flat_variables(module: Module) -> bool:
    """Whether every argument is an array, and the results are one tuple of arrays, made as such."""
    root, values = module.entry.root, module.entry.parameters
    is_flat = root.opcode == "tuple" and len(root.operands) == len(root.shape.leaves)
    return is_flat and all(isinstance(value.shape, ArrayShape) for value in (*values, *root.operands))
