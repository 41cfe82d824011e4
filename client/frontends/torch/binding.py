"""A module and its optimizers over the tensors of a trace, and what a traced step does to their gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch

from shardwright.client.frontends.torch.counters import Counter, is_number, list_number_writes
from shardwright.client.frontends.torch.places import Place
from shardwright.client.frontends.torch.reads import Write
from shardwright.client.frontends.torch.scaling import refuse_other_scalers, swap_scaler, values_of
from shardwright.client.frontends.torch.settings import Setting
from shardwright.client.frontends.torch.state import (
    ModelState,
    OptimizerState,
    gradient_name,
    swap_optimizer,
    swap_tensors,
)


class BoundStep:
    """The module and the optimizers over the tensors of a trace."""

    def __init__(
        self, model: Any, state: ModelState, optimizers: Sequence[Any], groups: Sequence[OptimizerState],
        values: Sequence[Any], settings: Mapping[Setting, Any], counts: Mapping[Counter, Any], scaler: Any = None,
    ) -> None:  # fmt: skip
        self._model, self._state, self._groups = model, state, groups
        self.scaler = scaler
        self.optimizers = list(optimizers)
        self._settings, self._counts = settings, counts
        self._groups_before: list[list[dict[str, Any]]] = []
        self._replacements: dict[int, Any] = {}
        remaining = iter(values)
        for tensor in state.tensors.values():
            value = next(remaining)
            if isinstance(tensor, torch.nn.Parameter):
                value = torch.nn.Parameter(value, requires_grad=tensor.requires_grad)
                _copy_hooks(tensor, value)
            self._replacements[id(tensor)] = value
        names = [name for group in groups for name in group.names]
        self._of_optimizers = dict(zip(names, remaining, strict=False))
        others = list(values[len(state.tensors) + len(names) :])
        count = 0 if scaler is None else 2
        self._of_scaler, gradients = others[:count], others[count:]
        self.gradients_before = dict(zip(state.gradients.names, gradients, strict=False))
        for name, tensor in state.tensors.items():
            if gradient_name(name) in self.gradients_before:
                self._replacements[id(tensor)].grad = self.gradients_before[gradient_name(name)]

    @contextlib.contextmanager
    def swap_tensors(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(swap_tensors(self._model, self._replacements))
            stack.enter_context(refuse_other_scalers(self.scaler))
            if self.scaler is not None:
                stack.enter_context(swap_scaler(self.scaler, *self._of_scaler))
            for number, (optimizer, group) in enumerate(zip(self.optimizers, self._groups, strict=False)):
                entries: dict[Any, dict[str, Any]] = {}
                for parameter, state in dict.items(optimizer.state):  # also one that lies on the servers
                    others = {k: v for k, v in state.items() if not isinstance(v, torch.Tensor)}
                    if id(parameter) in self._replacements:
                        entries[self._replacements[id(parameter)]] = others
                for name, (parameter, key) in group.entries.items():
                    owner = self._replacements[id(self._state.tensors[parameter])]
                    entries.setdefault(owner, {})[key] = self._of_optimizers[name]
                for counter, count in self._counts.items():
                    for parameter, key in counter.members if counter.optimizer == number else ():
                        entries.setdefault(self._replacements[id(self._state.tensors[parameter])], {})[key] = count
                settings = {key: value for key, value in self._settings.items() if key.optimizer == number}
                stack.enter_context(swap_optimizer(optimizer, self._replacements, entries, settings))
            self._groups_before = [[dict(group) for group in o.param_groups] for o in self.optimizers]
            yield

    def list_writes(self) -> tuple[list[Write], list[str]]:
        """(what the step leaves in numbers of the optimizers, names of settings that it changes by value)."""
        writes, constants = [], []
        owners = {name: self._replacements[id(tensor)] for name, tensor in self._state.tensors.items()}
        for optimizer, group, groups_before in zip(self.optimizers, self._groups, self._groups_before, strict=False):
            writes += list_number_writes(optimizer, group, owners)
            for members, before in zip(optimizer.param_groups, groups_before, strict=True):
                for key, value in members.items():
                    old = before.get(key)
                    if value is old or key == "params":
                        continue
                    if isinstance(value, torch.SymInt | torch.SymFloat):
                        writes.append(Write(Place(members, key, key), value, value.node.expr))
                    elif is_number(value) and value != old:
                        writes.append(Write(Place(members, key, key), value))
                        constants += [key] if is_number(old) else []
        return writes, constants

    def gradients(self) -> dict[str, Any]:
        """Gradients that the parameters hold now, by name."""
        gradients_by_name = {gradient_name(n): self._replacements[id(t)].grad for n, t in self._state.tensors.items()}
        return {name: gradient.detach() for name, gradient in gradients_by_name.items() if gradient is not None}

    def read(self, gradients: Mapping[str, Any]) -> list[Any]:
        """The state now, in the order of the inputs; of a gradient that is gone the one before."""
        paths = {f"model.{path}": reader for path, reader in _owners(self._model)}
        values = [paths[name]() for name in self._state.names]
        for optimizer, group in zip(self.optimizers, self._groups, strict=False):
            for parameter, key in group.entries.values():
                owner = self._replacements[id(self._state.tensors[parameter])]
                values.append(optimizer.state[owner][key])
        values += [] if self.scaler is None else values_of(self.scaler)
        values += [gradients.get(name, before) for name, before in self.gradients_before.items()]
        return [value.detach() for value in values]


def _copy_hooks(tensor: Any, replacement: Any) -> None:
    """What the user has registered on a parameter for its gradient."""
    for hook in (tensor._backward_hooks or {}).values():
        replacement.register_hook(hook)
    for hook in (tensor._post_accumulate_grad_hooks or {}).values():
        replacement.register_post_accumulate_grad_hook(hook)


@contextlib.contextmanager
def record_events(model: Any, optimizers: Sequence[Any]) -> Iterator[list[str]]:
    """What a traced step does, in order: "zero", "backward", "step"."""
    events: list[str] = []

    def wrap(event: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def record_and_call(*args: Any, **kwargs: Any) -> Any:
            events.append(event)
            return function(*args, **kwargs)

        return record_and_call

    with contextlib.ExitStack() as stack:
        backward = wrap("backward", torch.autograd.backward)
        stack.enter_context(mock.patch.object(torch.autograd, "backward", backward))
        for owner in (model, *optimizers):
            stack.enter_context(mock.patch.object(owner, "zero_grad", wrap("zero", owner.zero_grad)))
        for optimizer in optimizers:
            hook = optimizer.register_step_pre_hook(lambda *_: events.append("step"))
            stack.callback(hook.remove)
        yield events


def leaves_gradients(events: Sequence[str]) -> bool:
    """Whether a later call sees the gradients of this one: not where it clears them first, and has used them itself."""
    if "backward" not in events:
        return True
    first = events.index("backward")
    last = len(events) - 1 - events[::-1].index("backward")
    return not ("zero" in events[:first] and "step" in events[last:])


def _owners(model: Any) -> Iterator[tuple[str, Any]]:
    """(path, function that reads the parameter or buffer) of a module's tensors."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for tensors in (module._parameters, module._buffers):
            for name in tensors:
                yield f"{prefix}.{name}" if prefix else name, partial(tensors.get, name)
