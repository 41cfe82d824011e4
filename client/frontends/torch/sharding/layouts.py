"""What a plan says of a module, in DTensor's words: a mesh, placements, and the axes that split the batch."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from shardwright.client.frontends.torch.state import RANDOM
from shardwright.client.limits import MOST_LAYOUT_LINES
from shardwright.errors import PlanError
from shardwright.plans.pipeline_plan import PipelinePlan
from shardwright.plans.plan import Plan, VariablePlan

_MODEL, _OPTIMIZER = "model.", "optimizer"
#: How names of state begin, and those of arguments that are no tensors of the batch.
_STATE = (_MODEL, _OPTIMIZER, "gradient.", "scaler.", "captured.")
_REMEDY = 'make the plan of this module, with force="fsdp", "tensor" or "megatron" and rewrites="none"'


@dataclass(frozen=True, slots=True)
class BatchTensor:
    """A tensor of the batch: its name and whole shape, and whether its first dimension is split over the batch axes."""

    name: str
    shape: tuple[int, ...]
    is_split: bool


@dataclass(frozen=True, slots=True)
class Layouts:
    """A plan for a module over a mesh.

    axes: of the mesh, in the order of the placements. order: the same by number in the plan. placements: by a
    parameter's first path. notes: what the plan has beside layouts of parameters.
    """

    axes: tuple[str, ...]
    order: tuple[int, ...]
    sizes: tuple[int, ...]
    batch_axes: tuple[str, ...]
    batch: tuple[BatchTensor, ...]
    placements: Mapping[str, tuple[Placement, ...]]
    notes: tuple[str, ...]


def read_layouts(module: Any, plan: Plan | PipelinePlan) -> Layouts:
    """Raises PlanError with all tensors that DTensor cannot hold so, and where the plan is of another module."""
    if isinstance(plan, PipelinePlan):
        raise PlanError(
            f"the plan is a pipeline of {len(plan.programs)} programs, which no layout of one module says",
            remedy="plan with stages=1",
        )
    variables = {v.name.removeprefix(_MODEL): v for v in plan.parameters if v.name.startswith(_MODEL)}
    _require_variables(module, variables)
    sizes = plan.mesh.sizes
    axes = _order_axes(variables.values(), tuple(sizes))
    batch_axes, batch = _read_batch([v for v in plan.parameters if _is_batch(v.name)])
    names = [name for name, _ in module.named_parameters()]
    return Layouts(
        axes=axes,
        order=tuple(list(sizes).index(axis) for axis in axes),
        sizes=tuple(sizes[axis] for axis in axes),
        batch_axes=tuple(axis for axis in axes if axis in batch_axes),
        batch=batch,
        placements={name: _placements_of(variables[name], axes) for name in names},
        notes=tuple(_list_notes(plan)),
    )


def make_mesh(layouts: Layouts, mesh: DeviceMesh | None, device_type: str) -> DeviceMesh:
    """The plan's mesh over all ranks of the process group, or the user's own after a check.

    Raises PlanError where the process group or the user's mesh is of another size.
    """
    planned = {axis: layouts.sizes[layouts.axes.index(axis)] for axis in layouts.axes}
    if mesh is not None:
        names = mesh.mesh_dim_names or ()
        if dict(zip(names, mesh.shape, strict=False)) != planned:
            raise PlanError(
                f"the mesh has dimensions {dict(zip(names, mesh.shape, strict=False))}, the plan {planned}",
                where="mesh",
                remedy="init_device_mesh(device_type, sizes, mesh_dim_names=names) with the plan's; or leave mesh= out",
            )
        return mesh[layouts.axes] if tuple(names) != layouts.axes else mesh
    count = torch.Size(layouts.sizes).numel()
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 0
    if ranks != count:
        what = f"the process group has {ranks} ranks" if ranks else "there is no process group"
        raise PlanError(
            f"the plan is for {count} devices, {what}",
            remedy=f"start with torchrun --nproc-per-node {count} and call torch.distributed.init_process_group(); or "
            f"plan for {ranks or 'the'} devices",
        )
    in_plan_order = [layouts.sizes[layouts.order.index(number)] for number in range(len(layouts.order))]
    numbers = torch.arange(count).view(in_plan_order).permute(layouts.order)
    return DeviceMesh(device_type, numbers, mesh_dim_names=layouts.axes)


def _is_batch(name: str) -> bool:
    return name != RANDOM and not name.startswith(_STATE)


def _require_variables(module: Any, variables: Mapping[str, VariablePlan]) -> None:
    """Raises PlanError with all that is wrong: of another module, or in a form that DTensor has not."""
    problems = []
    for name, tensor in module.named_parameters():
        variable = variables.get(name)
        if variable is None:
            problems.append(f"{name}: not in the plan")
        elif variable.user_shape != tuple(tensor.shape):
            problems.append(f"{name}: {list(tensor.shape)}, in the plan {list(variable.user_shape)}")
        elif variable.sharding.unreduced:
            problems.append(f"{name}: a partial sum, which is no state of a module")
        elif any(variable.sharding.dims) and variable.view_of is not None:
            problems.append(f"{name}: split as {list(variable.shape)}, another view of {list(variable.view_of)}")
        elif variable.is_padded and any(
            len(axes) > 1 and stored != size
            for axes, size, stored in zip(variable.sharding.dims, variable.shape, variable.stored_shape, strict=True)
        ):
            problems.append(f"{name}: {list(variable.shape)} split unevenly over two axes, {variable.sharding}")
    if problems:
        shown = (
            problems
            if len(problems) <= MOST_LAYOUT_LINES
            else [*problems[:MOST_LAYOUT_LINES], f"and {len(problems)} in all"]
        )
        raise PlanError(
            "the plan does not lay this module out as DTensors:\n    " + "\n    ".join(shown), remedy=_REMEDY
        )


def _order_axes(variables: Any, axes: tuple[str, ...]) -> tuple[str, ...]:
    """An order of the mesh in which each dimension is split by the axes in mesh order, as DTensor does.

    Raises PlanError with the tensors that want different orders.
    """
    shared = {v.name: names for v in variables for names in v.sharding.dims if len(names) > 1}
    for order in itertools.permutations(axes):
        if all(sorted(names, key=order.index) == list(names) for names in shared.values()):
            return order
    raise PlanError(
        "dimensions are split by axes in different orders, and DTensor has one for a mesh: "
        + "; ".join(f"{name} by {' then '.join(names)}" for name, names in shared.items()),
        remedy=_REMEDY,
    )


def _placements_of(variable: VariablePlan, axes: Sequence[str]) -> tuple[Placement, ...]:
    placements: list[Placement] = [Replicate()] * len(axes)
    for number, names in enumerate(variable.sharding.dims):
        for axis in names:
            placements[axes.index(axis)] = Shard(number)
    return tuple(placements)


def _read_batch(variables: Sequence[VariablePlan]) -> tuple[tuple[str, ...], tuple[BatchTensor, ...]]:
    """(axes that split the batch, its tensors). Raises PlanError where it is split otherwise than by its rows.

    A tensor that the plan keeps whole beside one that it splits, with as many rows, is split as that one: labels belong
    to rows of inputs.
    """
    tensors = [v for v in variables if v.shape]
    splits = {v.name: v.sharding.dims[0] for v in tensors if v.sharding.dims[0]}
    problems = [f"{v.name} by {v.sharding}" for v in tensors if any(v.sharding.dims[1:])]
    axes = next(iter(splits.values()), ())
    rows = {v.user_shape[0] for v in tensors if v.name in splits}
    problems += [f"{v.name} by {v.sharding}" for v in tensors if splits.get(v.name, axes) != axes]
    problems += [f"{v.name} unevenly" for v in tensors if v.is_padded]
    if problems:
        raise PlanError(
            f"each rank takes rows of the batch, and the plan splits {', '.join(problems)}",
            remedy='plan with force="fsdp", "tensor" or "megatron", and a batch that the devices divide',
        )
    return axes, tuple(BatchTensor(v.name, v.user_shape, v.user_shape[0] in rows) for v in tensors)


def _list_notes(plan: Plan) -> list[str]:
    """What the plan has that layouts of parameters do not say, none of which changes a number."""
    notes = []
    whole = {v.name for v in plan.parameters if v.name.startswith(_MODEL) and v.sharding.is_replicated}
    if any(
        not v.sharding.is_replicated and any(v.name.endswith(f".{name.removeprefix(_MODEL)}") for name in whole)
        for v in plan.parameters
        if v.name.startswith(_OPTIMIZER)
    ):
        notes.append("the plan splits tensors of the optimizer whose parameters are whole; here they are whole as well")
    if plan.recomputed:
        notes.append("the plan computes values again to save memory; here that is torch.utils.checkpoint's to do")
    if plan.micro_batches > 1:
        notes.append(f"the plan takes the batch in {plan.micro_batches} parts; here that is the loop's to do")
    return notes
