"""Meshes of devices, and how an array is laid out over one.

What plans, costs and programs say of layouts. Frozen data, compared by value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from shardwright.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshAxis:
    """One axis of the device mesh: its name and its number of devices."""

    name: str
    size: int

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise PlanError(f"mesh axis name {self.name!r} is not an identifier")
        if self.size < 1:
            raise PlanError(f"mesh axis {self.name!r} has size {self.size}; sizes start at 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Devices laid out row-major over named axes: the last axis varies fastest."""

    axes: tuple[MeshAxis, ...]

    def __post_init__(self) -> None:
        names = [axis.name for axis in self.axes]
        if len(set(names)) != len(names):
            raise PlanError(f"mesh axis names repeat: {', '.join(names)}")

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> Mesh:
        return cls(axes=tuple(MeshAxis(name=name, size=size) for name, size in sizes.items()))

    @property
    def device_count(self) -> int:
        return prod(axis.size for axis in self.axes)

    @property
    def sizes(self) -> dict[str, int]:
        return {axis.name: axis.size for axis in self.axes}

    def size(self, names: tuple[str, ...]) -> int:
        """Devices along the named axes together."""
        if not names:  # by far the most common: of a dimension that is not split
            return 1
        device_count, missing = 1, len(names)
        for axis in self.axes:
            if axis.name in names:
                device_count *= axis.size
                missing -= 1
        if missing:
            raise KeyError(f"of {names} some are not axes of mesh {self}")
        return device_count

    def __str__(self) -> str:
        return " × ".join(f"{axis.name}={axis.size}" for axis in self.axes)


@dataclass(frozen=True, slots=True)
class TensorSharding:
    """The axes each dimension of one array is split over, major first.

    `unreduced` names axes over which the value is still a partial sum.
    An axis appears at most once in `dims` and `unreduced` together.
    """

    dims: tuple[tuple[str, ...], ...]
    unreduced: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        used = sum(self.dims, self.unreduced)
        if len(used) > 1 and len(set(used)) != len(used):
            raise PlanError(f"a mesh axis is used twice in sharding {self}")

    @classmethod
    def replicated(cls, rank: int) -> TensorSharding:
        return cls(((),) * rank)

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes that split a dimension."""
        return sum(self.dims, ())

    @property
    def is_replicated(self) -> bool:
        return not self.unreduced and not any(self.dims)

    @property
    def stacked(self) -> TensorSharding:
        """How the terms of a partial sum lie when they are stacked along a dimension in front: one on each device."""
        return TensorSharding((self.unreduced, *self.dims))

    def shard_shape(self, shape: tuple[int, ...], mesh: Mesh) -> tuple[int, ...]:
        """Dimensions of one device's shard, in elements, rounded up where uneven."""
        return tuple(
            [-(-size // mesh.size(axes)) if axes else size for size, axes in zip(shape, self.dims, strict=True)]
        )

    def is_even(self, shape: tuple[int, ...], mesh: Mesh) -> bool:
        """Whether all shards of an array of these dimensions are alike, so that none is padded."""
        return all(not axes or size % mesh.size(axes) == 0 for size, axes in zip(shape, self.dims, strict=True))

    def __str__(self) -> str:
        dims = ", ".join("·".join(dim) if dim else "-" for dim in self.dims)
        return f"[{dims}]" + (f" partial over {'·'.join(self.unreduced)}" if self.unreduced else "")


def rotate_axes(sharding: TensorSharding, mesh: Mesh) -> TensorSharding:
    """The same with the first axis of the mesh last where it splits a dimension together with others."""
    first = next((axis.name for axis in mesh.axes if axis.size > 1), "")
    dims = tuple(
        (*(axis for axis in axes if axis != first), first) if first in axes else axes for axes in sharding.dims
    )
    return TensorSharding(dims, sharding.unreduced)


def has_rotated_axes(sharding: TensorSharding, mesh: Mesh) -> bool:
    """Whether an array is split in that order, which is not mesh order."""
    order = list(mesh.sizes)
    plain = TensorSharding(tuple(tuple(sorted(axes, key=order.index)) for axes in sharding.dims), sharding.unreduced)
    return sharding != plain and sharding == rotate_axes(plain, mesh)


#: Shardings of a value's array leaves, depth first (one for an array, several for a tuple).
ValueSharding = tuple[TensorSharding, ...]
