"""The shardings that a program brings along, all over one mesh: its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardwright.planner.graph.foreign import ForeignSharding
from shardwright.planner.graph.own_mesh import OwnMesh, common_mesh, ordered
from shardwright.planner.pins.pins import Requirements
from shardwright.shardings import Mesh


def on_one_mesh(requirements: Requirements) -> Requirements:
    """The same requirements with the program's shardings over one mesh for each number of devices that they are for.

    Left as they are: those whose tiles are in no such pattern.
    """
    counts = {each.device_count for each in _foreign(requirements) if each.device_count}
    meshes = {count: _common(requirements, count) for count in sorted(counts)}

    def moved(foreign: ForeignSharding | None) -> ForeignSharding | None:
        own = meshes.get(foreign.device_count) if foreign is not None else None
        return foreign.over(own) if foreign is not None and own is not None and _has_place(foreign, own) else foreign

    return {
        node: [replace(each, foreign=moved(each.foreign)) for each in found] for node, found in requirements.items()
    }


def own_meshes(requirements: Requirements) -> tuple[OwnMesh, ...]:
    """The program's own meshes whose axes pins name, after `on_one_mesh`."""
    found = [each.own for each in _foreign(requirements) if each.own is not None and each.own.used]
    return tuple(own for number, own in enumerate(found) if own not in found[:number])


def scaling_notes(requirements: Requirements, mesh: Mesh) -> list[str]:
    """What becomes on `mesh` of the program's own axes, where it was written for another number of devices."""
    notes = []
    for own in own_meshes(requirements):
        known = own.on(mesh)
        is_as_written = own.device_count == mesh.device_count and not own.unsplit(mesh)
        if is_as_written or mesh.device_count == 1:
            continue
        axes = ", ".join(f"{name} ({own.sizes[name]}) as {_axes(known[name], mesh)}" for name in own.used)
        notes.append(f"the program's own mesh {own} has {own.device_count} devices: taken are {axes}")
    return notes


def _axes(names: tuple[str, ...], mesh: Mesh) -> str:
    return " × ".join(f"{name}={mesh.sizes[name]}" for name in names) or "not split"


def _common(requirements: Requirements, device_count: int) -> OwnMesh | None:
    alike = [each for each in _foreign(requirements) if each.device_count == device_count]
    meshes = {tuple(each.sizes.items()): each.sizes for each in alike if each.sizes and each.parts}
    parts = [part for each in alike for part in each.parts if part.stride is not None]
    own = common_mesh(device_count, tuple(meshes.values()), parts)
    if own is None and meshes:
        own = OwnMesh(sizes=next(iter(meshes.values())))
    return replace(own, used=_used(alike, own)) if own is not None else None


def _used(shardings: Sequence[ForeignSharding], own: OwnMesh) -> tuple[str, ...]:
    """Axes that split something."""
    moved = [each.over(own) for each in shardings if _has_place(each, own)]
    orders = {tuple(part.axis for part in dim.parts) for each in moved for dim in each.dims.values()}
    split = {axis for order in orders for axis in order}
    return ordered([name for name, size in own.sizes.items() if name in split and size > 1], orders)


def _has_place(foreign: ForeignSharding, own: OwnMesh) -> bool:
    """Whether `own` has axes for all that a sharding speaks of."""
    if foreign.sizes == own.sizes:
        return True
    cuts = [1]
    for size in reversed(list(own.sizes.values())):
        cuts.append(cuts[-1] * size)
    ends = [end for part in foreign.parts for end in ((part.stride or 0), (part.stride or 0) * part.size)]
    return all(end in cuts for end in ends)


def _foreign(requirements: Requirements) -> list[ForeignSharding]:
    return [each.foreign for node in sorted(requirements) for each in requirements[node] if each.foreign is not None]
