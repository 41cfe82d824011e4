"""An optimizer's state while it lies on the servers: filled when it is read, sent again when it was changed here."""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from shardwright.client.frontends.torch.counters import take_numbers
from shardwright.client.frontends.torch.following import as_they_are
from shardwright.client.frontends.torch.optimizers import find_state
from shardwright.client.frontends.torch.state import ModelState, OptimizerState, fetch, optimizer_parameters


class HeldState(defaultdict):  # type: ignore[type-arg]
    """An `optimizer.state` whose tensors are fetched when it is first read or changed."""

    def __init__(self, optimizer: Any, group: OptimizerState, model: ModelState) -> None:
        super().__init__(dict, dict.items(optimizer.state))
        self._group, self._model = weakref.ref(group), weakref.ref(model)

    def fill(self) -> None:
        """Brings the servers' tensors in; from then on it is a plain dict."""
        group, model = self._group(), self._model()
        if group is None or model is None or group.seen is not self:
            return
        numbers = {} if dict.__len__(self) else group.numbers
        for (parameter, key), number in numbers.items():
            dict.setdefault(self, group.owners[parameter], {})[key] = number
        absent = [name for name in group.names if name not in group.mirror.tensors]
        if not absent:
            return
        with _disable_current_modes(), as_they_are():
            tensors = fetch({name: group.values[name] for name in absent})
        for name, tensor in tensors.items():
            parameter, key = group.entries[name]
            owner = group.owners[parameter]
            entries = dict.setdefault(self, owner, {})
            entries[key] = tensor
            group.places[name] = owner, entries, key
            group.mirror.hold(name, tensor)

    def __reduce__(self) -> Any:
        self.fill()
        return defaultdict, (dict,), None, None, iter(dict.items(self))


def _filled(name: str) -> Any:
    method = getattr(defaultdict, name)

    def fill_and_call(self: HeldState, *args: Any, **kwargs: Any) -> Any:
        self.fill()
        return method(self, *args, **kwargs)

    fill_and_call.__name__ = name
    return fill_and_call


for _name in (
    "__getitem__", "__setitem__", "__delitem__", "__iter__", "__len__", "__contains__", "__eq__", "__ne__", "__repr__",
    "__or__", "__ior__", "clear", "copy", "get", "items", "keys", "pop", "popitem", "setdefault", "update", "values",
):  # fmt: skip
    setattr(HeldState, _name, _filled(_name))


def hold_back(optimizer: Any, group: OptimizerState, model: ModelState) -> None:
    """After a step: what the optimizer does not have here is fetched when it is read."""
    is_absent = len(group.mirror.tensors) < len(group.types) or (group.numbers and not optimizer.state)
    if is_absent and not isinstance(optimizer.state, HeldState):
        optimizer.state = group.seen = HeldState(optimizer, group, model)


def take_changes(optimizer: Any, group: OptimizerState, module: Any, model: ModelState) -> list[str]:
    """Looks for what the user has changed in the optimizer; returns the names of tensors with new values here.

    Other parameters, or another `state`, are taken anew, into `group.start`.
    """
    with as_they_are():
        parameters = [id(p) for members in optimizer.param_groups for p in members["params"] if p.requires_grad]
    trainable = parameters, model.changes
    if group.trainable == trainable and optimizer.state is group.seen and _has_same_tensors(optimizer.state, group):
        take_numbers(optimizer, group, model.tensors)
        return group.mirror.list_written()
    if optimizer.state is group.seen:
        group.bring_in()
    group.clear()
    group.seen = None
    names = optimizer_parameters(optimizer, model.tensors, model.former)
    group.owners = dict(model.tensors)
    group.members = tuple(
        tuple(names[id(p)] for p in members["params"] if id(p) in names) for members in optimizer.param_groups
    )
    group.start = find_state(optimizer, group, names, module, model)
    for name, (parameter, key) in group.entries.items():
        owner = model.tensors[parameter]
        entries = dict.get(optimizer.state, owner, {})
        if isinstance(entries.get(key), torch.Tensor):
            group.mirror.hold(name, entries[key])
            group.places[name] = owner, entries, key
    group.trainable, group.seen = trainable, optimizer.state
    return []


def _has_same_tensors(state: Any, group: OptimizerState) -> bool:
    """Whether the tensors that were here are those of the optimizer still."""
    tensors = group.mirror.tensors
    return all(
        dict.get(state, owner) is entries and entries.get(key) is tensors[name]
        for name, (owner, entries, key) in group.places.items()
    )
