"""The shardings that a program brings along, all over one mesh: its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardwright.planner.constraints.pins import Requirements
from shardwright.planner.graph.imported_shardings import ImportedSharding
from shardwright.planner.graph.program_mesh import ProgramMesh, common_mesh, order_axes
from shardwright.shardings import Mesh


def unify_meshes(requirements: Requirements) -> Requirements:
    """The same requirements with the program's shardings over one mesh for each number of devices that they are for.

    Left as they are: those whose tiles are in no such pattern.
    """
    counts = {each.device_count for each in _imported(requirements) if each.device_count}
    meshes = {count: _common(requirements, count) for count in sorted(counts)}

    def move(foreign: ImportedSharding | None) -> ImportedSharding | None:
        own = meshes.get(foreign.device_count) if foreign is not None else None
        return foreign.over(own) if foreign is not None and own is not None and _has_place(foreign, own) else foreign

    return {
        node: [replace(each, imported=move(each.imported)) for each in found] for node, found in requirements.items()
    }


def common_program_meshes(requirements: Requirements) -> tuple[ProgramMesh, ...]:
    """The program's own meshes whose axes pins name, after `unify_meshes`."""
    found = [
        each.program_mesh
        for each in _imported(requirements)
        if each.program_mesh is not None and each.program_mesh.split_axes
    ]
    return tuple(own for number, own in enumerate(found) if own not in found[:number])


def scaling_notes(requirements: Requirements, mesh: Mesh) -> list[str]:
    """What becomes on `mesh` of the program's own axes, where it was written for another number of devices."""
    notes = []
    for own in common_program_meshes(requirements):
        known = own.on(mesh)
        is_as_written = own.device_count == mesh.device_count and not own.axes_without_match(mesh)
        if is_as_written or mesh.device_count == 1:
            continue
        axes = ", ".join(f"{name} ({own.sizes[name]}) as {_axes(known[name], mesh)}" for name in own.split_axes)
        notes.append(f"the program's own mesh {own} has {own.device_count} devices: taken are {axes}")
    return notes


def _axes(names: tuple[str, ...], mesh: Mesh) -> str:
    return " × ".join(f"{name}={mesh.sizes[name]}" for name in names) or "not split"


def _common(requirements: Requirements, device_count: int) -> ProgramMesh | None:
    alike = [each for each in _imported(requirements) if each.device_count == device_count]
    meshes = {tuple(each.sizes.items()): each.sizes for each in alike if each.sizes and each.parts}
    parts = [part for each in alike for part in each.parts if part.stride is not None]
    own = common_mesh(device_count, tuple(meshes.values()), parts)
    if own is None and meshes:
        own = ProgramMesh(sizes=next(iter(meshes.values())))
    return replace(own, split_axes=_used(alike, own)) if own is not None else None


def _used(shardings: Sequence[ImportedSharding], own: ProgramMesh) -> tuple[str, ...]:
    """Axes that split something."""
    moved = [each.over(own) for each in shardings if _has_place(each, own)]
    orders = {tuple(part.axis for part in dim.parts) for each in moved for dim in each.dims.values()}
    split = {axis for order in orders for axis in order}
    return order_axes([name for name, size in own.sizes.items() if name in split and size > 1], orders)


def _has_place(foreign: ImportedSharding, own: ProgramMesh) -> bool:
    """Whether `own` has axes for all that a sharding speaks of."""
    if foreign.sizes == own.sizes:
        return True
    cuts = [1]
    for size in reversed(list(own.sizes.values())):
        cuts.append(cuts[-1] * size)
    ends = [end for part in foreign.parts for end in ((part.stride or 0), (part.stride or 0) * part.size)]
    return all(end in cuts for end in ends)


def _imported(requirements: Requirements) -> list[ImportedSharding]:
    return [each.imported for node in sorted(requirements) for each in requirements[node] if each.imported is not None]
