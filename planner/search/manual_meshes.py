"""Meshes for programs with manual regions: each of their axes in its size, other devices on free axes.

A region's local shapes and groups of devices are made for its mesh, so that its manual axes cannot change their size.
They keep their order; axes that are not manual may have any sizes that fill the cluster, and lie anywhere between.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import combinations
from math import prod

from shardwright.clusters.cluster import Cluster
from shardwright.errors import OptionError, UnsupportedProgramError
from shardwright.options.plan_options import MAX_MESH_AXES
from shardwright.options.user_options import DEFAULT_AXES
from shardwright.planner.graph.manual_regions import Inside
from shardwright.planner.graph.program_mesh import ProgramMesh, axes_of_part, common_mesh, parts_of_mesh
from shardwright.planner.rules import match_axis
from shardwright.plans.shardings import Mesh, MeshAxis


def check_manual_axes(mesh: Mesh, inside: Inside) -> None:
    """Raises OptionError where a mesh of the user's has no axes for some manual axis of the program."""
    for sizes in inside.meshes:
        own = [axis for axis in sizes.items() if axis in inside.manual_axes]
        matches = {axis: match_axis(mesh, axis) for axis in own}
        used = [name for match in matches.values() for name in match or ()]
        missing = [axis for axis, match in matches.items() if match is None]
        if missing or len(set(used)) < len(used):
            name, size = missing[0] if missing else own[0]
            raise OptionError(
                f"mesh {mesh} has no axis for {name}={size}, over which a region (shard_map) of the program is manual",
                where="mesh",
                remedy=f"name one {name!r} of {size} devices beside the others, or leave mesh out",
            )


def manual_meshes(cluster: Cluster, inside: Inside, *, is_vast: bool = False) -> tuple[Mesh, ...]:
    """Meshes over all devices of the cluster with the manual axes of a program, in some order of all axes; on a vast
    one few, for each takes long there: with one free axis, or with two of which the second is as large as a node.

    Raises UnsupportedProgramError where there is none, with the numbers of devices for which there are.
    """
    own = _common(inside)
    manual = {name: size for name, size in _manual_parts(own, inside).items() if size > 1}
    count, devices = prod(manual.values()), cluster.device_count
    if devices % count:
        axes = " × ".join(f"{name}={size}" for name, size in manual.items())
        raise UnsupportedProgramError(
            f"a region of the program (shard_map) is manual over {axes}: it is written for {count} devices or a "
            f"multiple, and the cluster has {devices}",
            where="mesh of the region",
            remedy=f"plan for {count}, {2 * count} or {3 * count} devices, or lower the program with another mesh",
        )
    names = [name for name, size in own.sizes.items() if size > 1 and name not in manual]
    free, per_node = devices // count, cluster.workers[0].device_count
    splits = [*_free_sizes(free, max(MAX_MESH_AXES - len(manual), 1))]
    if is_vast:
        splits = [sizes for sizes in splits if len(sizes) < 2 or sizes == (free // per_node, per_node)]
    return tuple(mesh for sizes in splits for mesh in _interleave(manual, _named(sizes, names, manual)))


def _common(inside: Inside) -> ProgramMesh:
    """The mesh in whose axes those of all regions can be said."""
    meshes = inside.meshes
    counts = {prod(sizes.values()) for sizes in meshes}
    own = ProgramMesh(sizes=meshes[0]) if len(meshes) == 1 else None
    if own is None and len(counts) == 1:
        own = common_mesh(counts.pop(), meshes, ())
    if own is None:
        described = ", ".join(" × ".join(f"{name}={size}" for name, size in sizes.items()) for sizes in meshes)
        raise UnsupportedProgramError(
            f"regions of the program (shard_map) have meshes that do not go together: {described}",
            where="meshes of the regions",
            remedy="give them one mesh, or meshes that split the same devices in the same order",
        )
    return own


def _manual_parts(own: ProgramMesh, inside: Inside) -> Mapping[str, int]:
    """The axes of the common mesh that manual axes are made of, in its order."""
    manual = [
        part
        for sizes in inside.meshes
        for part in parts_of_mesh(sizes)
        if part.size > 1 and (part.axis, part.size) in inside.manual_axes
    ]
    inner = {axis.axis for part in manual for axis in axes_of_part(own, part)}
    return {name: size for name, size in own.sizes.items() if name in inner}


def _free_sizes(devices: int, most: int) -> Iterator[tuple[int, ...]]:
    """Ordered factorizations of the devices that manual axes leave, into at most so many axes; none for one device."""
    if devices == 1:
        yield ()
        return
    yield (devices,)
    if most > 1:
        for first in range(2, devices):
            if devices % first == 0:
                yield from ((first, *rest) for rest in _free_sizes(devices // first, most - 1))


def _named(sizes: Sequence[int], names: Sequence[str], manual: Collection[str]) -> list[MeshAxis]:
    """Free axes by the names that the program's mesh has for such, then by default ones."""
    defaults = (*DEFAULT_AXES, *(f"axis{i}" for i in range(len(sizes) + len(manual))))
    others = (name for name in defaults if name not in names and name not in manual)
    free = [*names[: len(sizes)]]
    free += [next(others) for _ in range(len(sizes) - len(free))]
    return [MeshAxis(name=name, size=size) for name, size in zip(free, sizes, strict=True)]


def _interleave(manual: Mapping[str, int], free: Sequence[MeshAxis]) -> Iterator[Mesh]:
    """Meshes of manual and free axes, each in their order, with the free ones in every place; first those at the
    front."""
    fixed = [MeshAxis(name=name, size=size) for name, size in manual.items()]
    for places in combinations(range(len(fixed) + len(free)), len(free)):
        rest, own = iter(free), iter(fixed)
        yield Mesh(axes=tuple(next(rest if at in places else own) for at in range(len(fixed) + len(free))))
