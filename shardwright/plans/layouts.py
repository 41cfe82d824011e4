"""How one array lies on the devices of a mesh: shard index arithmetic, without jax.

A *device position* is the number of a device in the cluster's device order. A
mesh lies row-major on the positions from `first_device` on. Shards are of the
*stored* array: the logical one padded at the end of each dimension to what its
axes divide.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from shardwright.dtypes import to_dtype
from shardwright.errors import PlanError
from shardwright.plans.plan import VariablePlan
from shardwright.plans.shardings import Mesh, TensorSharding

Slices = tuple[slice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Logical type of an array, its sharding over a mesh, and its stored (padded) shape.

    `view_of` are the dimensions that the user sees, where `shape` views the same elements otherwise; else None.
    `first_device` is the cluster's device that comes first in the mesh. `is_on_host`: whether programs have it in the
    memory of the devices' hosts; no part of what makes two layouts equal: whoever runs a program brings it there.

    Raises PlanError where the ranks differ, an axis is unknown, or the stored
    shape is not divided by its axes.
    """

    element_type: str
    shape: tuple[int, ...]
    mesh: Mesh
    sharding: TensorSharding
    stored_shape: tuple[int, ...]
    view_of: tuple[int, ...] | None = None
    first_device: int = 0
    is_on_host: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        if self.first_device < 0:
            raise PlanError(f"a layout on devices from {self.first_device} on")
        if self.view_of is not None and prod(self.view_of) != prod(self.shape):
            raise PlanError(f"a layout of {list(self.shape)} is no view of {list(self.view_of)}")
        if not len(self.shape) == len(self.stored_shape) == len(self.sharding.dims):
            raise PlanError(
                f"layout of rank {len(self.shape)} with stored shape {self.stored_shape} and {self.sharding}"
            )
        sizes = self.mesh.sizes
        for number, (size, stored, axes) in enumerate(
            zip(self.shape, self.stored_shape, self.sharding.dims, strict=True)
        ):
            unknown = [axis for axis in axes if axis not in sizes]
            if unknown:
                raise PlanError(f"dimension {number} is split over {unknown[0]!r}, which mesh {self.mesh} lacks")
            if size < 0 or stored < size or stored % self.mesh.size(axes):
                raise PlanError(f"dimension {number} of {size} stored as {stored} is not divided by its axes {axes}")

    @classmethod
    def of(cls, variable: VariablePlan, mesh: Mesh, first_device: int = 0) -> Layout:
        """The layout of a planned parameter or output, on a mesh that begins at `first_device` of the cluster.

        Of a partial sum, that of the stack of its terms.
        """
        return cls(
            element_type=variable.element_type,
            shape=variable.stored_shape if variable.is_stacked else variable.shape,
            mesh=mesh,
            sharding=variable.stored_sharding,
            stored_shape=variable.stored_shape,
            view_of=variable.view_of,
            first_device=first_device,
            is_on_host=variable.is_on_host,
        )

    @classmethod
    def replicated(cls, element_type: str, shape: tuple[int, ...], mesh: Mesh, first_device: int = 0) -> Layout:
        """A full copy on every device."""
        return cls(
            element_type=element_type,
            shape=shape,
            mesh=mesh,
            sharding=TensorSharding.replicated(len(shape)),
            stored_shape=shape,
            first_device=first_device,
        )

    @property
    def devices(self) -> range:
        """Positions of the devices that hold a shard."""
        return range(self.first_device, self.first_device + self.mesh.device_count)

    @property
    def dtype(self) -> np.dtype:
        return to_dtype(self.element_type)

    @property
    def user_shape(self) -> tuple[int, ...]:
        """Dimensions that the user sees."""
        return self.shape if self.view_of is None else self.view_of

    @property
    def is_padded(self) -> bool:
        return self.shape != self.stored_shape

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """Elements of one device's shard; the same on every device."""
        return self.sharding.shard_shape(self.stored_shape, self.mesh)

    @property
    def shard_bytes(self) -> int:
        return prod(self.shard_shape) * self.dtype.itemsize

    @property
    def size_bytes(self) -> int:
        """Bytes of the logical array, once."""
        return prod(self.shape) * self.dtype.itemsize


@lru_cache(maxsize=4096)
def shard_slices(layout: Layout, device_position: int) -> Slices:
    """Which part of the stored array the device at `device_position` holds."""
    if device_position not in layout.devices:
        raise PlanError(f"device position {device_position} is outside mesh {layout.mesh} on devices {layout.devices}")
    coordinates = _coordinates(layout.mesh, device_position - layout.first_device)
    sizes = layout.mesh.sizes
    slices = []
    for extent, axes in zip(layout.shard_shape, layout.sharding.dims, strict=True):
        block = 0
        for axis in axes:
            block = block * sizes[axis] + coordinates[axis]
        slices.append(slice(block * extent, (block + 1) * extent))
    return tuple(slices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One distinct part of an array: `slices` of the stored array, and the positions that hold it."""

    slices: Slices
    holders: tuple[int, ...]


@lru_cache(maxsize=4096)
def _find_distinct_shards(layout: Layout, devices: tuple[int, ...]) -> tuple[Shard, ...]:
    holders: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for position in devices:
        if position not in layout.devices:
            continue
        key = tuple((part.start, part.stop) for part in shard_slices(layout, position))
        holders.setdefault(key, []).append(position)
    return tuple(
        Shard(slices=tuple(slice(*bounds) for bounds in key), holders=tuple(positions))
        for key, positions in holders.items()
    )


def distinct_shards(layout: Layout, devices: Iterable[int]) -> tuple[Shard, ...]:
    """The different shards that those of `devices` hold that are in the mesh, in order of their first holder."""
    return _find_distinct_shards(layout, tuple(devices))


def pad_to_stored(array: np.ndarray, layout: Layout) -> np.ndarray:
    """The stored form of a logical array: its view, zeros added at the end of padded dimensions."""
    array = array.reshape(layout.shape)
    if not layout.is_padded:
        return array
    widths = [(0, stored - size) for size, stored in zip(layout.shape, layout.stored_shape, strict=True)]
    return np.pad(array, widths)


def slice_stored(array: np.ndarray, layout: Layout, slices: Slices) -> np.ndarray:
    """`pad_to_stored(array, layout)[slices]`, without padding the rest; nothing is copied where there is no padding."""
    index: tuple[Any, ...] = (..., *slices)  # an array, also of a scalar
    part = array.reshape(layout.shape)[index]
    widths = [
        (0, part_slice.stop - part_slice.start - size) for part_slice, size in zip(slices, part.shape, strict=True)
    ]
    return np.pad(part, widths) if any(added for _, added in widths) else part


def logical_part(array: np.ndarray, layout: Layout) -> np.ndarray:
    """The logical array in a stored one, without the padding; nothing is copied unless both are other."""
    if layout.is_padded:
        array = array[tuple(slice(0, size) for size in layout.shape)]
    return array.reshape(layout.user_shape)


def _coordinates(mesh: Mesh, number: int) -> dict[str, int]:
    """Along every axis, of the device that is `number` in row-major order."""
    coordinates = {}
    for axis in reversed(mesh.axes):
        number, coordinates[axis.name] = divmod(number, axis.size)
    return coordinates
