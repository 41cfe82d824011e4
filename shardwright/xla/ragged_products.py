"""Ragged products as compilers take them.

HLO's `ragged-dot` is converted to an operation of the MHLO dialect, which no compiler of StableHLO reads; all read the
same operation of CHLO, which JAX writes (`jax.lax.ragged_dot`).
"""

from __future__ import annotations

import re
from typing import Any

from shardwright.xla import private
from shardwright.xla.operations import operations_within

_RAGGED = "mhlo.ragged_dot"
_NUMBERS = "ragged_dot_dimension_numbers"
_DIMENSIONS = re.compile(r"(\w+)_dimensions = \[([\d, ]*)\]")
_PRECISION = re.compile(r"#mhlo<precision (\w+)>")


def spell_ragged_products(module: Any) -> None:
    """Have the ragged products of a module be CHLO's."""
    for operation in list(operations_within(module.operation)):
        if operation.operation.name == _RAGGED:
            _spell(operation)


def _spell(operation: Any) -> None:
    ir, chlo = private.ir(), private.dialect("chlo")
    text = str(operation.attributes[_NUMBERS])
    dimensions = {
        name: [int(number) for number in re.findall(r"\d+", dims)] for name, dims in _DIMENSIONS.findall(text)
    }
    names = ("lhs_batching", "rhs_batching", "lhs_contracting", "rhs_contracting", "lhs_ragged", "rhs_group")
    numbers = chlo.RaggedDotDimensionNumbers.get(*(dimensions.get(name, []) for name in names))
    precisions = _PRECISION.findall(str(operation.attributes["precision_config"]))
    attributes = {name: operation.attributes[name] for name in operation.attributes} | {
        _NUMBERS: numbers,
        "precision_config": ir.ArrayAttr.get([chlo.PrecisionAttr.get(each) for each in precisions]),
    }
    with operation.location, ir.InsertionPoint(operation):
        spelled = ir.Operation.create(
            "chlo.ragged_dot",
            results=[operation.results[0].type],
            operands=list(operation.operands),
            attributes=attributes,
        )
    operation.results[0].replace_all_uses_with(spelled.results[0])
    operation.operation.erase()
