"""Which meshes to try."""

from __future__ import annotations

from shardwright.config import PlanOptions
from shardwright.errors import OptionError
from shardwright.plans import Mesh

AXIS_NAMES = ("data", "model")

#: Most axes that this version plans over.
MAX_AXES = 2


def given_mesh(options: PlanOptions, device_count: int) -> Mesh | None:
    """The mesh of the options; OptionError where it does not fit the cluster. None: search."""
    if options.mesh is None:
        return None
    if not 1 <= len(options.mesh) <= MAX_AXES:
        raise OptionError(f"mesh has {len(options.mesh)} axes", where="mesh", remedy="give one or two axes")
    for name, size in options.mesh.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise OptionError(f"axis {name!r} has size {size!r}", where="mesh", remedy="sizes are integers from 1")
        if not name.isidentifier():
            raise OptionError(f"axis name {name!r} is not an identifier", where="mesh")
    mesh = Mesh.of(options.mesh)
    if mesh.device_count != device_count:
        raise OptionError(
            f"mesh {mesh} has {mesh.device_count} devices, the cluster {device_count}",
            where="mesh",
            remedy=f"choose sizes whose product is {device_count}",
        )
    return mesh


def all_meshes(device_count: int) -> tuple[Mesh, ...]:
    """Every factorization of the devices into one or two axes; `data` is the major one."""
    first, second = AXIS_NAMES
    splits = [size for size in range(2, device_count) if device_count % size == 0]
    return (
        Mesh.of({first: device_count}),
        *(Mesh.of({first: device_count // size, second: size}) for size in splits),
    )
