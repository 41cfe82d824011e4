"""The arguments of a call of a step: which of them a program takes, by which names."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import torch
from torch.utils import _pytree

from shardwright.client.array_specs import array_spec
from shardwright.client.arrays import RemoteArray
from shardwright.client.frontends.torch.buckets import Bucket
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

#: Of which it is known without a look at their structure; the other ones are the same, slower.
_LEAVES = {torch.Tensor, RemoteTensor, RemoteArray, np.ndarray, float, int, bool, str, type(None)}


@dataclass(frozen=True, slots=True)
class _Layout:
    """What calls of one structure have in common. names: of the leaves."""

    tree: Any
    names: tuple[str, ...]


class BatchReader:
    """Reads the arguments of a step's calls; a structure that was seen before is not named again.

    skip: how many parameters the function takes before those of the call.
    """

    def __init__(self, function: Any, *, skip: int) -> None:
        self._function, self._skip = function, skip
        self._layouts: dict[Hashable, _Layout] = {}

    def read(self, args: Any, kwargs: Any, *, takes_types: bool) -> Batch:
        leaves: list[Any] = []
        structure, plain = _take_apart((args, kwargs), leaves)
        layout = self._layouts.get(structure)
        if layout is None:
            layout = self._layouts[structure] = self._name(args, kwargs, plain)
        return Batch(leaves, layout, structure, takes_types=takes_types)

    def _name(self, args: Any, kwargs: Any, plain: Any) -> _Layout:
        paths, tree = _pytree.tree_flatten_with_path(plain)
        _require_fitting(self._function, args, kwargs, self._skip)
        names = _argument_names(self._function, len(args), self._skip)
        return _Layout(tree, tuple(_name_of(path, names) for path, _ in paths))


class Batch:
    """The arguments of a call: tensors and floats are the program's, anything else is a constant of it."""

    def __init__(self, leaves: Sequence[Any], layout: _Layout, structure: Hashable, *, takes_types: bool) -> None:
        self.types: list[TensorType] = []
        self.values: list[Any] = []
        self.tensor_names: list[str] = []
        self.numbers: list[float] = []
        self.number_names: list[str] = []
        self._tree = layout.tree
        self._leaves = [self._add(leaf, name, takes_types) for leaf, name in zip(leaves, layout.names, strict=True)]
        self.key = (tuple(map(_hashable, self._leaves)), structure)

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

    def pad(self, buckets: Sequence[Bucket]) -> None:
        """Fills tensors up to the sizes of their buckets. Raises ArgumentError where one does not fit."""
        for number, name in enumerate(self.tensor_names):
            for bucket in buckets:
                if bucket.argument == name:
                    self.values[number], self.types[number] = bucket.pad(self.values[number], self.types[number])

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


def _take_apart(tree: Any, leaves: list[Any]) -> tuple[Hashable, Any]:
    """Appends the leaves; returns what is left of the tree, and the tree of which PyTorch lists just these leaves.

    That has mappings of other libraries (a tokenizer's batch) as dicts.
    """
    kind = type(tree)
    if kind in _LEAVES:
        leaves.append(tree)
        return None, tree
    if isinstance(tree, Mapping):
        structures, values = _take_all_apart(tree.values(), leaves)
        return (dict, tuple(tree), structures), dict(zip(tree, values, strict=True))
    if kind in (list, tuple):
        structures, values = _take_all_apart(tree, leaves)
        return (kind, structures), kind(values)
    others, spec = _pytree.tree_flatten(tree)
    leaves += others
    return None if spec.is_leaf() else repr(spec), tree


def _take_all_apart(trees: Iterable[Any], leaves: list[Any]) -> tuple[Hashable, list[Any]]:
    parts = [_take_apart(tree, leaves) for tree in trees]
    return tuple(structure for structure, _ in parts), [plain for _, plain in parts]


def _hashable(leaf: Any) -> Any:
    if leaf is TENSOR or leaf is _NUMBER:
        return id(leaf)
    try:
        hash(leaf)
    except TypeError:
        return repr(leaf)
    return (type(leaf), leaf)


def _require_fitting(function: Any, args: Any, kwargs: Any, skip: int) -> None:
    """Raises ArgumentError where a function does not take the model, perhaps an optimizer, and this batch."""
    is_module = isinstance(function, torch.nn.Module)
    try:
        signature = inspect.signature(function.forward if is_module else function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*[None] * skip, *args, **kwargs)
    except TypeError as error:
        first = "model, optimizer" if skip > 1 else "model"
        owner = type(function).__name__ if is_module else getattr(function, "__name__", "the step")
        raise ArgumentError(
            f"{owner}{signature} is called with {first} and a batch of {len(args) + len(kwargs)}: {error}",
            where=owner,
            remedy=f"pass a function of {first} and the batch: lambda {first}, x, y: …",
        ) from None


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
