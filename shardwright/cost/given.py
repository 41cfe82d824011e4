"""`shardwright.cost`: what a kernel costs, said by the user around its call.

This package is called what users call: the module itself is the function (`shardwright/cost/__init__.py`).
"""

from __future__ import annotations

from math import isfinite
from types import ModuleType
from typing import Any

import numpy as np

from shardwright.errors import OptionError
from shardwright.kernels import PRICE_ATTRIBUTE, Price


def cost(*, flops: float, bytes: float | None = None) -> Any:
    """What each kernel that is called within costs: a context, or a decorator of a function.

        with shardwright.cost(flops=4 * b * h * t * s * d):
            out = attention(q, k, v)

    Args:
      flops: arithmetic operations of one call, of the whole arrays; a multiply-add counts as two.
      bytes: memory that it reads and writes; default: its operands and results, each once.

    It is the price of every call in it that nothing else says the cost of, and goes before Pallas' `cost_estimate`;
    what XLA computes keeps its own price. A backward pass has its own: put another one there.

    Raises OptionError on numbers that are negative or no numbers.
    """
    price = Price(
        flops=_require_number("flops", flops), size_bytes=None if bytes is None else _require_number("bytes", bytes)
    )
    from jax.experimental.xla_metadata import set_xla_metadata

    return set_xla_metadata(**{PRICE_ATTRIBUTE: price.to_text()})  # type: ignore[no-untyped-call]


def _require_number(name: str, value: Any) -> float:
    is_number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    try:
        number = float(value) if is_number else -1.0
    except OverflowError:
        number = -1.0
    if not isfinite(number) or number < 0:
        raise OptionError(
            f"{name}={value!r} is no number of operations or bytes",
            where=name,
            remedy="pass a number from 0 on, of one call on whole arrays",
        )
    return number


class CallableModule(ModuleType):
    """A module that is called as `cost`."""

    __call__ = staticmethod(cost)
