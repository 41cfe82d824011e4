"""A result of a step as a tensor: on the servers until it is read."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from shardwright.client.arrays import RemoteArray
from shardwright.client.frontends.torch.dtypes import to_tensor, torch_type

_OPERATORS = (
    "abs add and bool contains eq float floordiv ge getitem gt index int invert iter le len lt "
    "matmul mod mul ne neg or pow radd rand rfloordiv rmatmul rmod rmul ror rpow rsub rtruediv sub truediv xor"
)


class RemoteTensor:
    """A tensor on the servers.

    `shape`, `dtype` and `array` are known at once. Any other attribute, operator or function of torch reads the
    contents, once, and is that of the tensor here: `loss.item()`, `float(loss)`, `torch.stack(losses)`. A step takes it
    as an argument without reading it.
    """

    __slots__ = ("_tensor", "array")

    def __init__(self, array: RemoteArray) -> None:
        self.array = array
        self._tensor: Any = None
        if array.size == 1:
            array.copy_to_host_async()

    @property
    def shape(self) -> Any:
        return torch.Size(self.array.shape)

    @property
    def dtype(self) -> Any:
        return torch_type(self.array.spec.dtype)

    def cpu(self) -> Any:
        """The contents, a tensor of this machine. Waits for them; raises the step's error if it failed."""
        if self._tensor is None:
            self._tensor = to_tensor(np.asarray(self.array))
        return self._tensor

    def detach(self) -> RemoteTensor:
        """Itself: it has no graph."""
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.cpu(), name)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        value = np.asarray(self.array)
        return value if dtype is None else value.astype(dtype)

    def __format__(self, spec: str) -> str:
        return format(self.cpu(), spec)

    def __str__(self) -> str:
        return str(self.cpu())

    def __repr__(self) -> str:
        return f"RemoteTensor(shape={list(self.array.shape)}, dtype={self.dtype})"

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        return function(*_read(args), **_read(kwargs or {}))


def _read(tree: Any) -> Any:
    if isinstance(tree, RemoteTensor):
        return tree.cpu()
    if isinstance(tree, dict):
        return {key: _read(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple) and not hasattr(tree, "_fields"):
        return type(tree)(_read(value) for value in tree)
    return tree


def _operator(name: str) -> Any:
    method = f"__{name}__"

    def apply(self: RemoteTensor, *args: Any) -> Any:
        return getattr(self.cpu(), method)(*_read(args))

    apply.__name__ = method
    return apply


for _name in _OPERATORS.split():
    setattr(RemoteTensor, f"__{_name}__", _operator(_name))
