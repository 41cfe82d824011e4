"""What an optimizer will keep of each parameter, found by a step of it over fake tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch

from shardwright.client.frontends.torch.counters import FirstStates, is_number
from shardwright.client.frontends.torch.dtypes import numpy_type, to_numpy
from shardwright.client.frontends.torch.evaluation import base_name, source_node
from shardwright.client.frontends.torch.following import bring_in_all
from shardwright.client.frontends.torch.settings import Settings
from shardwright.client.frontends.torch.state import (
    ModelState,
    OptimizerState,
    host_values,
    swap_optimizer,
)
from shardwright.client.frontends.torch.tracing import Graph, TensorType, trace
from shardwright.errors import OptionError, UnsupportedProgramError

#: Optimizers whose usual form decides by the count of steps; `capturable` is the form without.
_CAPTURABLE = ("RAdam", "ASGD", "Rprop", "NAdam")


@contextlib.contextmanager
def without_decisions(optimizers: Sequence[Any]) -> Iterator[None]:
    """Optimizers in the form that decides nothing by values, on CPU tensors as well."""
    with contextlib.ExitStack() as settings:
        for optimizer in optimizers:
            if type(optimizer).__name__ not in _CAPTURABLE or not type(optimizer).__module__.startswith("torch."):
                continue
            module = __import__(type(optimizer).__module__, fromlist=[""])
            name = "_get_capturable_supported_devices"
            if hasattr(module, name):
                settings.enter_context(mock.patch.object(module, name, return_value=["cpu"]))
            for group in optimizer.param_groups:
                if "capturable" in group:
                    settings.callback(group.__setitem__, "capturable", group["capturable"])
                    group["capturable"] = True
        yield


@contextlib.contextmanager
def refuse_inner_state(optimizers: Sequence[Any]) -> Iterator[None]:
    """While a step is traced. Raises UnsupportedProgramError where an optimizer that stands in another one has tensors
    of its own: they would stay as they are.
    """
    inner = [
        (owner, name, member, {parameter: dict(entries) for parameter, entries in dict.items(member.state)})
        for owner, name, member in _list_inner(optimizers)
        if member.state is not owner.state
    ]
    yield
    for owner, name, member, before in inner:
        entries = list(dict.values(member.state))
        member.state.clear()
        member.state.update(before)
        if any(isinstance(value, torch.Tensor) for of_parameter in entries for value in of_parameter.values()):
            raise UnsupportedProgramError(
                f"{name} of {type(owner).__name__}, a {type(member).__name__}, keeps tensors of its own, which the "
                "servers do not",
                where=f"optimizer.{name}",
                remedy=f"use one without state, such as SGD without momentum; or pass {name} to parallelize, and write "
                f"what {type(owner).__name__} does around it into a whole step",
            )


def _list_inner(optimizers: Sequence[Any]) -> list[tuple[Any, str, Any]]:
    """(optimizer, name of an attribute, the optimizer that it is)."""
    return [
        (owner, name, member)
        for owner in optimizers
        for name, member in vars(owner).items()
        if isinstance(member, torch.optim.Optimizer)
    ]


def require_apart(optimizers: Sequence[Any]) -> None:
    """Raises OptionError where one of some optimizers stands in another one: its step would count twice."""
    passed = {id(optimizer) for optimizer in optimizers}
    for owner, name, member in _list_inner(optimizers):
        if id(member) in passed:
            raise OptionError(
                f"a {type(member).__name__} is passed that is {name} of the {type(owner).__name__} beside it",
                where="optimizer",
                remedy="pass one of both",
            )


def require_optimizer(optimizer: Any) -> None:
    """Raises OptionError on what is no optimizer, and on one whose step cannot be one program."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptionError(
            f"optimizer is a {type(optimizer).__name__}", where="optimizer", remedy="pass a torch.optim.Optimizer"
        )
    if type(optimizer).__name__ == "LBFGS":
        raise OptionError(
            "LBFGS evaluates the loss as often as its values ask for, which is no fixed program",
            where="optimizer",
            remedy="use another optimizer",
        )
    if any("lr" not in group for group in optimizer.param_groups):
        raise OptionError(
            "a parameter group has no 'lr'", where="optimizer.param_groups", remedy="set it, to 1.0 if unused"
        )


def find_state(
    optimizer: Any, state: OptimizerState, names: Mapping[int, str], model: Any, of_model: ModelState
) -> dict[str, Any]:
    """Fills names and types of `state`; returns the values to start from, by name: numpy arrays.

    Tensors that the optimizer holds already keep their values. names: of the module's parameters, by `id()`; others are
    left alone.
    """
    state_tensors: dict[str, Any] = {}
    for parameter, entries in optimizer.state.items():
        for key, value in entries.items() if id(parameter) in names else ():
            if is_number(value):
                state.numbers[names[id(parameter)], key] = value
            if isinstance(value, torch.Tensor):
                name = state.name_of(names[id(parameter)], key)
                state.entries[name] = (names[id(parameter)], key)
                state.types[name] = TensorType(tuple(value.shape), value.dtype)
                state_tensors[name] = value
    values = host_values(state_tensors)
    fresh = [
        name
        for group in optimizer.param_groups
        for name in (names.get(id(p)) for p in group["params"] if p.requires_grad and not optimizer.state.get(p))
        if name is not None
    ]
    if fresh:
        values.update(_initial_values(optimizer, state, model, of_model.tensors, of_model.types, fresh))
    return values


def _initial_values(
    optimizer: Any,
    state: OptimizerState,
    model: Any,
    tensors: Mapping[str, Any],
    types: Mapping[str, TensorType],
    names: Sequence[str],
) -> dict[str, Any]:
    """Of parameters that have no state yet: those that its first step makes, before it updates them."""
    state_keys: list[tuple[str, str]] = []
    examples = _find_examples(optimizer, tensors, types, names)
    names = list(dict.fromkeys(examples.values()))
    firsts: dict[tuple[str, str], float | None] = {}
    numbers: dict[tuple[str, str], float] = {}
    settings, _ = Settings([optimizer]).read()

    def first_step(values: list[Any]) -> list[Any]:
        parameters = [torch.nn.Parameter(value) for value in values[: len(names)]]
        replacements = {id(tensor): tensor for tensor in tensors.values()}
        for name, parameter, gradient in zip(names, parameters, values[len(names) : 2 * len(names)], strict=True):
            parameter.grad = gradient
            replacements[id(tensors[name])] = parameter
        with (
            without_decisions([optimizer]),
            refuse_inner_state([optimizer]),
            swap_optimizer(optimizer, replacements, {}, dict(zip(settings, values[2 * len(names) :], strict=True))),
            _only(optimizer, {id(parameter) for parameter in parameters}),
        ):
            optimizer.state = FirstStates()
            _step_once(optimizer)
            outputs = []
            for name, parameter in zip(names, parameters, strict=True):
                entries = optimizer.state.get(parameter, {})
                for key, value in entries.items():
                    first = entries.first[key]
                    if isinstance(value, torch.Tensor):
                        state_keys.append((name, key))
                        firsts[name, key] = first if is_number(first) else None
                        outputs.append(value)
                    elif is_number(first) or isinstance(first, torch.SymInt | torch.SymFloat):
                        numbers[name, key] = first if is_number(first) else first.node.hint
        return outputs

    parameter_types = [types[name] for name in names]
    graph = trace(
        first_step, [*parameter_types, *parameter_types, *settings.values()], state_count=0, model=model, optimizers=[],
        name=f"{type(optimizer).__name__}.step",
    )  # fmt: skip
    starts: dict[str, dict[str, tuple[TensorType, Any]]] = {}
    for (parameter, key), output in zip(state_keys, graph.outputs, strict=True):
        fake = output.meta["val"]
        number, source = firsts[parameter, key], _parameter_of(graph, output, names)
        kind = TensorType(tuple(fake.shape), fake.dtype)
        if number is not None:
            value = np.full(kind.shape, number, numpy_type(kind.dtype))
        elif source is not None:
            bring_in_all([tensors[source]])
            value = host_values({source: tensors[source]})[source].copy()
        else:
            value = _start(graph, output, optimizer, key, state.name_of(parameter, key))
        starts.setdefault(parameter, {})[key] = kind, value
    values = {}
    for parameter, example in examples.items():
        for key, (kind, value) in starts.get(example, {}).items():
            name = state.name_of(parameter, key)
            state.entries[name], state.types[name], values[name] = (parameter, key), kind, value
        state.numbers |= {(parameter, key): number for (owner, key), number in numbers.items() if owner == example}
    return values


def _step_once(optimizer: Any) -> None:
    """A step of gradients that are there; of one that asks for a closure, one that computes nothing."""
    try:
        optimizer.step()
    except (TypeError, AssertionError, RuntimeError):
        optimizer.step(lambda: torch.zeros(()))


def _parameter_of(graph: Graph, output: Any, names: Sequence[str]) -> str | None:
    """The parameter of which a tensor of the state is a copy at first."""
    places = [node for node in graph.nodes.nodes if node.op == "placeholder"][: len(names)]
    creation = _find_creation(output)
    return names[places.index(creation)] if creation in places else None


def _find_examples(
    optimizer: Any, tensors: Mapping[str, Any], types: Mapping[str, TensorType], names: Sequence[str]
) -> dict[str, str]:
    """Parameter → the one whose state starts like its. PyTorch's own optimizers treat all of a group alike."""
    if not type(optimizer).__module__.startswith("torch.optim."):
        return {name: name for name in names}
    numbers = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    first: dict[tuple[int, TensorType], str] = {}
    return {name: first.setdefault((numbers[id(tensors[name])], types[name]), name) for name in names}


@contextlib.contextmanager
def _only(optimizer: Any, parameter_ids: set[int]) -> Iterator[None]:
    """The optimizer over some of its parameters."""
    saved = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if id(parameter) in parameter_ids]
    try:
        yield
    finally:
        for group, parameters in zip(optimizer.param_groups, saved, strict=True):
            group["params"] = parameters


def _start(graph: Graph, output: Any, optimizer: Any, key: str, name: str) -> Any:
    """The value with which the optimizer made a tensor of its state, before any update."""
    creation = _find_creation(output)
    fake = creation.meta["val"]
    shape, dtype = tuple(fake.shape), numpy_type(fake.dtype)
    operator = str(creation.target)
    if "zeros" in operator or "empty" in operator:
        return np.zeros(shape, dtype)
    if "ones" in operator:
        return np.ones(shape, dtype)
    if creation.op == "get_attr" or "lift_fresh" in operator:
        source = creation if creation.op == "get_attr" else creation.args[0]
        return np.array(to_numpy(graph.constants[source.target]))
    if operator.startswith(("aten.full", "aten.scalar_tensor", "aten.new_full")):
        value = creation.args[0] if "scalar_tensor" in operator else creation.args[-1]
        return np.full(shape, _number(value), dtype)
    if type(optimizer).__name__ == "SGD" and not any(group.get("dampening") for group in optimizer.param_groups):
        return np.zeros(shape, dtype)  # momentum · 0 + gradient is the first gradient
    raise UnsupportedProgramError(
        f"{type(optimizer).__name__} starts {key!r} from the first gradient or another value of the step",
        where=name,
        remedy="use dampening=0, or an optimizer that starts from a constant",
    )


def _find_creation(node: Any) -> Any:
    """The node that creates the tensor of `node`, before updates in place and copies."""
    while isinstance(node.target, torch._ops.OpOverload):
        source = node.args[0] if base_name(node.target) == "clone" else source_node(node)
        if source is None:
            break
        node = source
    return node


def _number(value: Any) -> float:
    """A number, or that of a symbol of the call (a rate) now."""
    symbol = value.meta["val"] if isinstance(value, torch.fx.Node) else value
    return float(symbol.node.hint) if isinstance(symbol, torch.SymFloat) else float(symbol)
