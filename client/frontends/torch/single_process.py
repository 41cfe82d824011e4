"""`torch.distributed` in scripts that one process trains with over all devices: each call is that of a job of one."""

from __future__ import annotations

import contextlib
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch.nn.parallel import DistributedDataParallel

from shardwright.client.frontends.torch.places import is_user_module
from shardwright.errors import OptionError, UnsupportedProgramError

_WHAT = "a step trains over all devices from one process, and this is rank {} of {} of torch.distributed"
_REMEDY = (
    "start it by python, with shardwright.torch.init_process_group() in place of dist.init_process_group(…), or by "
    "torchrun --nproc-per-node 1; shardwright.torch.shard takes a plan into a job of many ranks"
)


def init_process_group(*arguments: Any, **named: Any) -> None:
    """A process group of this process alone, as rank 0 of 1; see `shardwright.torch.init_process_group`."""
    del arguments, named
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    require_one_rank()


def require_one_rank() -> None:
    """Raises OptionError in one of many ranks, which would each train by itself."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise OptionError(
            _WHAT.format(dist.get_rank(), dist.get_world_size()), where="torch.distributed", remedy=_REMEDY
        )


_fully_sharded: weakref.WeakSet[Any] = weakref.WeakSet()


def mark_fully_sharded(module: Any) -> Any:
    """Remembers that a script asks for it; see `shardwright.torch.fully_shard`."""
    _fully_sharded.add(module)
    return module


def is_fully_sharded(model: Any) -> bool:
    """Whether the script asks for it, for the module or a part of it."""
    return isinstance(model, torch.nn.Module) and any(module in _fully_sharded for module in model.modules())


def unwrap(model: Any) -> Any:
    """The module inside DistributedDataParallel, which has nothing to do in a job of one rank."""
    return model.module if isinstance(model, DistributedDataParallel) else model


@contextlib.contextmanager
def as_one_rank(model: Any, function: Any) -> Iterator[None]:
    """While a step, `function`, is traced, with `model` as the user has it: collectives are those of one rank, and
    leave no trace of their own; a wrapper waits for no gradients.

    Functions that the user's files, and those of the module's classes, have imported by name are replaced as well.
    """
    real = {getattr(dist, name): replacement for name, replacement in _OF_ONE.items()}
    with contextlib.ExitStack() as settings:
        for name, replacement in _OF_ONE.items():
            settings.enter_context(mock.patch.object(dist, name, replacement))
        for name in ("all_reduce", "broadcast", "reduce"):
            settings.enter_context(mock.patch.object(torch.distributed.nn.functional, name, _same))
        settings.enter_context(mock.patch.object(torch.distributed.nn.functional, "all_gather", _as_tuple))
        for table in _globals_of(model, function):
            names = {name: real[value] for name, value in table.items() if inspect.isfunction(value) and value in real}
            if names:
                settings.enter_context(mock.patch.dict(table, names))
        if isinstance(model, DistributedDataParallel):
            settings.enter_context(model.no_sync())
        yield


def _globals_of(model: Any, function: Any) -> list[dict[str, Any]]:
    """Of the files in which the step and the classes of the module stand, and of all of the user's."""
    names = {type(module).__module__ for module in model.modules()}
    names |= {name for name, module in list(sys.modules.items()) if is_user_module(module)}
    tables = [vars(sys.modules[name]) for name in names if name in sys.modules and name.partition(".")[0] != "torch"]
    own = getattr(inspect.unwrap(function), "__globals__", {})
    return list({id(table): table for table in [*tables, own]}.values())


class _Done:
    """Stands for a collective under way."""

    def wait(self, timeout: Any = None) -> bool:
        return timeout is None or True

    def is_completed(self) -> bool:
        return True


def _call_of_one(name: str, action: Callable[[Any, Any], None]) -> Callable[..., Any]:
    """`torch.distributed`'s function, with its own parameters, as `action` of the first two."""
    signature = inspect.signature(getattr(dist, name))

    def call(*arguments: Any, **named: Any) -> Any:
        bound = signature.bind(*arguments, **named)
        bound.apply_defaults()
        first, second = (*bound.arguments.values(), None, None)[:2]
        action(first, second)
        return _Done() if bound.arguments.get("async_op") else None

    return call


def _nothing(first: Any, second: Any) -> None:
    """Each tensor is the sum, the mean or the copy of itself alone."""


def _fill(output: Any, value: Any) -> None:
    """The one tensor, or the one in a list, from the one tensor, or the one in a list."""
    target, source = (each[0] if isinstance(each, list | tuple) else each for each in (output, value))
    target.copy_(source.view(target.shape))


def _gather(value: Any, outputs: Any) -> None:
    if outputs is not None:
        _fill(outputs, value)


def _fill_object(outputs: Any, value: Any) -> None:
    outputs[0] = value


def _gather_object(value: Any, outputs: Any) -> None:
    if outputs is not None:
        outputs[0] = value


def _same(tensor: Any, *_: Any, **__: Any) -> Any:
    return tensor


def _as_tuple(tensor: Any, *_: Any, **__: Any) -> Any:
    return (tensor,)


def _refuse(name: str) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> Any:
        raise UnsupportedProgramError(
            f"torch.distributed.{name} in a step, which has one rank: there is none to exchange tensors with",
            remedy="leave it out: the step has the whole batch, and the planner moves what devices need",
        )

    return call


_ACTIONS: dict[Callable[[Any, Any], None], tuple[str, ...]] = {
    _nothing: ("all_reduce", "reduce", "broadcast", "barrier", "monitored_barrier", "broadcast_object_list"),
    _fill: (
        "all_gather", "all_gather_into_tensor", "all_gather_single", "reduce_scatter", "reduce_scatter_tensor",
        "reduce_scatter_single", "all_to_all", "all_to_all_single", "scatter",
    ),
    _gather: ("gather",),
    _fill_object: ("all_gather_object",),
    _gather_object: ("gather_object",),
}  # fmt: skip
_OF_ONE: dict[str, Callable[..., Any]] = {
    "get_rank": lambda group=None: 0,
    "get_world_size": lambda group=None: 1,
    **{
        name: _call_of_one(name, action)
        for action, names in _ACTIONS.items()
        for name in names
        if dist.is_available() and hasattr(dist, name)
    },
    **{name: _refuse(name) for name in ("send", "recv", "isend", "irecv", "batch_isend_irecv")},
}
