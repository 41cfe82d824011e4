"""What a plan says of optimizer state on the host."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from shardwright.cost.peak.memory import shard_bytes
from shardwright.plans.plan import OFFLOADED, VariablePlan
from shardwright.plans.shardings import Mesh
from shardwright.units import format_bytes


def note_offload(on_host: Mapping[int, int], parameters: Sequence[VariablePlan], mesh: Mesh, asked: bool) -> list[str]:
    """The note of a plan with these arguments on the host; none without any, unless the user asked for it.

    asked: whether the user did, not the search.
    """
    if not on_host:
        why = "no donated argument of 1 MiB or more is read by the update alone"
        return [f"offload='optimizer': nothing is kept on the host, for {why}"] if asked else []
    arrays = "1 array" if len(on_host) == 1 else f"{len(on_host)} arrays"
    size = format_bytes(host_bytes((parameters[number] for number in on_host), mesh))
    why = "offload='optimizer'" if asked else "nothing faster fits the devices (offload='none' keeps it there)"
    return [f"{OFFLOADED}: {arrays}, {size} a device, moved in for the update and back in every step; {why}"]


def host_bytes(variables: Iterable[VariablePlan], mesh: Mesh) -> int:
    """Bytes of one device's shards of these arrays."""
    return sum(
        shard_bytes(variable.element_type, variable.stored_shape, variable.stored_sharding, mesh)
        for variable in variables
    )
