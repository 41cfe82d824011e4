"""Pins results that XLA:CPU can compute in row-major order only.

XLA:CPU's layout assignment gives a Fourier transform any layout its readers want (an all-gather wants the gathered
dimension first); its run time then refuses the program: `fft_thunk.cc: IsMonotonicWithDim0Major`. Reshaped to one
dimension and back, the result lies in row-major order: both reshapes become bitcasts. A barrier between them keeps
XLA from leaving them out. All compilers take that; a `LayoutConstraint` call (what
`jax.experimental.layout.with_layout_constraint` lowers to) of complex numbers is refused by XLA:TPU.
"""

from __future__ import annotations

from math import prod
from typing import Any

from shardwright.xla import private
from shardwright.xla.operations import operations_within

_ROW_MAJOR_ONLY = frozenset({"stablehlo.fft"})


def pin_row_major(module: Any) -> None:
    """Reshape to one dimension and back what every operation of a StableHLO module gives that needs row-major order."""
    for operation in list(operations_within(module.operation)):
        if operation.name in _ROW_MAJOR_ONLY:
            _pin(operation.results[0])


def _pin(value: Any) -> None:
    ir = private.ir()
    flat = ir.RankedTensorType.get([prod(value.type.shape)], value.type.element_type)
    point = ir.InsertionPoint.after(value.owner)
    source, added = value, []
    for name, result in (
        ("stablehlo.reshape", flat),
        ("stablehlo.optimization_barrier", flat),
        ("stablehlo.reshape", value.type),
    ):
        added.append(ir.Operation.create(name, results=[result], operands=[source], loc=value.owner.location, ip=point))
        source = added[-1].results[0]
    value.replace_all_uses_except(source, [added[0]])
