"""A parameter's way from its part on this rank to what a module computes with, and its gradient's way back.

Each move is along one axis of the mesh, by DTensor's own collectives. DTensor's search for layouts on several axes at
once takes seconds an operator, so that no operator sees more than one axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard


@dataclass(frozen=True, slots=True)
class Move:
    """Along one axis of the mesh: dim is gathered there (None: whole already); reduces: each rank has a term of the
    gradient, which is averaged; else all have the same one.
    """

    mesh: DeviceMesh
    dim: int | None
    reduces: bool

    def gather(self, local: Any, shape: tuple[int, ...]) -> Any:
        """shape: of the result."""
        if self.dim is None:
            return local
        part = DTensor.from_local(
            local, self.mesh, [Shard(self.dim)], run_check=False, shape=torch.Size(shape), stride=_strides(shape)
        )
        return part.redistribute(placements=[Replicate()]).to_local()

    def give_back(self, gradient: Any) -> Any:
        """The part of this rank of the whole gradient."""
        if not self.reduces and self.dim is None:
            return gradient
        term: Placement = Partial() if self.reduces else Replicate()
        whole = DTensor.from_local(gradient, self.mesh, [term], run_check=False)
        goal: Placement = Replicate() if self.dim is None else Shard(self.dim)
        part = whole.redistribute(placements=[goal]).to_local()
        return part / self.mesh.size() if self.reduces else part


@dataclass(frozen=True, slots=True)
class Way:
    """Moves in the order of the axes, and the shape of the result after each, innermost first."""

    moves: tuple[Move, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def gathers(self) -> bool:
        return any(move.dim is not None for move in self.moves)

    def go(self, local: Any) -> Any:
        """Whole along the axes of the moves. The last axis that splits a dimension is undone first."""
        for move, shape in zip(reversed(self.moves), self.shapes, strict=True):
            local = move.gather(local, shape)
        return local

    def go_back(self, gradient: Any) -> Any:
        for move in self.moves:
            gradient = move.give_back(gradient)
        return gradient


def plan_way(parameter: Any, gathered: Sequence[str], reduced: Sequence[str]) -> Way:
    """gathered: axes along which the result is whole. reduced: those along which ranks see different rows."""
    mesh, names = parameter.device_mesh, parameter.device_mesh.mesh_dim_names
    dims = {name: p.dim for name, p in zip(names, parameter.placements, strict=True) if isinstance(p, Shard)}
    moves = tuple(
        Move(mesh[name], dims.get(name) if name in gathered else None, name in reduced)
        for name in names
        if name in gathered or name in reduced
    )
    shapes = []
    undone: set[str] = set()
    for name in [name for name in reversed(names) if name in gathered or name in reduced]:
        undone |= {name} if name in gathered else set()
        shapes.append(_local_shape(parameter, undone))
    return Way(moves, tuple(shapes))


def _local_shape(parameter: Any, undone: set[str]) -> tuple[int, ...]:
    """Of this rank's part where some axes are gathered."""
    shape = list(parameter.shape)
    mesh = parameter.device_mesh
    for name, placement in zip(mesh.mesh_dim_names, parameter.placements, strict=True):
        if isinstance(placement, Shard) and name not in undone:
            size, part = -(-shape[placement.dim] // mesh[name].size()), mesh.get_local_rank(name)
            shape[placement.dim] = max(0, min(size, shape[placement.dim] - size * part))
    return tuple(shape)


class Gathered(torch.autograd.Function):  # type: ignore[misc]
    """A parameter, a DTensor, as the tensor of this rank that a module computes with."""

    @staticmethod
    def forward(ctx: Any, parameter: Any, way: Way) -> Any:
        ctx.way, ctx.mesh, ctx.placements = way, parameter.device_mesh, parameter.placements
        ctx.shape, ctx.stride = parameter.shape, parameter.stride()
        local = way.go(parameter.to_local())
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        local = ctx.way.go_back(gradient.contiguous())
        return DTensor.from_local(
            local.contiguous(), ctx.mesh, ctx.placements, run_check=False, shape=ctx.shape, stride=ctx.stride
        ), None


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides))
