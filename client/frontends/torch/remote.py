"""A result of a step as a tensor: on the servers until it is read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np
import torch

from shardwright.client.arrays import RemoteArray
from shardwright.client.frontends.torch.checks import Outcome
from shardwright.client.frontends.torch.dtypes import to_numpy, to_tensor, torch_type
from shardwright.errors import ArgumentError


class RemoteTensor(torch.Tensor):  # type: ignore[misc, unused-ignore]
    """A tensor on the servers.

    It is a `torch.Tensor`: an operator, a method or a function of torch reads the contents, once, and gives what it
    gives of a tensor here: `loss.item()`, `torch.stack(losses)`, `f"{loss:.3f}"`, `copy.deepcopy(loss)`. Several that
    one function takes are read in one round trip. Shape and dtype, `detach()` and `clone()` read nothing. A step takes
    it as an argument without reading it. It has no gradient: the step computes those.

    array: its handle. outcome: whether the checks of its step held.
    """

    array: RemoteArray
    _outcome: Outcome | None
    _tensor: Any
    _version_read: int

    @staticmethod
    def __new__(cls, array: RemoteArray, outcome: Outcome | None = None) -> RemoteTensor:
        tensor = torch.Tensor._make_wrapper_subclass(cls, array.shape, dtype=torch_type(array.spec.dtype))
        tensor.array, tensor._outcome, tensor._tensor, tensor._version_read = array, outcome, None, 0
        if array.size == 1:
            array.copy_to_host_async()
        return tensor  # type: ignore[no-any-return, unused-ignore]

    def cpu(self, *args: Any, **kwargs: Any) -> Any:
        """The contents, a plain tensor of this machine. Waits for them; raises the step's error if it failed."""
        del args, kwargs
        return self._read()

    def detach(self) -> RemoteTensor:
        """Itself: it has no graph."""
        return self

    def clone(self, *args: Any, **kwargs: Any) -> Any:
        """Another tensor of the same contents, which are read when it is used."""
        return self._read().clone(*args, **kwargs) if self.is_changed else RemoteTensor(self.array, self._outcome)

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises ArgumentError: the step has computed the gradients, and updated what they are for."""
        del args, kwargs
        raise _no_gradient("backward() of a step's result")

    @property
    def is_changed(self) -> bool:
        """Whether it was changed in place since it was read, and differs from `array`."""
        return self._tensor is not None and self._tensor._version != self._version_read

    def _read(self) -> Any:
        if self._tensor is None:
            if self._outcome is not None:
                self._outcome.require()
            self._tensor = to_tensor(np.asarray(self.array))
            self._version_read = self._tensor._version
        return self._tensor

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy
        value = to_numpy(self._read())
        return value if dtype is None else value.astype(dtype)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if function in _OF_GRAPHS:
            raise _no_gradient(f"{function.__name__}() of a step's result")
        if function in _OF_TYPES and args[0]._tensor is None:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        return _call_here(function, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        return _call_here(function, args, kwargs)


#: What needs the graph that led to a tensor.
_OF_GRAPHS = (torch.autograd.grad, torch.autograd.backward)

#: What is known without the contents.
_OF_TYPES = {
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "layout", "ndim", "itemsize")),
    *(getattr(torch.Tensor, name).__get__ for name in ("requires_grad", "is_leaf", "grad_fn", "grad", "is_meta")),
    *(getattr(torch.Tensor, name).__get__ for name in ("is_cpu", "is_cuda", "is_sparse", "is_quantized", "is_nested")),
    *(getattr(torch.Tensor, name) for name in ("size", "dim", "numel", "nelement", "ndimension", "element_size")),
    *(getattr(torch.Tensor, name) for name in ("is_floating_point", "is_complex", "stride", "is_contiguous")),
}


def _call_here(function: Any, args: Any, kwargs: Any) -> Any:
    """The function of the contents, which are read together."""
    for tensor in _find_unread((args, kwargs)):
        tensor.array.copy_to_host_async()
    for tensor in _find_unread((args, kwargs)):
        tensor.array.block_until_ready()
    return function(*_replace(args), **_replace(kwargs or {}))


def _find_unread(tree: Any) -> Iterator[RemoteTensor]:
    if isinstance(tree, RemoteTensor):
        if tree._tensor is None:
            yield tree
    elif isinstance(tree, list | tuple | dict):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from _find_unread(value)


def _replace(tree: Any) -> Any:
    """Arguments with the contents in place of results of steps."""
    if isinstance(tree, RemoteTensor):
        return tree._read()
    if isinstance(tree, dict):
        return {key: _replace(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        values = [_replace(value) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    return tree


def _no_gradient(what: str) -> ArgumentError:
    return ArgumentError(
        f"{what}: the step has computed the gradients and updated the parameters",
        remedy="leave the call out; what is to be trained by it belongs into the function passed to `parallelize`, "
        "gradients that you want to see into its results",
    )
