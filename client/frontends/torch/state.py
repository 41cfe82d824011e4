"""State of a module and its optimizers on the servers, by name.

Parameters and buffers are `model.PATH`, an optimizer's tensors `optimizer.KEY.PATH` (`optimizer[1].…` of several), the
key of random draws `random`. Tied weights are one array, under the first of their paths.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.weak import WeakIdKeyDictionary

from shardwright.client.arrays import RemoteArray
from shardwright.client.frontends import uploads
from shardwright.client.frontends.torch.dtypes import to_numpy, to_tensor
from shardwright.client.frontends.torch.following import Mirror, as_they_are, bring_in_all
from shardwright.client.frontends.torch.settings import Setting
from shardwright.client.frontends.torch.tracing import TensorType
from shardwright.errors import ArrayError, OptionError

if TYPE_CHECKING:
    from shardwright.client.step_queue import StepQueue

RANDOM = "random"

_states: weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[Any, Any]] = weakref.WeakKeyDictionary()


def require_plain(model: Any) -> None:
    """Raises OptionError on what is no module, and on one that another library wraps or has split."""
    if not isinstance(model, torch.nn.Module):
        raise OptionError(f"model is a {type(model).__name__}", where="model", remedy="pass a torch.nn.Module")
    wrapper = type(model).__name__
    inner = {
        "OptimizedModule": "torch.compile's module: pass the module inside, model._orig_mod",
        "DistributedDataParallel": "DistributedDataParallel: pass the module inside, model.module",
        "DataParallel": "DataParallel: pass the module inside, model.module",
        "FullyShardedDataParallel": "FullyShardedDataParallel: pass the module inside, before it is wrapped",
        "DeepSpeedEngine": "DeepSpeed's engine: pass the module inside, model.module",
        "GraphModule": "",
    }.get(wrapper, "")
    if isinstance(model, torch.jit.ScriptModule):
        inner = "torch.jit's module: pass the module that was scripted or traced"
    elif any(type(p).__name__ == "DTensor" or hasattr(p, "device_mesh") for p in model.parameters()):
        inner = "split over a device mesh (fully_shard, DTensor): pass the module inside, before it is split"
    if inner:
        what, _, remedy = inner.partition(": ")
        raise OptionError(f"model is {what}", where="model", remedy=remedy)


class StateGroup:
    """Named arrays of one owner, a module or an optimizer: types, and values or handles.

    `values`: name → handle. An entry made from values here is uploaded when a step first needs it. `start`: values
    that no handle has been made of yet. `mirror`: the tensors here.
    """

    def __init__(self) -> None:
        self.types: dict[str, TensorType] = {}
        self.values: dict[str, RemoteArray] = {}
        self.start: dict[str, np.ndarray] = {}
        self.mirror = Mirror(self.values)

    def bring_in(self) -> None:
        """The servers' values in what is here, before a session ends."""

    def advance(self, handles: Mapping[str, RemoteArray]) -> None:
        """A step has made new arrays."""
        self.values.update(handles)
        self.mirror.advance(handles)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.types)


class ModelState(StateGroup):
    """Parameters, buffers and the random key of a module in a session.

    gradients: those that a step leaves for the next one, `gradient.PATH`. draws: whether a step draws random numbers.
    former: tensors that the module had, with their names then. layout: stands for which paths share a tensor. changes:
    how often the module had other tensors.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = weakref.ref(model)
        self.seed = torch.initial_seed()
        self.draws = False
        self.gradients = StateGroup()
        self.tensors: dict[str, Any] = {}
        self.former: Any = WeakIdKeyDictionary()
        self.layout = self.changes = 0
        self._layouts: dict[tuple[tuple[str, str], ...], int] = {}
        self._slots: list[tuple[dict[str, Any], int]] = []
        self._entries: list[tuple[dict[str, Any], str, Any]] = []
        self.refresh(model)

    def refresh(self, model: Any) -> None:
        """Takes names and types from the module; arrays of other tensors than before are gone."""
        before, self.tensors = self.tensors, name_tensors(model)
        self.modules = list(model.modules())
        tables = [table for module in self.modules for table in (module._parameters, module._buffers, module._modules)]
        self._slots = [(table, len(table)) for table in tables]
        self._entries = [(table, name, value) for table in tables for name, value in table.items()]
        bring_in_all(tensor for name, tensor in self.tensors.items() if before.get(name) is not tensor)
        gone = [name for name in before if self.tensors.get(name) is not before[name]]
        self.mirror.bring_in([name for name in gone if not before[name].is_meta])
        self.changes += 1
        for name in gone:
            self.former[before[name]] = name
            self.mirror.drop(name)
            self.values.pop(name, None)
            self.gradients.types.pop(gradient_name(name), None)
            self.gradients.values.pop(gradient_name(name), None)
        self.types = {name: type_of(tensor) for name, tensor in self.tensors.items()}
        self.layout = self._layouts.setdefault(_list_paths(model, self.tensors), len(self._layouts))
        for name, tensor in self.tensors.items():
            if before.get(name) is not tensor:
                self.mirror.hold(name, tensor)

    def take_changes(self) -> list[str]:
        """Looks for what the user has changed in the module; returns the names of tensors with new values here.

        Those that the module has instead of others have no handle any more.
        """
        model = self.model()
        has_same_tables = all(len(table) == count for table, count in self._slots)
        if not (has_same_tables and all(table.get(name) is value for table, name, value in self._entries)):
            self.refresh(model)
        written = self.mirror.list_written()
        for name in written:
            self.types[name] = type_of(self.tensors[name])
        return written

    def take_seed(self) -> bool:
        """Whether the key has to be made of the seed: at first, and when PyTorch's generator was seeded again."""
        if RANDOM in self.values and not self.draws:
            return False
        is_seeded = is_just_seeded()
        if is_seeded:
            self.seed = torch.initial_seed()
        return is_seeded or RANDOM not in self.values

    def list_hooks(self) -> tuple[Any, ...]:
        """What the user has registered on parameters for their gradients: names and functions."""
        with as_they_are():
            tables = [(n, t._backward_hooks, t._post_accumulate_grad_hooks) for n, t in self.tensors.items()]
        return tuple((name, *table.values()) for name, *both in tables for table in both if table)

    def bring_in(self) -> None:
        """The servers' values in the module; not into memory that it has never had."""
        self.mirror.bring_in([name for name, tensor in self.tensors.items() if not tensor.is_meta])


class OptimizerState(StateGroup):
    """Tensors of an optimizer in a session.

    entries: name → (parameter's name, key). places: of the tensors here, (parameter, its entries, key). seen:
    `optimizer.state` then. numbers: what it keeps beside tensors, by (parameter's name, key). trainable: `id()` of the
    parameters then, and the model's changes. owners: the model's tensors then. members: names of each group's.
    """

    def __init__(self, prefix: str, optimizer: Any) -> None:
        super().__init__()
        self.prefix = prefix
        self.optimizer = weakref.ref(optimizer)
        self.entries: dict[str, tuple[str, str]] = {}
        self.numbers: dict[tuple[str, str], float] = {}
        self.places: dict[str, tuple[Any, dict[str, Any], str]] = {}
        self.seen: Any = None
        self.trainable: tuple[list[int], int] | None = None
        self.owners: dict[str, Any] = {}
        self.members: tuple[tuple[str, ...], ...] = ()

    def name_of(self, parameter: str, key: str) -> str:
        return f"{self.prefix}.{key}.{parameter.removeprefix('model.')}"

    def bring_in(self) -> None:
        """The servers' tensors in `optimizer.state`; not those of parameters that have no memory here."""
        optimizer = self.optimizer()
        if optimizer is None or any(p.is_meta for group in optimizer.param_groups for p in group["params"]):
            return
        fill = getattr(optimizer.state, "fill", None)
        if fill is not None:
            fill()
        self.mirror.bring_in()

    def clear(self) -> None:
        """Forgets all tensors."""
        for name in list(self.mirror.tensors):
            self.mirror.drop(name)
        for table in (self.types, self.values, self.entries, self.places, self.numbers):
            table.clear()


def is_just_seeded() -> bool:
    """Whether nothing was drawn of PyTorch's generator since `torch.manual_seed`."""
    left, seeded, following, _ = torch.default_generator.get_state()[8:24].view(torch.int32).tolist()
    return bool(left == 1 and seeded and not following)


def use_seed() -> None:
    """Draws of PyTorch's generator, so that it is seen when it is seeded again."""
    torch.empty((), dtype=torch.int64).random_(generator=torch.default_generator)


def gradient_name(parameter: str) -> str:
    """Name of the gradient of `model.PATH`."""
    return f"gradient.{parameter.removeprefix('model.')}"


def name_tensors(model: Any) -> dict[str, Any]:
    """`model.PATH` → parameter or buffer, each once."""
    named = {f"model.{path}": tensor for path, tensor in model.named_parameters()}
    return named | {f"model.{path}": tensor for path, tensor in model.named_buffers()}


def _list_paths(model: Any, tensors: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Each path with the name of its tensor: tied ones have one."""
    names = {id(tensor): name for name, tensor in tensors.items()}
    paths = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return tuple((path, names[id(tensor)]) for path, tensor in paths)


def type_of(tensor: Any) -> TensorType:
    """Shape and dtype."""
    with as_they_are():
        return TensorType(tuple(tensor.shape), tensor.dtype)


def share_state(owner: Any, session: Any, make: Any) -> Any:
    """The state of a module or an optimizer in a session, made by `make()` if there is none: steps share it."""
    of_owner = _states.setdefault(owner, weakref.WeakKeyDictionary())
    if session not in of_owner:
        of_owner[session] = make()
        session.readers.append(weakref.WeakMethod(of_owner[session].bring_in))
        of_owner[session].mirror.session = weakref.ref(session)
    return of_owner[session]


def upload(steps: StepQueue, group: StateGroup, arrays: Mapping[str, np.ndarray]) -> None:
    """Handles of new arrays in a group; see `uploads.upload`."""
    group.values.update(zip(arrays, uploads.upload(steps, tuple(arrays.values())), strict=True))


def send(steps: StepQueue, mirror: Mirror, tensors: Mapping[str, Any]) -> None:
    """New handles of tensors that have new values here."""
    if tensors:
        arrays = host_values(tensors)
        mirror.values.update(zip(arrays, uploads.upload(steps, tuple(arrays.values())), strict=True))
        for name, tensor in tensors.items():
            mirror.hold(name, tensor)


def fetch(handles: Mapping[str, RemoteArray]) -> dict[str, Any]:
    """Tensors of this machine, by name; all are asked for at once."""
    for handle in handles.values():
        handle.copy_to_host_async()
    return {name: to_tensor(np.asarray(handle)) for name, handle in handles.items()}


# ---- swapping tensors in a module and an optimizer ------------------------------------------------


@contextlib.contextmanager
def swap_tensors(model: Any, replacements: Mapping[int, Any]) -> Iterator[None]:
    """The module with other tensors in place of its own. replacements: `id()` of a parameter or buffer → tensor."""
    saved = [(module, dict(module._parameters), dict(module._buffers)) for module in model.modules()]
    try:
        for module, parameters, buffers in saved:
            for slots, named in ((module._parameters, parameters), (module._buffers, buffers)):
                for name, tensor in named.items():
                    if tensor is not None:
                        slots[name] = replacements[id(tensor)]
        yield
    finally:
        for module, parameters, buffers in saved:
            for slots, named in ((module._parameters, parameters), (module._buffers, buffers)):
                slots.clear()
                slots.update(named)


@contextlib.contextmanager
def swap_optimizer(
    optimizer: Any, replacements: Mapping[int, Any], state: Any, settings: Mapping[Setting, Any]
) -> Iterator[None]:
    """The optimizer over other parameters. state: parameter (the replacement) → its tensors. settings: other values."""
    saved = [dict(group) for group in optimizer.param_groups]
    saved_state = optimizer.state
    optimizer.state = defaultdict(dict, state)
    try:
        for group in optimizer.param_groups:
            group["params"] = [replacements[id(p)] for p in group["params"] if id(p) in replacements]
            if "foreach" in group:
                group["foreach"] = False
            if "fused" in group:
                group["fused"] = None
        for setting, value in settings.items():
            setting.write(optimizer.param_groups[setting.group], value)
        yield
    finally:
        optimizer.state = saved_state
        for group, old in zip(optimizer.param_groups, saved, strict=True):
            group.update(old)


def optimizer_parameters(
    optimizer: Any, tensors: Mapping[str, Any], former: Mapping[Any, str] = MappingProxyType({})
) -> dict[int, str]:
    """`id()` of a parameter → its name. Raises OptionError on one that is not the model's, nor of the `former`."""
    names = {id(tensor): name for name, tensor in tensors.items()}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names and parameter not in former:
                raise OptionError(
                    f"the optimizer holds a parameter of shape {list(parameter.shape)} that the model does not have",
                    where=f"optimizer.param_groups[{number}]",
                    remedy="make the optimizer of model.parameters(), of the model that is passed",
                )
    return names


def host_values(tensors: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Arrays of this machine of some tensors. Raises ArrayError where one has no values."""
    with as_they_are():
        return _host_values(tensors)


def _host_values(tensors: Mapping[str, Any]) -> dict[str, np.ndarray]:
    without = [name for name, tensor in tensors.items() if tensor.is_meta]
    if without:
        raise ArrayError(
            f"{', '.join(without[:5])}{' and others' if len(without) > 5 else ''} are on torch.device('meta')",
            remedy="pass init=, a function of the model that fills its tensors: it runs on the servers",
        )
    return {name: to_numpy(tensor) for name, tensor in tensors.items()}
