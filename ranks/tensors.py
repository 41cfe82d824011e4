"""Arrays of numpy, JAX and PyTorch, and Python's numbers: read as they are, and given back as the same kind.

On CPUs reading copies nothing (buffers, DLPack). Arrays of JAX on accelerators stay there where a reduction takes them.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.errors import CollectiveError

_KINDS = "numbers, numpy arrays, jax.Arrays or torch.Tensors"


TensorType = tuple[tuple[int, ...], np.dtype]


def describe_type(shape: Sequence[object], dtype: np.dtype) -> str:
    """`float32[2,3]`."""
    return f"{dtype}[{','.join(map(str, shape))}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One value of a collective.

    shape, dtype: numpy's. host: reads the contents, contiguous in memory. device: the array itself, where it lies on
    one accelerator. restore: makes a result the kind of the input. reducible: whether elements are numbers.
    is_integer: it is one of Python's, whose sums do not wrap around.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    host: Callable[[], np.ndarray]
    restore: Callable[[Any], Any]
    device: jax.Array | None = None
    reducible: bool = True
    is_integer: bool = False

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.size * self.dtype.itemsize

    @property
    def type(self) -> TensorType:
        """Shape and element type."""
        return self.shape, self.dtype


def read(value: Any, where: str) -> Tensor:
    """The tensor of a value. where: its path, for errors. Raises CollectiveError where it is none."""
    if type(value) is np.ndarray:
        return _of_numpy(value, where)
    if isinstance(value, jax.Array):
        return _of_jax(value, where)
    if isinstance(value, np.generic):
        array = np.asarray(value)
        return _plain(array, lambda result: np.asarray(result)[()])
    if isinstance(value, bool | int | float | complex):
        return _of_number(value, where)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _of_torch(value, torch, where)
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is not None and _is_tensorflow(value, tensorflow):
        return _plain(np.asarray(value.numpy()), tensorflow.convert_to_tensor)
    raise CollectiveError(f"a {_type_name(value)} is no array", where=where, remedy=f"pass {_KINDS}, or trees of them")


def _is_tensorflow(value: Any, tensorflow: Any) -> bool:
    """Whether it is a tensor or variable of TensorFlow with a value, not one of a graph."""
    kinds = tuple(vars(tensorflow)[name] for name in ("Tensor", "Variable") if name in vars(tensorflow))
    return isinstance(value, kinds) and hasattr(value, "numpy")


def read_all(values: Sequence[Any], paths: Sequence[str]) -> list[Tensor]:
    """The tensors of the leaves of a tree."""
    return [read(value, path) for value, path in zip(values, paths, strict=True)]


def _type_name(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _plain(array: np.ndarray, restore: Callable[[Any], Any]) -> Tensor:
    return Tensor(
        shape=array.shape,
        dtype=array.dtype,
        host=lambda: np.ascontiguousarray(array).reshape(array.shape),
        restore=restore,
    )


def _of_numpy(array: np.ndarray, where: str) -> Tensor:
    if array.dtype.hasobject:
        remedy = "send it with broadcast_object or allgather_object"
        raise CollectiveError("an array of Python objects is no array of numbers", where=where, remedy=remedy)
    if array.dtype.isnative:
        return _plain(array, np.asarray)
    native, original = array.astype(array.dtype.newbyteorder("=")), array.dtype
    return _plain(native, lambda result: np.asarray(result).astype(original))


def _of_number(value: bool | int | float | complex, where: str) -> Tensor:
    try:
        array = np.asarray(value)
        if array.dtype.hasobject or (type(value) is int and array.dtype != np.int64):
            raise OverflowError
    except OverflowError:
        raise CollectiveError(
            f"{value} is above 64 bits", where=where, remedy="send it with broadcast_object"
        ) from None
    tensor = _plain(array, lambda result: np.asarray(result).tolist())
    return replace(tensor, is_integer=type(value) is int)


# ---- JAX -------------------------------------------------------------------------
def _of_jax(array: jax.Array, where: str) -> Tensor:
    if isinstance(array, jax.core.Tracer):
        remedy = "inside a jitted function all leaves must be traced: use sw.ranks.jit, or call this outside"
        raise CollectiveError("a value of a traced function stands beside one of none", where=where, remedy=remedy)
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return _of_key(array, where)
    if not array.is_fully_addressable:
        raise CollectiveError(
            "this jax.Array lies on several ranks already",
            where=where,
            remedy="reduce it in a jitted function, or pass this rank's part: array.addressable_data(0)",
        )
    sharding, dtype = array.sharding, np.dtype(array.dtype)
    devices: list[Any] = list(sharding.device_set)

    def restore(result: Any) -> Any:
        keeps_sharding = len(devices) > 1 and np.shape(result) == array.shape
        target = devices[0] if len(devices) == 1 else sharding if keeps_sharding else None
        with jax.enable_x64(True) if dtype.itemsize >= 8 else contextlib.nullcontext():
            return jax.device_put(result, target)

    on_accelerator = len(devices) == 1 and devices[0].platform != "cpu" and dtype.itemsize < 8
    return Tensor(
        shape=array.shape,
        dtype=dtype,
        host=lambda: np.ascontiguousarray(np.asarray(array)).reshape(array.shape),
        restore=restore,
        device=array if on_accelerator else None,
    )


def _of_key(array: jax.Array, where: str) -> Tensor:
    implementation = jax.random.key_impl(array)
    data = _of_jax(jax.random.key_data(array), where)
    return Tensor(
        shape=data.shape,
        dtype=data.dtype,
        host=data.host,
        restore=lambda result: jax.random.wrap_key_data(data.restore(result), impl=implementation),
        reducible=False,
    )


# ---- PyTorch ---------------------------------------------------------------------
def _of_torch(tensor: Any, torch: Any, where: str) -> Tensor:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise CollectiveError("only dense torch.Tensors are sent", where=where, remedy="call tensor.to_dense() first")
    plain = tensor.detach()
    is_bfloat16 = tensor.dtype is torch.bfloat16
    if is_bfloat16:
        import ml_dtypes

        dtype = np.dtype(ml_dtypes.bfloat16)
    else:
        dtype = torch.empty(0, dtype=tensor.dtype).numpy().dtype

    def host() -> np.ndarray:
        local = plain.resolve_conj().resolve_neg().cpu().contiguous()
        return np.asarray(local.view(torch.int16).numpy().view(dtype) if is_bfloat16 else local.numpy())

    def restore(result: Any) -> Any:
        array = np.require(np.asarray(result), requirements=["C", "W"])
        host_tensor = (
            torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) if is_bfloat16 else torch.from_numpy(array)
        )
        return host_tensor.to(tensor.device)

    return Tensor(shape=tuple(tensor.shape), dtype=dtype, host=host, restore=restore)
