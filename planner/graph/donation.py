"""Pairs donated arguments with outputs when the header does not, by the rules of `shardwright.hlo.donation`."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.hlo import Module, Shape, TupleShape
from shardwright.hlo.donation import pair_donors
from shardwright.planner.rewrites.edit import attribute, flat_aliases


def alias_donors(module: Module) -> Module:
    """`module` with its `buffer_donor` arguments aliased to outputs of the same type; the rest share no memory.
    `module` itself when none is paired."""
    if not module.donors:
        return module
    parameters = module.entry.parameters
    arguments = [(number, path) for number, parameter in enumerate(parameters) for path in _paths(parameter.shape)]
    leaves = [leaf for parameter in parameters for leaf in parameter.shape.leaves]
    root = module.entry.root.shape
    given = {(donor.parameter_number, donor.parameter_index) for donor in module.donors}
    donors = [number for number, argument in enumerate(arguments) if argument in given]  # a tuple's own table is none
    paired = pair_donors(
        donors,
        [(leaf.element_type, leaf.dimensions) for leaf in leaves],
        [(leaf.element_type, leaf.dimensions) for leaf in root.leaves],
        flat_aliases(module),
    )
    if not paired:
        return module
    outputs = list(_paths(root))
    lines = [
        f"{_index(alias.output_index)}: ({alias.parameter_number}, {_index(alias.parameter_index)}, {alias.kind})"
        for alias in module.aliases
    ]
    lines += [
        f"{_index(outputs[output])}: ({arguments[donor][0]}, {_index(arguments[donor][1])}, may-alias)"
        for output, donor in sorted(paired.items())
    ]
    header = {name: attr for name, attr in module.header.items() if name != "buffer_donor"}
    header["input_output_alias"] = attribute("input_output_alias", f"{{ {', '.join(lines)} }}")
    return Module(module.name, header, module.computations, module.entry, module.tables)


def _paths(shape: Shape) -> Iterator[tuple[int, ...]]:
    """Paths of the array leaves, in order."""
    if isinstance(shape, TupleShape):
        for number, element in enumerate(shape.elements):
            yield from ((number, *path) for path in _paths(element))
    elif shape.leaves:
        yield ()


def _index(path: tuple[int, ...]) -> str:
    return f"{{{', '.join(map(str, path))}}}"
