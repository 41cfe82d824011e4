"""`shardwright.torch.shard`: a module laid out as a plan says, in the user's own process group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_tensor

from shardwright.client.frontends.torch.following import as_they_are
from shardwright.client.frontends.torch.sharding.hooks import add_hooks, explain_mixed
from shardwright.client.frontends.torch.sharding.layouts import BatchTensor, Layouts, make_mesh, read_layouts
from shardwright.client.frontends.torch.state import require_plain
from shardwright.errors import ArgumentError, OptionError
from shardwright.plans.pipeline_plan import PipelinePlan
from shardwright.plans.plan import Plan


@dataclass(frozen=True, slots=True)
class ShardedModule:
    """What `shard` made of a module: `module` itself, whose parameters are DTensors over `mesh`.

    The ranks take the batch in `parts` parts; this one takes number `part`. Ranks of the same part take the same rows.
    notes: what the plan has beside layouts of parameters, and that is not done here.
    """

    module: nn.Module = field(repr=False)
    mesh: DeviceMesh
    parts: int
    part: int
    notes: tuple[str, ...]
    _batch: tuple[BatchTensor, ...] = field(repr=False)
    _batch_axes: tuple[str, ...] = field(repr=False)

    def place(self, *batch: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """This rank's rows of a batch that every rank has whole; its tensors in the order of the step's.

        Raises ArgumentError where there are more or fewer, or where their rows cannot be divided.
        """
        rows = {len(tensor) for tensor, kind in zip(batch, self._batch, strict=False) if kind.is_split}
        if len(batch) != len(self._batch) or any(count % self.parts for count in rows) or len(rows) > 1:
            shapes, planned = [list(t.shape) for t in batch], [list(kind.shape) for kind in self._batch]
            raise ArgumentError(
                f"the batch has shapes {shapes}, the plan's {planned}, in {self.parts} parts",
                where="place",
                remedy="pass the step's tensors in its order, whole on every rank, with rows that the parts divide",
            )
        return tuple(
            tensor.chunk(self.parts)[self.part] if kind.is_split else tensor
            for tensor, kind in zip(batch, self._batch, strict=True)
        )

    def average(self, value: torch.Tensor) -> torch.Tensor:
        """The mean over the parts of the batch, the same on every rank: of a loss, or of a metric."""
        mean = value.detach().clone()
        for axis in self._batch_axes:
            torch.distributed.all_reduce(mean, group=self.mesh.get_group(axis))
        return mean / self.parts


def shard_module(
    module: Any, plan: Plan | PipelinePlan, *, mesh: DeviceMesh | None, device_type: str, units: Sequence[type]
) -> ShardedModule:
    """See `shardwright.torch.shard`."""
    require_plain(module)
    if any(tensor.is_meta for tensor in module.parameters()):
        raise OptionError(
            "the module is on torch.device('meta') and has no values",
            where="module",
            remedy="module.to_empty(device=…), initialize it, and shard it then",
        )
    layouts = read_layouts(module, plan)
    mesh = make_mesh(layouts, mesh, device_type)
    _replace_parameters(module, mesh, layouts)
    add_hooks(module, layouts.batch_axes, units)
    explain_mixed(module)
    parts, part = 1, 0
    for axis in layouts.batch_axes:
        parts, part = parts * mesh[axis].size(), part * mesh[axis].size() + mesh.get_local_rank(axis)
    if parts < mesh.size():
        _seed_alike(mesh, part)
    return ShardedModule(module, mesh, parts, part, layouts.notes, layouts.batch, layouts.batch_axes)


class Replaced(nn.Parameter):  # type: ignore[misc]
    """A parameter that the module has no more. An optimizer that was made of it would do nothing."""

    @property
    def grad(self) -> Any:
        raise OptionError(
            f"a parameter of shape {list(self.shape)} has no gradient: shard has put a DTensor in its place",
            where="optimizer",
            remedy="make the optimizer after shard: optimizer = AdamW(module.parameters())",
        )


def _replace_parameters(module: nn.Module, mesh: DeviceMesh, layouts: Layouts) -> None:
    """Tied ones stay tied. The values are those of rank 0, and so are those of buffers, which stay whole."""
    replacements: dict[int, nn.Parameter] = {}
    with as_they_are():
        for name, parameter in module.named_parameters():
            part = distribute_tensor(parameter.detach(), mesh, layouts.placements[name])
            replacements[id(parameter)] = nn.Parameter(part, requires_grad=parameter.requires_grad)
        for owner in module.modules():
            for name, parameter in owner._parameters.items():
                if parameter is not None:
                    owner._parameters[name] = replacements[id(parameter)]
                    parameter.__class__ = Replaced
    for buffer in module.buffers():
        torch.distributed.broadcast(buffer, 0)


def _seed_alike(mesh: DeviceMesh, part: int) -> None:
    """Ranks that have the same rows draw the same random numbers, others other ones."""
    seed = torch.tensor([torch.initial_seed() % (1 << 62)], device=mesh.device_type)
    torch.distributed.broadcast(seed, 0)
    torch.manual_seed(int(seed.item()) + part)
