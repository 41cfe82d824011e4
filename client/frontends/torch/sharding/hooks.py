"""While a module runs, its own parameters are what it computes with; before and after they are parts of this rank.

Layers of `_SPLIT` compute with a part along an axis that splits no batch, as tensor parallelism does: what goes in and
what comes out is whole there. All others compute with whole parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardwright.client.frontends.torch.sharding.gathering import Gathered, Way, plan_way
from shardwright.errors import UnsupportedProgramError

#: Layers whose forward pass is a product or a look-up by each parameter's own rows or columns; by name, for
#: `transformers` need not be installed.
_SPLIT = ("Linear", "Embedding", "Conv1D")
#: Modules that read their children's parameters, and so are one with them.
_UNITS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


@dataclass(slots=True)
class Slot:
    """A parameter of a module that is entered. way: to what it computes with. axis: along which that is a part."""

    owner: nn.Module
    name: str
    parameter: Any
    way: Way
    axis: str = ""

    def enter(self) -> Any:
        local = Gathered.apply(self.parameter, self.way)
        return self.lay_out(local) if self.axis else local

    def lay_out(self, local: Any) -> Any:
        mesh = self.parameter.device_mesh
        placement = self.parameter.placements[mesh.mesh_dim_names.index(self.axis)]
        shape = list(local.shape)
        if isinstance(placement, Shard):
            shape[placement.dim] = self.parameter.shape[placement.dim]
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            local, mesh[self.axis], [placement], run_check=False, shape=torch.Size(shape), stride=stride
        )


@dataclass(slots=True)
class Entry:
    """One module that is running: what stood in its tables, and what is to be left again."""

    saved: list[tuple[Slot, Any]] = field(default_factory=list)
    leave: list[Callable[..., Any]] = field(default_factory=list)


def add_hooks(module: nn.Module, batch_axes: Sequence[str], units: Sequence[type]) -> None:
    """Hooks on each module with parameters of its own, which are DTensors of one mesh."""
    inside: set[int] = set()
    part: Any
    for part in module.modules():
        if id(part) in inside:
            continue
        is_unit = isinstance(part, (*_UNITS, *units))
        owners = list(part.modules()) if is_unit else [part]
        inside |= {id(owner) for owner in owners}
        slots = [
            (owner, name, parameter)
            for owner in owners
            for name, parameter in owner._parameters.items()
            if parameter is not None
        ]
        if slots:
            axis = "" if is_unit else _split_axis(part, batch_axes)
            _hook(part, [_slot(*slot, batch_axes, axis) for slot in slots], axis)


def _split_axis(part: nn.Module, batch_axes: Sequence[str]) -> str:
    """The axis along which a layer computes with parts: the only one that splits its weight and no batch."""
    weight: Any = part._parameters.get("weight")
    if type(part).__name__ not in _SPLIT or getattr(part, "max_norm", None) is not None or weight is None:
        return ""
    names = weight.device_mesh.mesh_dim_names
    axes = {
        name
        for parameter in part._parameters.values()
        if parameter is not None
        for name, placement in zip(names, parameter.placements, strict=True)
        if isinstance(placement, Shard) and name not in batch_axes
    }
    return axes.pop() if len(axes) == 1 else ""


def _slot(owner: nn.Module, name: str, parameter: Any, batch_axes: Sequence[str], axis: str) -> Slot:
    names = parameter.device_mesh.mesh_dim_names
    gathered = [each for each in names if each != axis]
    return Slot(owner, name, parameter, plan_way(parameter, gathered, batch_axes), axis)


def _hook(part: nn.Module, slots: list[Slot], axis: str) -> None:
    running: list[Entry] = []

    def enter(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        entry = Entry()
        running.append(entry)
        whole: dict[int, Slot] = {}
        for slot in slots:
            value = slot.enter()
            entry.saved.append((slot, slot.owner._parameters[slot.name]))
            _assign(slot.owner, slot.name, value)
            if slot.way.gathers and value.numel():
                whole[_storage_of(value)] = slot
        if whole:
            hooks = saved_tensors_hooks(_packing(whole), _unpack)
            hooks.__enter__()
            entry.leave.append(hooks.__exit__)
        if axis:
            mesh = slots[0].parameter.device_mesh[axis]
            return torch.utils._pytree.tree_map_only(
                torch.Tensor, lambda value: _as_whole(value, mesh), (arguments, named)
            )
        return None

    def leave(_: nn.Module, arguments: Any, result: Any) -> Any:
        if not running:
            return None
        entry = running.pop()
        for exit_hooks in entry.leave:
            exit_hooks(None, None, None)
        for slot, value in entry.saved:
            _assign(slot.owner, slot.name, value)
        if axis and isinstance(result, DTensor):
            return result.redistribute(placements=[Replicate()]).to_local()
        return None

    part.register_forward_pre_hook(enter, with_kwargs=True)
    part.register_forward_hook(leave, always_call=True)


def _assign(owner: nn.Module, name: str, value: Any) -> None:
    owner._parameters[name] = value
    names = getattr(owner, "_flat_weights_names", None)
    if names is not None and name in names:  # recurrent layers compute with a list of their own
        owner._flat_weights[names.index(name)] = value


def _as_whole(value: Any, mesh: Any) -> Any:
    return value if isinstance(value, DTensor) else DTensor.from_local(value, mesh, [Replicate()], run_check=False)


# ---- what the backward pass needs of a parameter is gathered again -------------------------------


@dataclass(frozen=True, slots=True)
class Kept:
    """Stands for a view of a gathered parameter. like: the DTensor's mesh, placements, shape and stride, if it is."""

    slot: Slot
    size: Any
    stride: Any
    offset: int
    like: tuple[Any, Any, Any, Any] | None


def _packing(whole: dict[int, Slot]) -> Callable[[Any], Any]:
    def pack(tensor: Any) -> Any:
        slot = whole.get(_storage_of(tensor))
        if slot is None:
            return tensor
        local, like = tensor, None
        if isinstance(tensor, DTensor):
            local = tensor._local_tensor
            like = (tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())
        return Kept(slot, local.size(), local.stride(), local.storage_offset(), like)

    return pack


def _unpack(kept: Any) -> Any:
    if not isinstance(kept, Kept):
        return kept
    local = kept.slot.way.go(kept.slot.parameter.detach().to_local())
    view = local.as_strided(kept.size, kept.stride, kept.offset)
    if kept.like is None:
        return view
    mesh, placements, shape, stride = kept.like
    return DTensor.from_local(view, mesh, placements, run_check=False, shape=shape, stride=stride)


def _storage_of(tensor: Any) -> int:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr() if local.layout is torch.strided else 0


# ---- errors ------------------------------------------------------------------------------------


def explain_mixed(module: nn.Module) -> None:
    """The forward pass says what to do where a parameter is read past the module that it belongs to."""
    forward = module.forward

    @wraps(forward)
    def run(*arguments: Any, **named: Any) -> Any:
        try:
            return forward(*arguments, **named)
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            raise UnsupportedProgramError(
                f"{type(module).__name__} computes with a parameter outside of the module that has it, where it is a "
                "part only",
                where=_innermost_module(error),
                remedy="call the module that has it, or pass the class that reads it: shard(…, units=(Class,))",
            ) from error

    module.forward = run


def _innermost_module(error: BaseException) -> str:
    trace, place = error.__traceback__, ""
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and trace.tb_frame.f_code.co_name == "forward":
            place = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno} ({type(owner).__name__})"
        trace = trace.tb_next
    return place
