"""A result of a step as a tensor: on the servers until it is read."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from shardwright.client.arrays import RemoteArray

_OPERATORS = (
    "abs add and bool eq float floordiv ge getitem gt index int invert iter le len lt "
    "matmul mod mul ne neg or pow radd rand rfloordiv rmatmul rmod rmul ror rpow rsub rtruediv sub truediv xor"
)


class RemoteTensor:
    """A tensor on the servers.

    `shape`, `dtype` and `array` are known at once. Any other attribute or operator reads the contents, once, and
    is that of the tensor here: `loss.numpy()`, `float(loss)`, `loss + 1`. TensorFlow's functions take it as a tensor. A
    step takes it as an argument without reading it.
    """

    __slots__ = ("_tensor", "array")

    def __init__(self, array: RemoteArray) -> None:
        self.array = array
        self._tensor: Any = None
        if array.size == 1:
            array.copy_to_host_async()

    @property
    def shape(self) -> Any:
        return tf.TensorShape(self.array.shape)

    @property
    def dtype(self) -> Any:
        return tf.as_dtype(self.array.spec.dtype)

    def read(self) -> Any:
        """The contents, a tensor of this machine. Waits for them; raises the step's error if it failed."""
        if self._tensor is None:
            self._tensor = tf.constant(np.asarray(self.array))
        return self._tensor

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> Any:
        return tf.convert_to_tensor(self.read(), dtype=dtype, name=name)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        value = np.asarray(self.array)
        return value if dtype is None else value.astype(dtype)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.read(), name)

    def __format__(self, spec: str) -> str:
        return format(self.read().numpy(), spec)

    def __str__(self) -> str:
        return str(self.read())

    def __repr__(self) -> str:
        return f"RemoteTensor(shape={list(self.array.shape)}, dtype={self.dtype.name})"

    __hash__ = object.__hash__


def _operator(name: str) -> Any:
    method = f"__{name}__"

    def apply(self: RemoteTensor, *args: Any) -> Any:
        values = [arg.read() if isinstance(arg, RemoteTensor) else arg for arg in args]
        return getattr(self.read(), method)(*values)

    apply.__name__ = method
    return apply


for _name in _OPERATORS.split():
    setattr(RemoteTensor, f"__{_name}__", _operator(_name))
