"""The mesh that a program's own shardings speak of, and which axes of another mesh stand for its axes.

A program may have been written for fewer devices than it is planned on, or for more. Its axes keep their meaning
(dimensions that one axis splits are split together, other ones are whole) and change their size: on `dp=4 × tp=2` what
`dp=2 × tp=2` splits over dp is split four ways.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations
from math import prod

from shardwright.options import DEFAULT_AXES
from shardwright.shardings import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePart:
    """`size` devices that lie `stride` apart in the device order (None: in no such pattern).

    axis / before: the axis of the program's mesh that it is of, and what of that axis is more major than it.
    """

    size: int
    stride: int | None
    axis: str = ""
    major_size: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramMesh:
    """A program's own mesh: its axes, major first.

    used: those that split something, in an order in which all that split one dimension follow each other as they do
    there. is_named: by the program, not for the tiles of shardings that name none.
    """

    sizes: Mapping[str, int]
    split_axes: tuple[str, ...] = ()
    is_named: bool = True

    @property
    def device_count(self) -> int:
        return prod(self.sizes.values())

    def on(self, mesh: Mesh) -> dict[str, tuple[str, ...]]:
        """Axes of this mesh → the axes of `mesh` that stand for them, none where nothing is left for a used one.

        Taken are axes of the same name and size, then those that join the same devices, then those of the same name in
        another size, then the only one of the same size, then what is left, in the order of `used`. Names count where
        they are the program's.
        """
        found: dict[str, tuple[str, ...]] = {name: () for name, size in self.sizes.items() if size == 1}
        if self.is_named:
            same = (name for name, size in self.sizes.items() if size > 1 and mesh.sizes.get(name) == size)
            found |= {name: (name,) for name in same}
        _by_devices(self.sizes, mesh, found)
        if self.is_named:
            _by_name(self.sizes, mesh, found)
        _by_size(self.split_axes or tuple(self.sizes), self.sizes, mesh, found)
        free = _free(mesh, found)
        for name in self.split_axes:
            if name not in found:
                found[name] = (free.pop(0),) if free else ()
        return found

    def axes_without_match(self, mesh: Mesh) -> tuple[str, ...]:
        """Used axes that nothing of `mesh` stands for."""
        known = self.on(mesh)
        return tuple(name for name in self.split_axes if self.sizes[name] > 1 and mesh.size(known[name]) == 1)

    def __str__(self) -> str:
        return " × ".join(f"{name}={size}" for name, size in self.sizes.items())


def _by_name(sizes: Mapping[str, int], mesh: Mesh, found: dict[str, tuple[str, ...]]) -> None:
    taken = _axes_in_use(found)
    found |= {name: (name,) for name in sizes if name in mesh.sizes and name not in found and name not in taken}


def _by_devices(sizes: Mapping[str, int], mesh: Mesh, found: dict[str, tuple[str, ...]]) -> None:
    if prod(sizes.values()) != mesh.device_count:
        return
    for part in parts_of_mesh(sizes):
        others = _axes_in_use(found) | set(sizes).difference((part.axis,))
        axes = axes_of_devices(mesh, part) if part.axis not in found else None
        if axes and others.isdisjoint(axes):
            found[part.axis] = axes


def _by_size(names: Sequence[str], sizes: Mapping[str, int], mesh: Mesh, found: dict[str, tuple[str, ...]]) -> None:
    left, free = [name for name in names if name not in found], _free(mesh, found)
    for name in left:
        same = [axis for axis in free if mesh.sizes[axis] == sizes[name]]
        if len(same) == 1 == sum(sizes[other] == sizes[name] for other in left):
            found[name] = (same[0],)


def _axes_in_use(found: Mapping[str, tuple[str, ...]]) -> set[str]:
    return {axis for axes in found.values() for axis in axes}


def _free(mesh: Mesh, found: Mapping[str, tuple[str, ...]]) -> list[str]:
    taken = _axes_in_use(found)
    return [axis.name for axis in mesh.axes if axis.name not in taken and axis.size > 1]


def axes_of_devices(mesh: Mesh, part: DevicePart) -> tuple[str, ...] | None:
    """The axes of `mesh` that together join exactly the devices of `part`; None where none do."""
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
    """Those of `axes` that are the sub-axis `part` of the axis which all of them are."""
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
    """The coarsest mesh in which axes of `meshes` and `parts` are runs of axes; None where there is none.

    An axis that is one of `meshes` has its name.
    """
    axes = [part for sizes in meshes for part in parts_of_mesh(sizes) if part.size > 1]
    known = [*axes, *parts]
    if len(meshes) == 1 and all(part.axis for part in parts):
        return ProgramMesh(sizes=meshes[0])
    if not known or any(part.stride is None for part in known):
        return None
    cuts = sorted({1, device_count, *(end for part in known for end in _ends(part))}, reverse=True)
    if any(larger % smaller for larger, smaller in pairwise(cuts)):
        return None
    sizes: dict[str, int] = {}
    for end, stride in pairwise(cuts):
        sizes[_name(axes, stride, end, sizes)] = end // stride
    return ProgramMesh(sizes=sizes, is_named=bool(axes))


def _ends(part: DevicePart) -> tuple[int, int]:
    assert part.stride is not None
    return part.stride, part.stride * part.size


def _name(axes: Sequence[DevicePart], stride: int, end: int, taken: Mapping[str, int]) -> str:
    """Of the devices from `stride` apart to `end`: an axis's name, one made of the axis that they are part of, or a
    default one."""
    same = [axis.axis for axis in axes if _ends(axis) == (stride, end)]
    around = [axis.axis for axis in axes if axis.stride is not None and axis.stride <= stride and end <= _ends(axis)[1]]
    parts = (f"{name}_{number}" for name in around[:1] for number in range(len(taken) + 2))
    others = (f"axis{number}" for number in range(len(taken) + 1))
    return next(name for name in (*same, *parts, *DEFAULT_AXES, *others) if name not in taken)


def order_axes(names: Sequence[str], orders: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """`names` as near to their own order as has each of `orders` major first; as they are where nothing has."""
    for found in permutations(names):
        places = [[found.index(name) for name in order if name in found] for order in orders]
        if all(each == sorted(each) for each in places):
            return found
    return tuple(names)


def axes_of_part(own: ProgramMesh, part: DevicePart) -> tuple[DevicePart, ...]:
    """The axes of `own`, major first, that `part` runs over."""
    first, last = _ends(part)
    axes = [each for each in parts_of_mesh(own.sizes) if each.size > 1]
    return tuple(each for each in axes if first <= _ends(each)[0] and _ends(each)[1] <= last)
