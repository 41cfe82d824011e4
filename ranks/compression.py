"""What gradients are sent as: fewer bits, fewer elements, or factors of low rank.

`Compression.none`, `.fp16` and `.bf16` cast on the wire. `.top_k(ratio)` and `.power_sgd(rank)` belong to
`DistributedOptimizer`: what they leave out of a step is kept and added to the next (error feedback).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from shardwright.errors import OptionError
from shardwright.ranks.operations import is_float

_WIRE_TYPES = {"float16": np.dtype("float16"), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


@dataclass(frozen=True, slots=True)
class Cast:
    """Longer floats are cast to `type_name` on the wire, and back; "" casts nothing. Anything else stays as it is."""

    type_name: str

    def wire_type(self, dtype: np.dtype) -> np.dtype:
        """The type on the wire of an array of `dtype`."""
        if not self.type_name:
            return dtype
        wire = _WIRE_TYPES[self.type_name]
        return wire if is_float(dtype) and dtype.itemsize > wire.itemsize else dtype

    def compress(self, array: Any) -> tuple[Any, Any]:
        """An array of numpy, JAX or PyTorch as it is on the wire, and its own type for `decompress`."""
        if hasattr(array, "is_floating_point"):
            return (array.to(self._torch_type()) if self._is_longer(array) else array), array.dtype
        dtype = np.dtype(array.dtype)
        wire = self.wire_type(dtype)
        return (array if wire == dtype else array.astype(wire)), dtype

    def decompress(self, array: Any, dtype: Any) -> Any:
        """An array in its own type again."""
        if array.dtype == dtype:
            return array
        return array.to(dtype) if hasattr(array, "is_floating_point") else array.astype(dtype)

    def _is_longer(self, tensor: Any) -> bool:
        if not self.type_name or not tensor.is_floating_point():
            return False
        return bool(tensor.element_size() > _WIRE_TYPES[self.type_name].itemsize)

    def _torch_type(self) -> Any:
        import torch

        return getattr(torch, self.type_name)


@dataclass(frozen=True, slots=True)
class TopK:
    """The `ratio` of elements that are largest in magnitude, at least one of each array.

    Stich et al., "Sparsified SGD with Memory", NeurIPS 2018.
    """

    ratio: float

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise OptionError(f"{self.ratio!r} is no share", where="ratio", remedy="above 0, up to 1: top_k(0.01)")


@dataclass(frozen=True, slots=True)
class PowerSGD:
    """Matrices as products of two thin ones; vectors as they are.

    A gradient of shape [n, …] is the matrix [n, m]; n·m elements become rank · (n + m).
    Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression", NeurIPS 2019.
    """

    rank: int

    def __post_init__(self) -> None:
        if type(self.rank) is not int or self.rank < 1:
            raise OptionError(f"{self.rank!r} is no rank", where="rank", remedy="a whole number from 1: power_sgd(4)")


class Compression:
    """The ways to compress, by name."""

    none = Cast("")
    fp16 = Cast("float16")
    bf16 = Cast("bfloat16")
    top_k = TopK
    power_sgd = PowerSGD
