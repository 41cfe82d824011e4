"""A result of a step in a framework's own terms: on the servers until it is read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from shardwright.client.arrays import RemoteArray

_OPERATORS = (
    "abs add and bool eq float floordiv ge getitem gt index int invert iter le len lt "
    "matmul mod mul ne neg or pow radd rand rfloordiv rmatmul rmod rmul ror rpow rsub rtruediv sub truediv xor"
)


class RemoteValue(ABC):
    """A tensor on the servers. Any attribute or operator that a subclass does not have reads the contents, once.

    array: its handle. A step takes it as an argument without reading it.
    """

    __slots__ = ("_tensor", "array")

    def __init__(self, array: RemoteArray) -> None:
        self.array = array
        self._tensor: Any = None
        if array.size == 1:
            array.copy_to_host_async()

    @abstractmethod
    def _to_tensor(self, value: np.ndarray) -> Any:
        """The framework's tensor of these contents."""

    def _read(self) -> Any:
        """The contents, a tensor of this machine. Waits for them; raises the step's error if it failed."""
        if self._tensor is None:
            self._tensor = self._to_tensor(np.asarray(self.array))
        return self._tensor

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._read(), name)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        value = np.asarray(self.array)
        return value if dtype is None else value.astype(dtype)

    def __str__(self) -> str:
        return str(self._read())

    __hash__ = object.__hash__


def read_values(tree: Any) -> Any:
    """Arguments with the contents in place of remote values."""
    if isinstance(tree, RemoteValue):
        return tree._read()
    if isinstance(tree, dict):
        return {key: read_values(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple) and not hasattr(tree, "_fields"):
        return type(tree)(read_values(value) for value in tree)
    return tree


def _operator(name: str) -> Any:
    method = f"__{name}__"

    def apply(self: RemoteValue, *args: Any) -> Any:
        return getattr(self._read(), method)(*read_values(args))

    apply.__name__ = method
    return apply


for _name in _OPERATORS.split():
    setattr(RemoteValue, f"__{_name}__", _operator(_name))
