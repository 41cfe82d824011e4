"""Plan shardings in jax's form, `NamedSharding`, and their comparison with the loaded program's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shardwright.errors import CompilationError, PlanError
from shardwright.placements import HOST
from shardwright.plans.plan import CallTrees, Plan, VariablePlan
from shardwright.plans.shardings import Mesh, TensorSharding
from shardwright.xla import private

if TYPE_CHECKING:
    import jax


#: Arrays that an error names, at most.
_MAX_NAMED = 3


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
            remedy=f"on CPU set XLA_FLAGS=--xla_force_host_platform_device_count={mesh.device_count} before jax starts "
            "(plan.partition_specs() needs no devices)",
        )
    grid = np.asarray(devices[: mesh.device_count], dtype=object).reshape([axis.size for axis in mesh.axes])
    kind = (jax.sharding.AxisType.Auto,) * len(mesh.axes)
    return jax.sharding.Mesh(grid, tuple(axis.name for axis in mesh.axes), axis_types=kind)


def mesh_devices() -> list[Any]:
    """All devices of the job, in mesh order."""
    import jax

    return sorted(jax.devices(), key=lambda device: (device.process_index, device.id))


def to_named_sharding(
    mesh: jax.sharding.Mesh, sharding: TensorSharding, *, is_on_host: bool = False
) -> jax.sharding.NamedSharding:
    """jax's form of a sharding; PlanError on a partial one: no array can have it.

    is_on_host: of an array in the memory of the devices' hosts. CPU devices are their own: there is one memory.
    """
    import jax

    spec = to_partition_spec(sharding, len(sharding.dims))
    if not is_on_host or mesh.devices.flat[0].platform == "cpu":
        return jax.sharding.NamedSharding(mesh, spec)
    return jax.sharding.NamedSharding(mesh, spec, memory_kind=HOST)


def to_partition_spec(sharding: TensorSharding, rank: int) -> jax.sharding.PartitionSpec:
    """The first `rank` dimensions of a sharding: what follows are the words of PRNG keys, which lie together.

    Raises PlanError on a partial sharding: no array can have it.
    """
    import jax

    if sharding.unreduced or any(sharding.dims[rank:]):
        raise PlanError(f"an argument or output cannot lie as {sharding}")
    dims = [None if not axes else axes[0] if len(axes) == 1 else axes for axes in sharding.dims[:rank]]
    return jax.sharding.PartitionSpec(*dims)  # type: ignore[no-untyped-call]


class PlanShardings(NamedTuple):
    """Shardings of a function's arguments and of its results, for `jax.jit(in_shardings=, out_shardings=)`.

    Pytrees of the positional arguments' and of the result's structure, or a tuple each, flat, where that is not known.
    Leaves: `NamedSharding`s, or `PartitionSpec`s.
    """

    arguments: Any
    results: Any


def to_named_shardings(plan: Plan, devices: Sequence[Any] | None = None) -> PlanShardings:
    """Shardings of a plan's arguments and outputs over devices (default: all).

    Raises PlanError if there are too few devices, and like `to_partition_specs`.
    """
    import jax

    mesh = jax_mesh(plan.mesh, devices)

    def sharding_of(variable: VariablePlan, rank: int) -> jax.sharding.NamedSharding:
        kind = HOST if variable.is_on_host else None
        return jax.sharding.NamedSharding(mesh, to_partition_spec(variable.stored_sharding, rank), memory_kind=kind)

    return _in_trees(plan, sharding_of)


def to_partition_specs(plan: Plan) -> PlanShardings:
    """The same as `PartitionSpec`s over the axes of `plan.mesh`: no device is needed.

    Raises PlanError where an argument is passed by keyword alone, which `jax.jit` has no shardings for.
    """
    return _in_trees(plan, lambda variable, rank: to_partition_spec(variable.stored_sharding, rank))


def with_call(plan: Plan, arguments: Any, results: Any) -> Plan:
    """The plan with the structure of these arguments, a tuple, and of this result; None: as it is.

    Raises PlanError on other numbers of arrays than the plan's.
    """
    import jax

    if arguments is None and results is None:
        return plan
    known = plan.call or CallTrees(
        arguments=jax.tree.structure(((0,) * len(plan.parameters), {})),
        results=jax.tree.structure((0,) * len(plan.outputs)),
        argument_leaves=tuple(enumerate(len(variable.shape) for variable in plan.parameters)),
        result_leaves=tuple(enumerate(len(variable.shape) for variable in plan.outputs)),
    )
    if arguments is not None:
        leaves = _leaves("argument", (tuple(arguments), {}), plan.parameters)
        known = replace(known, arguments=jax.tree.structure((tuple(arguments), {})), argument_leaves=leaves)
    if results is not None:
        leaves = _leaves("result", results, plan.outputs)
        known = replace(known, results=jax.tree.structure(results), result_leaves=leaves)
    return replace(plan, call=known)


def _leaves(what: str, tree: Any, variables: Sequence[VariablePlan]) -> tuple[tuple[int, int], ...]:
    """(number, rank) of each leaf. Raises PlanError on another number of leaves."""
    import jax

    leaves = jax.tree.leaves(tree)
    if len(leaves) != len(variables):
        raise PlanError(
            f"the plan has {len(variables)} {what} arrays, {', '.join(v.name for v in variables[:_MAX_NAMED])}…; "
            f"{len(leaves)} were given",
            where=f"{what}s",
            remedy="give what the program was lowered for: jax.jit drops arguments that it does not read",
        )
    return tuple((number, np.ndim(leaf)) for number, leaf in enumerate(leaves))


def _in_trees(plan: Plan, leaf_of: Callable[[VariablePlan, int], Any]) -> PlanShardings:
    call = plan.call
    if call is None:
        return PlanShardings(
            tuple(leaf_of(variable, len(variable.shape)) for variable in plan.parameters),
            tuple(leaf_of(variable, len(variable.shape)) for variable in plan.outputs),
        )
    import jax

    def fill(tree: Any, leaves: Sequence[tuple[int, int]], variables: Sequence[VariablePlan]) -> Any:
        found = [leaf_of(variables[number], rank) for number, rank in leaves]
        return jax.tree.unflatten(tree, found)

    positional, by_keyword = fill(call.arguments, call.argument_leaves, plan.parameters)
    if by_keyword:
        raise PlanError(
            f"{', '.join(by_keyword)}: an argument by keyword alone, and jax.jit takes in_shardings of positional ones",
            where=plan.module_name,
            remedy="let the function take it by position as well",
        )
    return PlanShardings(positional, fill(call.results, call.result_leaves, plan.outputs))


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
