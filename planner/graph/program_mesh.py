"""The mesh of a program's own shardings, and its match with the axes of another mesh.

A program may be planned on more or fewer devices than it was written for. Its axes keep their meaning (dimensions split
by one axis are split together, other ones stay whole) and change their size: with dp split over `dp=2 × tp=2`, `dp=4 ×
tp=2` splits the same dimensions four ways.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations
from math import prod

from shardwright.options.user_options import DEFAULT_AXES
from shardwright.plans.shardings import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePart:
    """`size` devices, `stride` apart in the device order (None: no such pattern).

    axis: its axis of the program's mesh.
    major_size: size of that axis's part more major than it.
    """

    size: int
    stride: int | None
    axis: str = ""
    major_size: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramMesh:
    """A program's own mesh: its axes, major first.

    split_axes: axes that split something. Axes splitting one dimension together follow each other in the same order
        there.
    is_named: whether the program named the axes; False: made from tiles of unnamed shardings.
    """

    sizes: Mapping[str, int]
    split_axes: tuple[str, ...] = ()
    is_named: bool = True

    @property
    def device_count(self) -> int:
        return prod(self.sizes.values())

    def on(self, mesh: Mesh) -> dict[str, tuple[str, ...]]:
        """Axes of this mesh → matching axes of `mesh`, none when nothing is left to match a used one.

        Matched in this order: axes of the same name and size; axes over the same devices; axes of the same name in
        another size; the only one of the same size; the rest, in the order of `split_axes`. Names count only when
        `is_named`.
        """
        matches: dict[str, tuple[str, ...]] = {name: () for name, size in self.sizes.items() if size == 1}
        if self.is_named:
            same = (name for name, size in self.sizes.items() if size > 1 and mesh.sizes.get(name) == size)
            matches |= {name: (name,) for name in same}
        _by_devices(self.sizes, mesh, matches)
        if self.is_named:
            _by_name(self.sizes, mesh, matches)
        _by_size(self.split_axes or tuple(self.sizes), self.sizes, mesh, matches)
        free = _free(mesh, matches)
        for name in self.split_axes:
            if name not in matches:
                matches[name] = (free.pop(0),) if free else ()
        return matches

    def axes_without_match(self, mesh: Mesh) -> tuple[str, ...]:
        """Used axes without a match in `mesh`."""
        matches = self.on(mesh)
        return tuple(name for name in self.split_axes if self.sizes[name] > 1 and mesh.size(matches[name]) == 1)

    def __str__(self) -> str:
        return " × ".join(f"{name}={size}" for name, size in self.sizes.items())


def _by_name(sizes: Mapping[str, int], mesh: Mesh, mapping: dict[str, tuple[str, ...]]) -> None:
    names_in_use = _axes_in_use(mapping)
    mapping |= {
        name: (name,) for name in sizes if name in mesh.sizes and name not in mapping and name not in names_in_use
    }


def _by_devices(sizes: Mapping[str, int], mesh: Mesh, mapping: dict[str, tuple[str, ...]]) -> None:
    if prod(sizes.values()) != mesh.device_count:
        return
    for part in parts_of_mesh(sizes):
        others = _axes_in_use(mapping) | set(sizes).difference((part.axis,))
        axes = axes_of_devices(mesh, part) if part.axis not in mapping else None
        if axes and others.isdisjoint(axes):
            mapping[part.axis] = axes


def _by_size(names: Sequence[str], sizes: Mapping[str, int], mesh: Mesh, mapping: dict[str, tuple[str, ...]]) -> None:
    unmatched, free = [name for name in names if name not in mapping], _free(mesh, mapping)
    for name in unmatched:
        same = [axis for axis in free if mesh.sizes[axis] == sizes[name]]
        if len(same) == 1 == sum(sizes[other] == sizes[name] for other in unmatched):
            mapping[name] = (same[0],)


def _axes_in_use(mapping: Mapping[str, tuple[str, ...]]) -> set[str]:
    return {axis for axes in mapping.values() for axis in axes}


def _free(mesh: Mesh, mapping: Mapping[str, tuple[str, ...]]) -> list[str]:
    in_use = _axes_in_use(mapping)
    return [axis.name for axis in mesh.axes if axis.name not in in_use and axis.size > 1]


def axes_of_devices(mesh: Mesh, part: DevicePart) -> tuple[str, ...] | None:
    """The axes of `mesh` spanning exactly the devices of `part`; None without such axes."""
    stride, size, names = mesh.device_count, 1, list[str]()
    for axis in mesh.axes:
        stride //= axis.size
        if axis.size == 1 or stride * axis.size > (part.stride or 0) * part.size:
            continue
        size *= axis.size
        names.append(axis.name)
        if size >= part.size:
            break
    return tuple(names) if size == part.size and stride == part.stride else None


def sub_axes(axes: tuple[str, ...], part: DevicePart, mesh: Mesh) -> tuple[str, ...] | None:
    """Those of `axes` equal to the sub-axis `part` of the axis they form together."""
    first = next((i for i in range(len(axes) + 1) if mesh.size(axes[:i]) == part.major_size), None)
    if first is None:
        return None
    return next(
        (axes[first:end] for end in range(first, len(axes) + 1) if mesh.size(axes[first:end]) == part.size), None
    )


def parts_of_mesh(sizes: Mapping[str, int]) -> list[DevicePart]:
    """The axes of a mesh as parts of the device order."""
    stride, parts = prod(sizes.values()), []
    for name, size in sizes.items():
        stride //= size
        parts.append(DevicePart(size=size, stride=stride, axis=name))
    return parts


# ---- several meshes as one ----------------------------------------------------------


def common_mesh(
    device_count: int, meshes: Sequence[Mapping[str, int]], parts: Sequence[DevicePart]
) -> ProgramMesh | None:
    """The coarsest mesh in which axes of `meshes` and `parts` are runs of axes; None without one.

    An axis equal to one of `meshes` keeps its name.
    """
    axes = [part for sizes in meshes for part in parts_of_mesh(sizes) if part.size > 1]
    all_parts = [*axes, *parts]
    if len(meshes) == 1 and all(part.axis for part in parts):
        return ProgramMesh(sizes=meshes[0])
    if not all_parts or any(part.stride is None for part in all_parts):
        return None
    cuts = sorted({1, device_count, *(end for part in all_parts for end in _ends(part))}, reverse=True)
    if any(larger % smaller for larger, smaller in pairwise(cuts)):
        return None
    sizes: dict[str, int] = {}
    for end, stride in pairwise(cuts):
        sizes[_name(axes, stride, end, sizes)] = end // stride
    return ProgramMesh(sizes=sizes, is_named=bool(axes))


def _ends(part: DevicePart) -> tuple[int, int]:
    assert part.stride is not None
    return part.stride, part.stride * part.size


def _name(axes: Sequence[DevicePart], stride: int, end: int, names_in_use: Mapping[str, int]) -> str:
    """The name of the devices from `stride` apart to `end`: an axis's, one derived from the axis around them, or a
    default."""
    same = [axis.axis for axis in axes if _ends(axis) == (stride, end)]
    around = [axis.axis for axis in axes if axis.stride is not None and axis.stride <= stride and end <= _ends(axis)[1]]
    parts = (f"{name}_{number}" for name in around[:1] for number in range(len(names_in_use) + 2))
    others = (f"axis{number}" for number in range(len(names_in_use) + 1))
    return next(name for name in (*same, *parts, *DEFAULT_AXES, *others) if name not in names_in_use)


def order_axes(names: Sequence[str], orders: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """`names` in the order nearest to their own that satisfies each of `orders`, major first; unchanged without one."""
    for order_found in permutations(names):
        places = [[order_found.index(name) for name in order if name in order_found] for order in orders]
        if all(ranks == sorted(ranks) for ranks in places):
            return order_found
    return tuple(names)


def axes_of_part(own: ProgramMesh, part: DevicePart) -> tuple[DevicePart, ...]:
    """The axes of `own` inside `part`, major first."""
    first, last = _ends(part)
    axes = [axis for axis in parts_of_mesh(own.sizes) if axis.size > 1]
    return tuple(axis for axis in axes if first <= _ends(axis)[0] and _ends(axis)[1] <= last)
