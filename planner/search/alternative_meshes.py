"""Alternatives when no tried mesh has a plan: other meshes, and the error's remedy."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.errors import AnnotationError, PlanError
from shardwright.planner.constraints.mesh_unification import common_program_meshes
from shardwright.planner.search.mesh_search import MeshSearch
from shardwright.planner.search.meshes import scale_program_mesh
from shardwright.planner.search.tuning import MAX_MESHES_SOLVED
from shardwright.plans.shardings import Mesh


def alternative_mesh_groups(search: MeshSearch) -> Iterator[tuple[Mesh, ...]]:
    """Groups of meshes that have the axes of the program's own mesh in other sizes."""
    options = search.options
    if options.mesh is None and options.force is None and common_program_meshes(search.program.pins):
        yield from scale_program_mesh(search.cluster, search.program.pins)


def suggest_other_mesh(search: MeshSearch, error: PlanError | AnnotationError) -> PlanError | AnnotationError:
    """The error of infeasible pins on the given mesh, with a working mesh as remedy; and with the option to ignore the
    program's own shardings, when it has any."""
    pins, options = search.program.pins, search.options
    if not isinstance(error, AnnotationError) or not any(
        requirement.imported for requirements in pins.values() for requirement in requirements
    ):
        return error
    mesh = _find_working_mesh(search) if options.mesh is not None else None
    remedies = [f"pass mesh={mesh.sizes}, on which they hold"] if mesh is not None else [error.remedy]
    remedies.append('plan without the shardings that the program brings along with constraints="ignore"')
    return type(error)(error.message, where=error.where, remedy=", or ".join(filter(None, remedies)))


def _find_working_mesh(search: MeshSearch) -> Mesh | None:
    meshes = [mesh for group in scale_program_mesh(search.cluster, search.program.pins) for mesh in group]
    for mesh in meshes[:MAX_MESHES_SOLVED]:
        if search.must_stop():
            return None
        try:
            return search.solve_mesh(mesh).mesh
        except (PlanError, AnnotationError):
            continue
    return None
