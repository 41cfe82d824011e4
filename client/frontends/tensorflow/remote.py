"""A result of a step as a tensor: on the servers until it is read."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from shardwright.client.frontends.remote_value import RemoteValue


class RemoteTensor(RemoteValue):
    """A tensor on the servers.

    `shape`, `dtype` and `array` are known at once. Any other attribute or operator reads the contents, once, and
    is that of the tensor here: `loss.numpy()`, `float(loss)`, `loss + 1`. TensorFlow's functions take it as a tensor. A
    step takes it as an argument without reading it.
    """

    __slots__ = ()

    @property
    def shape(self) -> Any:
        return tf.TensorShape(self.array.shape)

    @property
    def dtype(self) -> Any:
        return tf.as_dtype(self.array.spec.dtype)

    def read(self) -> Any:
        """The contents, a tensor of this machine. Waits for them; raises the step's error if it failed."""
        return self._read()

    def _to_tensor(self, value: np.ndarray) -> Any:
        return tf.constant(value)

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> Any:
        return tf.convert_to_tensor(self.read(), dtype=dtype, name=name)

    def __format__(self, spec: str) -> str:
        return format(self.read().numpy(), spec)

    def __repr__(self) -> str:
        return f"RemoteTensor(shape={list(self.array.shape)}, dtype={self.dtype.name})"
