"""Checks a plan's arguments and outputs against the program's: shapes, layouts, shared buffers.

Part of the plan checker (`verify`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from shardwright.hlo import ArrayShape, Instruction, Module, Shape, TupleShape
from shardwright.planner.strategies.legality import flat
from shardwright.plans.plan import InstructionPlan, Plan, VariablePlan
from shardwright.plans.shardings import Mesh, TensorSharding


def boundary_problems(
    module: Module, plan: Plan, entries: Mapping[str, InstructionPlan], *, is_piece: bool = False
) -> Iterator[str]:
    """Problems of `plan.parameters` and `plan.outputs`. entries: the plan's instructions by name.

    is_piece: the program is one of several of a step: a partial sum may go from one to the next.
    """
    root = module.entry.root
    yield from _side_problems("parameter", plan.parameters, module.entry.parameters, entries, plan.mesh, is_piece)
    # A bare root is resharded to the output's sharding on return.
    is_moved = root.opcode != "tuple"
    yield from _side_problems("output", plan.outputs, (root,), {} if is_moved else entries, plan.mesh, is_piece)
    yield from _alias_problems(module, plan)


def _side_problems(
    kind: str,
    variables: Sequence[VariablePlan],
    instructions: Sequence[Instruction],
    entries: Mapping[str, InstructionPlan],
    mesh: Mesh,
    is_piece: bool,
) -> Iterator[str]:
    shapes = [leaf for instruction in instructions for leaf in instruction.shape.leaves]
    if len(variables) != len(shapes):
        yield f"{len(variables)} {kind}s planned, the program has {len(shapes)}"
        return
    planned = [entries[value.name].result for value in instructions if value.name in entries]
    inside = flat(planned) if len(planned) == len(instructions) else ()
    for i, (variable, shape) in enumerate(zip(variables, shapes, strict=True)):
        sharding = inside[i] if i < len(inside) else None
        for problem in _variable_problems(variable, i, shape, sharding, mesh, is_piece):
            yield f"{kind} {i} ({variable.name}): {problem}"


def _variable_problems(
    variable: VariablePlan,
    number: int,
    shape: ArrayShape,
    inside: TensorSharding | None,
    mesh: Mesh,
    is_piece: bool,
) -> Iterator[str]:
    if variable.number != number:
        yield f"carries number {variable.number}"
    if (variable.element_type, variable.shape) != (shape.element_type, shape.dimensions):
        theirs = f"{shape.element_type}{list(shape.dimensions)}"
        yield f"is {variable.element_type}{list(variable.shape)}, the program's {theirs}"
        return
    if len(variable.sharding.dims) != shape.rank:
        yield f"of rank {shape.rank} is planned as {variable.sharding}"
        return
    if any(axis not in mesh.sizes for axis in (*variable.sharding.axes, *variable.sharding.unreduced)):
        yield f"is split over an axis that the mesh lacks: {variable.sharding}"
        return
    if variable.is_stacked and not is_piece:
        yield "is partial: nothing reduces it outside the program"
        return
    if inside is not None and variable.sharding != inside:
        yield f"is {variable.sharding}, inside the program {inside}"
    padded = tuple(
        -(-n // mesh.size(axes)) * mesh.size(axes)
        for n, axes in zip(shape.dimensions, variable.sharding.dims, strict=True)
    )
    if variable.is_stacked and padded != shape.dimensions:
        yield f"is partial and split unevenly: {variable.sharding}"
    stored = (mesh.size(variable.sharding.unreduced), *padded) if variable.is_stacked else padded
    if variable.stored_shape != stored:
        yield f"is stored as {list(variable.stored_shape)}, its sharding needs {list(stored)}"


# ---- aliases -------------------------------------------------------------------


def _alias_problems(module: Module, plan: Plan) -> Iterator[str]:
    expected = _program_aliases(module)
    parameters = plan.parameters
    for output in plan.outputs:
        wanted = expected.get(output.number)
        if output.alias != wanted:
            yield f"output {output.number} ({output.name}): alias {output.alias}, program says {wanted}"
        elif wanted is not None and wanted < len(parameters):
            parameter = parameters[wanted]
            if parameter.alias != output.number:
                yield f"parameter {wanted} ({parameter.name}): alias {parameter.alias}, not back"
            if (parameter.sharding, parameter.stored_shape) != (output.sharding, output.stored_shape):
                yield (
                    f"output {output.number} ({output.name}) is {output.sharding} stored {output.stored_shape}, "
                    f"parameter {wanted} with the same buffer {parameter.sharding} stored {parameter.stored_shape}"
                )
    aliased = {output.alias for output in plan.outputs}
    for parameter in parameters:
        if parameter.alias is not None and parameter.number not in aliased:
            yield f"parameter {parameter.number} ({parameter.name}): alias {parameter.alias}, not back"


def _program_aliases(module: Module) -> dict[int, int]:
    """Output leaf → parameter leaf, both counted flat."""
    parameters = module.entry.parameters
    before_parameter = _counts_before(parameter.shape for parameter in parameters)
    root = module.entry.root.shape
    before_output = _counts_before(root.elements) if isinstance(root, TupleShape) else [0]
    aliases = {}
    for alias in module.aliases:
        output = 0
        if alias.output_index and isinstance(root, TupleShape):
            first, *rest = alias.output_index
            output = before_output[first] + _leaf_at(root.elements[first], rest)
        number = alias.parameter_number
        aliases[output] = before_parameter[number] + _leaf_at(parameters[number].shape, alias.parameter_index)
    return aliases


def _counts_before(shapes: Iterable[Shape]) -> list[int]:
    """Array leaves before each shape."""
    return list(accumulate((len(shape.leaves) for shape in shapes), initial=0))


def _leaf_at(shape: Shape, path: Sequence[int]) -> int:
    """Number of the array leaf of `shape` at a path of tuple indices."""
    count = 0
    for at in path:
        if not isinstance(shape, TupleShape):
            break
        count += sum(len(element.leaves) for element in shape.elements[:at])
        shape = shape.elements[at]
    return count
