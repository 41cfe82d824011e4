"""The arguments of a call of a step: which of them a program takes, by which names."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import torch
from torch.utils import _pytree

from shardwright.client.array_specs import array_spec
from shardwright.client.arrays import RemoteArray
from shardwright.client.frontends.torch.dtypes import numpy_type, to_numpy, torch_type
from shardwright.client.frontends.torch.remote import RemoteTensor
from shardwright.client.frontends.torch.tracing import TensorType
from shardwright.errors import ArgumentError


class _Tensor:
    """Stands for a tensor in a structure of values."""

    def __repr__(self) -> str:
        return "tensor"


TENSOR = _Tensor()
_NUMBER = type("_Number", (), {"__repr__": lambda self: "number"})()


class Batch:
    """The arguments of a call: tensors and floats are the program's, anything else is a constant of it."""

    def __init__(self, function: Any, args: Any, kwargs: Any, *, skip: int, takes_types: bool) -> None:
        self.types: list[TensorType] = []
        self.values: list[Any] = []
        self.tensor_names: list[str] = []
        self.numbers: list[float] = []
        self.number_names: list[str] = []
        paths, self._tree = _pytree.tree_flatten_with_path((_plain(args), _plain(kwargs)))
        names = _argument_names(function, len(args), skip)
        self._leaves: list[Any] = []
        for path, leaf in paths:
            self._leaves.append(self._add(leaf, _name_of(path, names), takes_types))
        self.key = (tuple(map(_hashable, self._leaves)), repr(self._tree))

    def _add(self, leaf: Any, name: str, takes_types: bool) -> Any:
        if isinstance(leaf, float):
            self.numbers.append(leaf)
            self.number_names.append(name)
            return _NUMBER
        if isinstance(leaf, RemoteTensor):
            leaf = leaf.cpu() if leaf.is_changed else leaf.array
        value: Any
        if isinstance(leaf, RemoteArray):
            value, kind = leaf, TensorType(tuple(leaf.shape), torch_type(leaf.spec.dtype))
        elif isinstance(leaf, jax.ShapeDtypeStruct):
            value, kind = leaf, TensorType(tuple(leaf.shape), torch_type(leaf.dtype))
        elif isinstance(leaf, torch.Tensor):
            kind = TensorType(tuple(leaf.shape), leaf.dtype)
            value = array_spec(kind.shape, numpy_type(leaf.dtype)).aval if takes_types else _values(leaf, name)
        elif isinstance(leaf, np.ndarray | np.generic | jax.Array):
            value = np.asarray(leaf)
            kind = TensorType(value.shape, torch_type(value.dtype))
        elif isinstance(leaf, bool | int | str | bytes | None) or callable(leaf) or isinstance(leaf, torch.dtype):
            return leaf
        else:
            raise ArgumentError(
                f"a {type(leaf).__name__} is no argument of a step", where=name, remedy="pass tensors and numbers"
            )
        self.types.append(kind)
        self.values.append(value)
        self.tensor_names.append(name)
        return TENSOR

    def fill(self, values: Sequence[Any]) -> tuple[Any, Any]:
        """(args, kwargs) with these numbers, then tensors, in place of the call's."""
        numbers, tensors = iter(values[: len(self.numbers)]), iter(values[len(self.numbers) :])
        leaves = [
            next(tensors) if leaf is TENSOR else next(numbers) if leaf is _NUMBER else leaf for leaf in self._leaves
        ]
        return _pytree.tree_unflatten(leaves, self._tree)  # type: ignore[no-any-return]


def _values(tensor: Any, name: str) -> np.ndarray:
    try:
        return to_numpy(tensor)
    except ArgumentError as error:
        raise ArgumentError(error.message, where=name, remedy=error.remedy) from None


def _plain(tree: Any) -> Any:
    """Mappings of other libraries (a tokenizer's batch) as dicts."""
    if isinstance(tree, Mapping):
        return {key: _plain(value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_plain(value) for value in tree)
    return tree


def _hashable(leaf: Any) -> Any:
    if leaf is TENSOR or leaf is _NUMBER:
        return id(leaf)
    try:
        hash(leaf)
    except TypeError:
        return repr(leaf)
    return (type(leaf), leaf)


def _argument_names(function: Any, count: int, skip: int) -> list[str]:
    """Names of the batch's positions, by the function's signature."""
    try:
        parameters = list(inspect.signature(function).parameters.values())[skip:]
    except (TypeError, ValueError):
        parameters = []
    names: list[str] = []
    for parameter in parameters:
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
        elif parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}[{n}]" for n in range(count - len(names))]
            break
    return names + [f"batch[{n}]" for n in range(len(names), count)]


def _name_of(path: Sequence[Any], names: Sequence[str]) -> str:
    kind, first, *rest = path
    name = names[first.idx] if kind.idx == 0 else str(first.key)
    return f"{name}{_pytree.keystr(tuple(rest))}"
