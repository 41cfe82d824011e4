"""Pairs donated arguments with outputs when the header does not, by the rules of `shardwright.hlo.donation`."""

from __future__ import annotations

from shardwright.hlo import Module
from shardwright.hlo.donation import pair_donors
from shardwright.hlo.entry import argument_paths, flat_aliases, format_aliases
from shardwright.planner.rewrites.edit import attribute


def alias_donors(module: Module) -> Module:
    """`module` with its `buffer_donor` arguments aliased to outputs of the same type; the rest share no memory.
    `module` itself when none is paired."""
    if not module.donors:
        return module
    arguments = argument_paths(module)
    leaves = [leaf for parameter in module.entry.parameters for leaf in parameter.shape.leaves]
    given = {(donor.parameter_number, donor.parameter_index) for donor in module.donors}
    donors = [number for number, argument in enumerate(arguments) if argument in given]  # a tuple's own table is none
    aliases = flat_aliases(module)
    paired = pair_donors(
        donors,
        [(leaf.element_type, leaf.dimensions) for leaf in leaves],
        [(leaf.element_type, leaf.dimensions) for leaf in module.entry.root.shape.leaves],
        aliases,
    )
    if not paired:
        return module
    header = {name: attr for name, attr in module.header.items() if name != "buffer_donor"}
    header["input_output_alias"] = attribute("input_output_alias", format_aliases(module, aliases | paired))
    return Module(module.name, header, module.computations, module.entry, module.tables)
