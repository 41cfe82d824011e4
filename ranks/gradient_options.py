"""Options of distributed optimizers, checked alike for every framework."""

from __future__ import annotations

from typing import Any

from shardwright.errors import OptionError
from shardwright.ranks.compression import Cast
from shardwright.ranks.operations import ReduceOp


def check_gradient_options(framework: str, compression: Any, passes: Any, op: ReduceOp, predivide: float) -> None:
    """Raises OptionError on what gradients of this framework cannot be exchanged with."""
    if not isinstance(compression, Cast | None):
        raise OptionError(f"{compression!r} for {framework}", where="compression", remedy="Compression.fp16 or bf16")
    if type(passes) is not int or passes < 1:
        raise OptionError(f"{passes!r}", where="backward_passes_per_step", remedy="a whole number from 1")
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM):
        raise OptionError(f"{op.value!r} of gradients", where="op", remedy="'average', 'sum' or 'adasum'")
    if not predivide > 0 or (predivide != 1.0 and op is not ReduceOp.AVERAGE):
        raise OptionError(
            f"{predivide!r} with op={op.value!r}",
            where="gradient_predivide_factor",
            remedy="a number above 0, of averages",
        )
