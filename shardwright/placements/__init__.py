"""Placements: what a program says of the memory in which a value lies, the device's own or its host's.

`call` reads and writes the custom call by which JAX says so; `find_host_values` follows it through a module, and
`mark_host_values` writes the answer on the shapes, as XLA does: `f32[8]{0:S(5)}` lies on the host. Everything behind
that asks `ArrayShape.is_on_host`.
"""

from shardwright.placements.call import DEVICE, HOST, HOST_KINDS, Placement, place, read_placement
from shardwright.placements.compute import COMPUTE_ATTRIBUTE, check_compute_types, computes_on_host
from shardwright.placements.values import (
    HostValues,
    drop_torn_aliases,
    fetch_arguments,
    find_host_values,
    mark_host_values,
    place_results,
    read_boundary,
    says_of_memory,
    write_boundary,
)

__all__ = [
    "COMPUTE_ATTRIBUTE",
    "DEVICE",
    "HOST",
    "HOST_KINDS",
    "HostValues",
    "Placement",
    "check_compute_types",
    "computes_on_host",
    "drop_torn_aliases",
    "fetch_arguments",
    "find_host_values",
    "mark_host_values",
    "place",
    "place_results",
    "read_boundary",
    "read_placement",
    "says_of_memory",
    "write_boundary",
]
