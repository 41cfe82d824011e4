"""Pins results that XLA:CPU can compute in row-major order only.

XLA:CPU's layout assignment gives a Fourier transform any layout its readers want (an all-gather wants the gathered
dimension first); its run time then refuses the program: `fft_thunk.cc: IsMonotonicWithDim0Major`. A `LayoutConstraint`
on the result, the custom call of `jax.experimental.layout.with_layout_constraint`, fixes it. XLA's partitioner takes
the call shard by shard; on a layout already row-major it costs nothing.
"""

from __future__ import annotations

from typing import Any

from shardwright.xla import private
from shardwright.xla.operations import operations_within

_ROW_MAJOR_ONLY = frozenset({"stablehlo.fft"})


def pin_row_major(module: Any) -> None:
    """Put a `LayoutConstraint` behind every operation of a StableHLO module that needs a row-major result."""
    for operation in list(operations_within(module.operation)):
        if operation.name in _ROW_MAJOR_ONLY:
            _pin(operation.results[0])


def _pin(value: Any) -> None:
    ir = private.ir()
    order = ", ".join(str(dim) for dim in reversed(range(value.type.rank)))
    layouts = ir.ArrayAttr.get([ir.Attribute.parse(f"dense<[{order}]> : tensor<{value.type.rank}xindex>")])
    pinned = ir.Operation.create(
        "stablehlo.custom_call",
        results=[value.type],
        operands=[value],
        attributes={
            "call_target_name": ir.StringAttr.get("LayoutConstraint"),
            "operand_layouts": layouts,
            "result_layouts": layouts,
        },
        loc=value.owner.location,
        ip=ir.InsertionPoint.after(value.owner),
    )
    value.replace_all_uses_except(pinned.results[0], [pinned])
