"""Candidate meshes.

A mesh arranges the cluster's devices, numbered node by node, row-major over its axes: the last axis joins neighbors and
lies inside a node when its size divides the node's; the first crosses nodes. Candidates are all ordered factorizations
of the device count into one to three axes, with any primes; nodes may differ in size.

Two meshes are equivalent when some permutation of axes maps every set of axes to a set of equal sizes and equally
placed device groups: all a cost can depend on. The first of them is kept. (A possible difference remains: the major
axis of two axes splitting one dimension.) On one node of 8 devices, `2x4` and `4x2` are equivalent; on two nodes of 4
they are not.

A mesh can express every plan of the coarser meshes that join its neighboring axes (`refines`): its lower bound holds on
the coarser mesh, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from itertools import combinations, permutations
from math import prod

from shardwright.clusters.cluster import Cluster
from shardwright.cost.moves.device_groups import device_groups
from shardwright.errors import OptionError
from shardwright.options.plan_options import MAX_MESH_AXES, PlanOptions
from shardwright.options.user_options import DEFAULT_AXES
from shardwright.planner.constraints.mesh_unification import common_program_meshes
from shardwright.planner.constraints.pins import Requirements, axes_in_pins, axis_orders, program_meshes
from shardwright.planner.graph.manual_regions import Inside
from shardwright.planner.graph.program_mesh import order_axes
from shardwright.planner.limits import SearchLimits
from shardwright.planner.search.manual_meshes import manual_meshes
from shardwright.plans.shardings import Mesh, MeshAxis

#: Placement of a set of axes: per device group, its number of members on each node.
_Footprint = tuple[tuple[int, ...], ...]


def mesh_from_options(options: PlanOptions, device_count: int) -> Mesh | None:
    """The mesh of the options; None: search. OptionError when it does not fit the cluster."""
    if options.mesh is None:
        return None
    if not 1 <= len(options.mesh) <= MAX_MESH_AXES:
        raise OptionError(f"mesh has {len(options.mesh)} axes", where="mesh", remedy="give one to three axes")
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


def meshes_to_search(
    cluster: Cluster, options: PlanOptions, requirements: Requirements, inside: Inside | None = None
) -> tuple[Mesh, ...]:
    """The meshes to search: the given one, the program's own, or candidates with the axes named by pins.

    The program's own mesh (of its sharding constraints, or required by their tiles when axes are unnamed) is taken when
    its device count equals the cluster's. Otherwise: the first group of candidates with its axes in other sizes
    (`scale_program_mesh`). Without either, a forced strategy over all axes gets one axis, a mixed one two or more,
    expert parallelism one or two. Where the program has manual regions (`inside`), all have their axes.

    Raises OptionError when the given mesh does not fit, or no mesh can, and like `manual_meshes`.
    """
    given = mesh_from_options(options, cluster.device_count)
    if inside is not None and inside.places:
        is_vast = options.effort != "best" and cluster.device_count >= SearchLimits().huge_device_count
        return (given,) if given is not None else _meshes_of_regions(cluster, inside, requirements, is_vast=is_vast)
    if given is not None:
        return (given,)
    names = axes_in_pins(requirements)
    own = _program_mesh(requirements, names, cluster.device_count)
    if own is not None:
        return (own,)
    scaled = scale_program_mesh(cluster, requirements)[0]
    force = "data" if options.rest == "data" else options.force
    if not isinstance(force, str):
        return scaled
    forced = _meshes_for_force(cluster, force, names)
    return (
        tuple(
            mesh
            for mesh in forced
            if not any(program_mesh.axes_without_match(mesh) for program_mesh in common_program_meshes(requirements))
        )
        or scaled
    )


def _meshes_of_regions(
    cluster: Cluster, inside: Inside, requirements: Requirements, *, is_vast: bool
) -> tuple[Mesh, ...]:
    """Inequivalent meshes with the axes of the program's manual regions; if there are such, those with its other axes
    in use as well."""
    nodes = _node_of_devices(cluster)
    names = [name for sizes in inside.meshes for name in sizes]
    unique_meshes: dict[object, Mesh] = {}
    for mesh in manual_meshes(cluster, inside, is_vast=is_vast):
        unique_meshes.setdefault(_signature(mesh, nodes, names), mesh)
    meshes = tuple(unique_meshes.values())
    own = common_program_meshes(requirements)
    return tuple(mesh for mesh in meshes if not any(used.axes_without_match(mesh) for used in own)) or meshes


def _meshes_for_force(cluster: Cluster, force: str, names: tuple[str, ...]) -> tuple[Mesh, ...]:
    """Meshes of a forced strategy, with axis roles assigned by position."""
    if force in ("mixed", "megatron"):
        meshes = candidate_meshes(cluster, names=names, is_ordered=True)
        forced_meshes = tuple(mesh for mesh in meshes if sum(axis.size > 1 for axis in mesh.axes) > 1)
        if not forced_meshes:
            raise OptionError(
                f"{cluster.device_count} devices have no two factors for a {force} strategy",
                where="force",
                remedy="take a strategy over all devices (data, tensor, zero1, fsdp), or another number of devices",
            )
        return forced_meshes
    if force == "expert":
        return candidate_meshes(cluster, names=names, max_axes=max(2, len(names)), is_ordered=True)
    if force == "tensor":
        names = names or DEFAULT_AXES[1:2]
    return candidate_meshes(cluster, names=names, max_axes=max(1, len(names)), is_ordered=True)


def _program_mesh(requirements: Requirements, names: Sequence[str], device_count: int) -> Mesh | None:
    """The program's own mesh, when the device count matches and pins name no other axes."""
    for sizes in program_meshes(requirements):
        real = {name: size for name, size in sizes.items() if size > 1}
        if prod(sizes.values()) != device_count or len(real) > MAX_MESH_AXES or not set(names) <= set(sizes):
            continue
        if all(name.isidentifier() for name in real) and real:
            return Mesh.of({name: real[name] for name in order_axes(tuple(real), axis_orders(requirements))})
    return None


def scale_program_mesh(cluster: Cluster, requirements: Requirements) -> list[tuple[Mesh, ...]]:
    """Groups of meshes with all pinned axes and the axes split by the program's own shardings, the more promising
    first; a group without any plan is followed by the next.

    First: meshes with every program axis in a multiple of its size. Then: meshes of two axes, leaving a third axis to
    dimensions with fewer divisors. When the program has more axes than a mesh, some split nothing, preferably followers
    of another axis.
    """
    used = (
        (program_mesh, name) for program_mesh in common_program_meshes(requirements) for name in program_mesh.split_axes
    )
    own = {name: program_mesh.sizes[name] for program_mesh, name in used if name.isidentifier()}
    given, orders = axes_in_pins(requirements), axis_orders(requirements)
    return list(_scale_axes(cluster, tuple(own.items()), given, frozenset(orders)))


@lru_cache(maxsize=4)
def _scale_axes(
    cluster: Cluster, axes: tuple[tuple[str, int], ...], common: tuple[str, ...], orders: frozenset[tuple[str, ...]]
) -> list[tuple[Mesh, ...]]:
    """`scale_program_mesh` on plain values.

    axes: (name, size) of the program's axes.
    common: further axes of every mesh.
    orders: axes splitting a dimension together.
    """
    own, nodes = dict(axes), _node_of_devices(cluster)
    if not own:
        return [candidate_meshes(cluster, names=common)]
    groups: dict[tuple[int, bool, bool], dict[object, Mesh]] = {}
    order = [name for name in order_axes(tuple(own), orders) if name not in common]
    for kept_axes in combinations(order, min(len(order), max(MAX_MESH_AXES - len(common), 0))):
        for mesh in candidate_meshes(cluster, names=(*common, *kept_axes), is_ordered=True):
            if tuple(axis.name for axis in mesh.axes if axis.name in kept_axes) != kept_axes:
                continue
            lost = sum(mesh.sizes.get(name, 1) == 1 and not _follows(name, orders) for name in order)
            shrinks = any(mesh.sizes[name] % own[name] for name in kept_axes)
            key = (lost, shrinks, len(mesh.axes) > max(2, len(common) + len(kept_axes)))
            groups.setdefault(key, {}).setdefault(_signature(mesh, nodes, (*common, *kept_axes)), mesh)
    return [tuple(groups[key].values()) for key in sorted(groups)]


def _follows(name: str, orders: Collection[tuple[str, ...]]) -> bool:
    """Whether an axis only splits dimensions already split by an earlier axis."""
    return bool(orders) and all(order.index(name) > 0 for order in orders if name in order)


def candidate_meshes(
    cluster: Cluster, *, max_axes: int = MAX_MESH_AXES, names: Sequence[str] = (), is_ordered: bool = False
) -> tuple[Mesh, ...]:
    """Meshes over all devices of the cluster, pairwise inequivalent, the more promising first.

    names: axes of every mesh, in any position. With too few factors in the device count, some have size 1.
    is_ordered: axes have roles by position: no permutation leaves the problem unchanged.

    Order: fewer axes, then axes wholly inside or wholly across nodes, then larger first axes. Raises OptionError with
    more `names` than `max_axes`.
    """
    if len(names) > max_axes:
        raise OptionError(
            f"axes {', '.join(names)} are named, a mesh has at most {max_axes}", where="mesh", remedy="name fewer axes"
        )
    nodes = _node_of_devices(cluster)
    meshes = [mesh for sizes in _all_sizes(len(nodes), max_axes, len(names)) for mesh in _name_axes(sizes, names)]
    meshes.sort(key=lambda mesh: _sort_key(mesh, nodes))
    unique_meshes: dict[object, Mesh] = {}
    for mesh in meshes:
        unique_meshes.setdefault(mesh if is_ordered else _signature(mesh, nodes, names), mesh)
    return tuple(unique_meshes.values())


def refines(fine: Mesh, coarse: Mesh) -> bool:
    """Whether joining neighboring axes of `fine` gives `coarse`, names aside."""
    parts = iter(axis.size for axis in fine.axes)
    for axis in coarse.axes:
        size = 1
        while size < axis.size:
            size *= next(parts, axis.size + 1)
        if size != axis.size:
            return False
    return all(size == 1 for size in parts)


def _node_of_devices(cluster: Cluster) -> list[int]:
    return [number for number, node in enumerate(cluster.workers) for _ in range(node.device_count)]


def _all_sizes(devices: int, max_axes: int, min_axes: int) -> list[tuple[int, ...]]:
    """Axis sizes of each factorization; axes of size 1 only in the absence of others with `min_axes` axes."""
    min_axes = max(min_axes, 1)
    factorizations = [sizes for count in range(min_axes, max_axes + 1) for sizes in _factorizations(devices, count)]
    if factorizations:
        return factorizations
    fewest = [sizes for count in range(1, min_axes) for sizes in _factorizations(devices, count)] or [()]
    return sorted({places for sizes in fewest for places in permutations((*sizes, *(1,) * (min_axes - len(sizes))))})


def _factorizations(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Ordered factorizations into `count` factors of at least 2."""
    if count == 1:
        if number > 1:
            yield (number,)
        return
    for first in range(2, number):
        if number % first == 0:
            for rest in _factorizations(number // first, count - 1):
                yield (first, *rest)


def _name_axes(sizes: tuple[int, ...], names: Sequence[str]) -> Iterator[Mesh]:
    """Meshes of these sizes with `names` in every possible position, default names elsewhere."""
    for places in permutations(range(len(sizes)), len(names)):
        by_place = dict(zip(places, names, strict=True))
        others = (name for name in (*DEFAULT_AXES, *(f"axis{i}" for i in range(len(sizes)))) if name not in names)
        yield Mesh(
            axes=tuple(
                MeshAxis(name=by_place[place] if place in by_place else next(others), size=size)
                for place, size in enumerate(sizes)
            )
        )


def _sort_key(mesh: Mesh, nodes: Sequence[int]) -> tuple[object, ...]:
    straddling = sum(_straddles(_footprint(mesh, (axis.name,), nodes)) for axis in mesh.axes)
    return (sum(axis.size > 1 for axis in mesh.axes), straddling, *(-axis.size for axis in mesh.axes))


def _straddles(footprint: _Footprint) -> bool:
    """Whether some group has several devices on one node and others elsewhere."""
    return any(len(members) > 1 and max(members) > 1 for members in footprint)


def _footprint(mesh: Mesh, axes: tuple[str, ...], nodes: Sequence[int]) -> _Footprint:
    members_by_group = []
    for group in device_groups(axes, mesh):
        on_nodes = [nodes[device] for device in group]
        members_by_group.append(tuple(sorted(on_nodes.count(node) for node in set(on_nodes))))
    return tuple(sorted(members_by_group))


def _signature(mesh: Mesh, nodes: Sequence[int], names: Sequence[str]) -> object:
    """Equal on meshes equivalent up to a permutation of the axes outside `names`."""
    every = range(len(mesh.axes))
    footprints = {
        places: _footprint(mesh, tuple(mesh.axes[place].name for place in places), nodes)
        for count in range(1, len(mesh.axes) + 1)
        for places in combinations(every, count)
    }

    def signature_in(order: tuple[int, ...]) -> tuple[object, ...]:
        axes = [mesh.axes[place] for place in order]
        labels = tuple((axis.size, axis.name if axis.name in names else "") for axis in axes)
        return labels, tuple(footprints[tuple(sorted(order[i] for i in places))] for places in footprints)

    return min((signature_in(order) for order in permutations(every)), key=repr)
