"""Plan shardings in jax's form, `NamedSharding`, and their comparison with the loaded program's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwright.errors import CompilationError, PlanError
from shardwright.plans.plan import Plan
from shardwright.plans.shardings import Mesh, TensorSharding
from shardwright.xla import private

if TYPE_CHECKING:
    import jax


def jax_mesh(mesh: Mesh, devices: Sequence[Any] | None = None) -> jax.sharding.Mesh:
    """The plan's mesh over devices in order (default: all, by process, then id), row-major.

    Raises PlanError if there are fewer devices than the mesh needs.
    """
    import jax

    if devices is None:
        devices = mesh_devices()
    if len(devices) < mesh.device_count:
        raise PlanError(
            f"the mesh {mesh} needs {mesh.device_count} devices, {len(devices)} are here",
            remedy=f"on CPU set XLA_FLAGS=--xla_force_host_platform_device_count={mesh.device_count} before jax starts",
        )
    grid = np.asarray(devices[: mesh.device_count], dtype=object).reshape([axis.size for axis in mesh.axes])
    kind = (jax.sharding.AxisType.Auto,) * len(mesh.axes)
    return jax.sharding.Mesh(grid, tuple(axis.name for axis in mesh.axes), axis_types=kind)


def mesh_devices() -> list[Any]:
    """All devices of the job, in mesh order."""
    import jax

    return sorted(jax.devices(), key=lambda device: (device.process_index, device.id))


def to_named_sharding(mesh: jax.sharding.Mesh, sharding: TensorSharding) -> jax.sharding.NamedSharding:
    """jax's form of a sharding; PlanError on a partial one: no array can have it."""
    import jax

    if sharding.unreduced:
        raise PlanError(f"an argument or output cannot lie as {sharding}")
    dims = [None if not axes else axes[0] if len(axes) == 1 else axes for axes in sharding.dims]
    spec = jax.sharding.PartitionSpec(*dims)  # type: ignore[no-untyped-call]
    return jax.sharding.NamedSharding(mesh, spec)


def to_named_shardings(
    plan: Plan, devices: Sequence[Any] | None = None
) -> tuple[tuple[jax.sharding.NamedSharding, ...], tuple[jax.sharding.NamedSharding, ...]]:
    """(per argument, per output) shardings of a plan, for `jax.jit(in_shardings=, out_shardings=)`.

    Raises PlanError if there are too few devices.
    """
    mesh = jax_mesh(plan.mesh, devices)
    return (
        tuple(to_named_sharding(mesh, variable.stored_sharding) for variable in plan.parameters),
        tuple(to_named_sharding(mesh, variable.stored_sharding) for variable in plan.outputs),
    )


def coordinates(mesh: Mesh, sharding: TensorSharding) -> tuple[tuple[int, ...], ...]:
    """Per device, in mesh order, the number of its shard along every dimension of the array."""
    shards = []
    sizes = [axis.size for axis in mesh.axes]
    for position in np.ndindex(*sizes):
        along = {axis.name: (index, axis.size) for axis, index in zip(mesh.axes, position, strict=True)}
        shard = []
        for axes in sharding.dims:
            number = 0
            for name in axes:
                index, size = along[name]
                number = number * size + index
            shard.append(number)
        shards.append(tuple(shard))
    return tuple(shards)


def require_shardings(what: str, loaded: Sequence[Any], planned: Sequence[TensorSharding], mesh: Mesh) -> None:
    """Compare an executable's shardings of arguments or outputs with the plan's, one by one.

    what: "argument" or "output"; loaded: `OpSharding`s of the executable. Raises CompilationError naming the first
    difference.
    """
    if mesh.device_count == 1:
        return  # one layout only, and XLA names none for a program that it did not partition
    if not planned and len(loaded) == 1:
        return  # XLA names one sharding for the empty tuple
    if len(loaded) != len(planned):
        raise CompilationError(f"the loaded program has {len(loaded)} {what}s, the plan {len(planned)}")
    for number, (loaded_sharding, sharding) in enumerate(zip(loaded, planned, strict=True)):
        rank = len(sharding.dims)
        tiles = private.tile_coordinates(loaded_sharding, rank, mesh.device_count)
        if tiles != coordinates(mesh, sharding):
            raise CompilationError(
                f"{what} {number} was loaded with its shards at {tiles}, the plan says {sharding} over {mesh}",
                where=f"{what} {number}",
                remedy="XLA changed a sharding at the program's boundary: report the program and its plan",
            )
