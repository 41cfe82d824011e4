"""Element types and values of arrays, from PyTorch to numpy and back."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

from shardwright.errors import ArgumentError, UnsupportedProgramError

_NUMPY_TYPES: dict[Any, np.dtype] = {
    torch.bool: np.dtype("bool"),
    torch.uint8: np.dtype("uint8"),
    torch.uint16: np.dtype("uint16"),
    torch.uint32: np.dtype("uint32"),
    torch.uint64: np.dtype("uint64"),
    torch.int8: np.dtype("int8"),
    torch.int16: np.dtype("int16"),
    torch.int32: np.dtype("int32"),
    torch.int64: np.dtype("int64"),
    torch.float16: np.dtype("float16"),
    torch.bfloat16: jnp.dtype("bfloat16"),
    torch.float32: np.dtype("float32"),
    torch.float64: np.dtype("float64"),
    torch.complex64: np.dtype("complex64"),
    torch.complex128: np.dtype("complex128"),
    torch.float8_e4m3fn: jnp.dtype("float8_e4m3fn"),
    torch.float8_e5m2: jnp.dtype("float8_e5m2"),
}
_TORCH_TYPES = {numpy_type: torch_type for torch_type, numpy_type in _NUMPY_TYPES.items()}

#: Integers of one width carry the bits of types that PyTorch does not exchange with numpy.
_CARRIERS = {1: (torch.int8, np.int8), 2: (torch.int16, np.int16)}


def numpy_type(dtype: Any) -> np.dtype:
    """The numpy dtype of a torch dtype. Raises UnsupportedProgramError on one that programs do not have."""
    if dtype not in _NUMPY_TYPES:
        raise UnsupportedProgramError(
            f"programs hold no arrays of {dtype}", remedy="convert them to a standard floating or integer type"
        )
    return _NUMPY_TYPES[dtype]


def torch_type(dtype: np.dtype) -> Any:
    """The torch dtype of a numpy dtype."""
    return _TORCH_TYPES[np.dtype(dtype)]


def to_numpy(tensor: Any) -> np.ndarray:
    """Values of a tensor; shared with it where it lies in this machine's memory.

    Raises ArgumentError on a tensor without values (meta) and on a sparse one.
    """
    if tensor.is_meta:
        raise ArgumentError(
            f"a tensor of shape {list(tensor.shape)} is on torch.device('meta') and has no values",
            remedy="pass one with values",
        )
    if tensor.layout is not torch.strided:
        raise ArgumentError(f"a tensor has layout {tensor.layout}", remedy="pass tensor.to_dense()")
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    target = numpy_type(tensor.dtype)
    if target.kind in "biufc" and tensor.dtype is not torch.bfloat16:
        return np.asarray(tensor.numpy())
    carrier, _ = _CARRIERS[target.itemsize]
    return np.asarray(tensor.contiguous().view(carrier).numpy()).view(target)


def to_tensor(value: np.ndarray) -> Any:
    """A tensor of its own with these values."""
    value = np.array(value, order="C")
    if value.dtype.kind in "biufc" and value.dtype != np.dtype(jnp.bfloat16):
        return torch.from_numpy(value)
    _, carrier = _CARRIERS[value.dtype.itemsize]
    return torch.from_numpy(value.view(carrier)).view(torch_type(value.dtype))
