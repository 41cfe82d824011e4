"""Reductions as Horovod has them, where it computes what `sw.ranks` refuses or does otherwise.

| | here | `sw.ranks` |
|---|---|---|
| average of integers | the sum, divided and cut towards zero, in the integer's type | an error |
| scale factors on integers | in float64, cut towards zero | an error |
| scale factors on short floats | in float32 | in their own type |
| sum, product of booleans | any, all | an error |
| average where ranks have joined | divided by all ranks of the set | by those that have data |
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from shardwright import ranks
from shardwright.errors import ShardwrightWarning
from shardwright.ranks import ReduceOp
from shardwright.ranks.compression import Cast

_BOOLEANS = {ReduceOp.SUM: ReduceOp.MAX, ReduceOp.PRODUCT: ReduceOp.MIN}
_SHORT = ("float16", "bfloat16")


class IntegerAverageWarning(ShardwrightWarning):
    """An average of integers is cut towards zero."""


class _Process:
    has_warned = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """`postscale · reduce(prescale · value)`, and what carries it out: `ranks.allreduce` or `ranks.reducescatter`."""

    function: Callable[..., Any]
    op: ReduceOp
    name: str
    process_set: ranks.ProcessSet | None
    prescale: float = 1.0
    postscale: float = 1.0
    compression: Cast | None = None

    def __call__(self, value: Any) -> Any:
        """The reduction of a tree, each leaf by its type; leaves of one kind go together."""
        leaves, tree = jax.tree.flatten(value)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return self._run(value, self.op, self.prescale, self.postscale)
        kinds = [self._kind(leaf) for leaf in leaves]
        if set(kinds) <= {"plain"}:
            whole = self._run(value, self.op, self.prescale, self.postscale)
            return jax.tree.unflatten(tree, self._over_all(jax.tree.leaves(whole)))
        results = list(leaves)
        for kind in sorted(set(kinds)):
            at = [index for index, other in enumerate(kinds) if other == kind]
            for index, result in zip(at, self._reduce(kind, [leaves[index] for index in at]), strict=True):
                results[index] = result
        return jax.tree.unflatten(tree, results)

    def _kind(self, leaf: Any) -> str:
        name = _type_name(leaf)
        is_scaled = (self.prescale, self.postscale) != (1.0, 1.0)
        if name == "bool" and self.op in _BOOLEANS:
            return "bool"
        if name.lstrip("u").startswith("int") and (is_scaled or self.op is ReduceOp.AVERAGE):
            return "integer"
        return "short" if name in _SHORT and is_scaled else "plain"

    def _reduce(self, kind: str, leaves: list[Any]) -> list[Any]:
        if kind == "bool":
            return self._run(leaves, _BOOLEANS[self.op], 1.0, 1.0)  # type: ignore[no-any-return]
        if kind == "integer":
            return self._reduce_integers(leaves)
        if kind == "short":
            scaled = [_scale(leaf, self.prescale, "float32") for leaf in leaves]
            reduced = self._over_all(self._run(scaled, self.op, 1.0, 1.0))
            return [_scale(leaf, self.postscale, "float32") for leaf in reduced]
        return self._over_all(self._run(leaves, self.op, self.prescale, self.postscale))

    def _reduce_integers(self, leaves: list[Any]) -> list[Any]:
        factor, op = self.postscale, self.op
        if op is ReduceOp.AVERAGE:
            _warn_of_integers()
            op = ReduceOp.SUM
        reduced = self._run([_scale(leaf, self.prescale, "float64") for leaf in leaves], op, 1.0, 1.0)
        if self.op is not ReduceOp.AVERAGE:
            return [_scale(leaf, factor, "float64") for leaf in reduced]
        size = (self.process_set or ranks.world()).size()
        if factor == 1.0:
            return [_divide(leaf, size) for leaf in reduced]
        return [_scale(leaf, factor / size, "float64") for leaf in reduced]

    def _over_all(self, leaves: list[Any]) -> list[Any]:
        """Averages over the ranks that have data as averages over all, to which the others give nothing."""
        active = (self.process_set or ranks.world()).last_active
        if self.op is not ReduceOp.AVERAGE or all(active):
            return leaves
        with jax.enable_x64(True):
            return [_of_type(leaf * sum(active) / len(active), leaf) for leaf in leaves]

    def _run(self, value: Any, op: ReduceOp, prescale: float, postscale: float) -> Any:
        with_cast = {} if self.compression is None else {"compression": self.compression}
        return self.function(
            value,
            op,
            name=self.name,
            process_set=self.process_set,
            prescale_factor=prescale,
            postscale_factor=postscale,
            **with_cast,
        )


def _warn_of_integers() -> None:
    if not _Process.has_warned:
        _Process.has_warned = True
        warnings.warn(
            "an average of integers is cut towards zero, as Horovod's; cast to a float type to keep the rest",
            IntegerAverageWarning,
            stacklevel=2,
        )


# ---- leaves of any kind -----------------------------------------------------------
def _type_name(leaf: Any) -> str:
    """`float32`, `int64`, `bool`, of an array of any library or a number; "" of anything else."""
    if isinstance(leaf, bool | int | float):
        return "bool" if isinstance(leaf, bool) else "int64" if isinstance(leaf, int) else "float64"
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        return ""
    return str(getattr(dtype, "name", dtype)).removeprefix("torch.")


def _is_torch(leaf: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(leaf, torch.Tensor)


def _scale(leaf: Any, factor: float, wide: str) -> Any:
    """`leaf * factor`, computed in a wide type and cast back: integers are cut towards zero."""
    if factor == 1.0:
        return leaf
    if _is_torch(leaf):
        import torch

        return (leaf.detach().to(getattr(torch, wide)) * factor).to(leaf.dtype)
    with jax.enable_x64(True) if isinstance(leaf, jax.Array) else contextlib.nullcontext():
        array = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
        scaled = (array.astype(wide) * np.dtype(wide).type(factor)).astype(array.dtype)
        return _of_type(scaled, leaf)


def _divide(leaf: Any, divisor: int) -> Any:
    """An integer's quotient, cut towards zero."""
    if _is_torch(leaf):
        import torch

        return torch.div(leaf, divisor, rounding_mode="trunc")
    with jax.enable_x64(True) if isinstance(leaf, jax.Array) else contextlib.nullcontext():
        array = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
        below = array // array.dtype.type(divisor)  # cut downwards
        is_low = (array < 0) & (below * array.dtype.type(divisor) != array)
        return _of_type((below + is_low).astype(array.dtype), leaf)


def _of_type(result: Any, leaf: Any) -> Any:
    """A result as the kind of number or array that went in."""
    if isinstance(leaf, bool | int | float):
        return type(leaf)(result)
    if _is_torch(leaf) or isinstance(leaf, jax.Array):
        return result if result.dtype == leaf.dtype else result.astype(leaf.dtype)
    if type(leaf).__module__.startswith("tensorflow."):
        import tensorflow

        return tensorflow.convert_to_tensor(np.asarray(result), leaf.dtype)
    return np.asarray(result, leaf.dtype)[()] if isinstance(leaf, np.generic) else np.asarray(result, leaf.dtype)
