"""A result of a step as a tensor: on the servers until it is read."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from shardwright.client.frontends.remote_value import RemoteValue, read_values
from shardwright.client.frontends.torch.dtypes import to_tensor, torch_type


class RemoteTensor(RemoteValue):
    """A tensor on the servers.

    `shape`, `dtype` and `array` are known at once. Any other attribute, operator or function of torch reads the
    contents, once, and is that of the tensor here: `loss.item()`, `float(loss)`, `torch.stack(losses)`. A step takes it
    as an argument without reading it.
    """

    __slots__ = ()

    @property
    def shape(self) -> Any:
        return torch.Size(self.array.shape)

    @property
    def dtype(self) -> Any:
        return torch_type(self.array.spec.dtype)

    def cpu(self) -> Any:
        """The contents, a tensor of this machine. Waits for them; raises the step's error if it failed."""
        return self._read()

    def detach(self) -> RemoteTensor:
        """Itself: it has no graph."""
        return self

    def _to_tensor(self, value: np.ndarray) -> Any:
        return to_tensor(value)

    def __contains__(self, value: Any) -> Any:
        return read_values(value) in self.cpu()

    def __format__(self, spec: str) -> str:
        return format(self.cpu(), spec)

    def __repr__(self) -> str:
        return f"RemoteTensor(shape={list(self.array.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        return function(*read_values(args), **read_values(kwargs or {}))
