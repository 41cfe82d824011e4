"""Unifies the meshes of imported shardings: all over one program mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardwright.planner.constraints.pins import Requirements
from shardwright.planner.graph.imported_shardings import ImportedSharding
from shardwright.planner.graph.program_mesh import ProgramMesh, common_mesh, order_axes
from shardwright.plans.shardings import Mesh


def unify_meshes(requirements: Requirements) -> Requirements:
    """The same requirements, with the program's shardings over one mesh per device count.

    Unchanged: those with irregular tiles.
    """
    counts = {sharding.device_count for sharding in _imported(requirements) if sharding.device_count}
    meshes = {count: _common(requirements, count) for count in sorted(counts)}

    def move(foreign: ImportedSharding | None) -> ImportedSharding | None:
        own = meshes.get(foreign.device_count) if foreign is not None else None
        return foreign.over(own) if foreign is not None and own is not None and _has_place(foreign, own) else foreign

    return {
        node: [replace(requirement, imported=move(requirement.imported)) for requirement in node_requirements]
        for node, node_requirements in requirements.items()
    }


def common_program_meshes(requirements: Requirements) -> tuple[ProgramMesh, ...]:
    """The program's own meshes with axes named in pins, after `unify_meshes`."""
    meshes = [
        sharding.program_mesh
        for sharding in _imported(requirements)
        if sharding.program_mesh is not None and sharding.program_mesh.split_axes
    ]
    return tuple(own for number, own in enumerate(meshes) if own not in meshes[:number])


def scaling_notes(requirements: Requirements, mesh: Mesh) -> list[str]:
    """Notes on the program's own axes on `mesh`, when written at another device count."""
    notes = []
    for own in common_program_meshes(requirements):
        matches = own.on(mesh)
        is_as_written = own.device_count == mesh.device_count and not own.axes_without_match(mesh)
        if is_as_written or mesh.device_count == 1:
            continue
        axes = ", ".join(f"{name} ({own.sizes[name]}) as {_axes(matches[name], mesh)}" for name in own.split_axes)
        notes.append(f"the program's own mesh {own} has {own.device_count} devices: taken are {axes}")
    return notes


def _axes(names: tuple[str, ...], mesh: Mesh) -> str:
    return " × ".join(f"{name}={mesh.sizes[name]}" for name in names) or "not split"


def _common(requirements: Requirements, device_count: int) -> ProgramMesh | None:
    shardings = [s for s in _imported(requirements) if s.device_count == device_count]
    meshes = {tuple(s.sizes.items()): s.sizes for s in shardings if s.sizes and s.parts}
    parts = [part for s in shardings for part in s.parts if part.stride is not None]
    own = common_mesh(device_count, tuple(meshes.values()), parts)
    if own is None and meshes:
        own = ProgramMesh(sizes=next(iter(meshes.values())))
    return replace(own, split_axes=_used(shardings, own)) if own is not None else None


def _used(shardings: Sequence[ImportedSharding], own: ProgramMesh) -> tuple[str, ...]:
    """Axes that split something."""
    moved = [sharding.over(own) for sharding in shardings if _has_place(sharding, own)]
    orders = {tuple(part.axis for part in dim.parts) for sharding in moved for dim in sharding.dims.values()}
    split = {axis for order in orders for axis in order}
    return order_axes([name for name, size in own.sizes.items() if name in split and size > 1], orders)


def _has_place(foreign: ImportedSharding, own: ProgramMesh) -> bool:
    """Whether `own` has axes covering all parts of a sharding."""
    if foreign.sizes == own.sizes:
        return True
    cuts = [1]
    for size in reversed(list(own.sizes.values())):
        cuts.append(cuts[-1] * size)
    ends = [end for part in foreign.parts for end in ((part.stride or 0), (part.stride or 0) * part.size)]
    return all(end in cuts for end in ends)


def _imported(requirements: Requirements) -> list[ImportedSharding]:
    return [r.imported for node in sorted(requirements) for r in requirements[node] if r.imported is not None]
