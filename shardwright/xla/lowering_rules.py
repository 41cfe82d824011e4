"""What JAX's own tables say of a primitive: how it is lowered.

By undocumented names (jax 0.10.2 to 0.12.0): `jax._src.interpreters.mlir` keeps the rules by primitive and platform,
and a rule that `mlir.lower_fun` makes holds the function that it lowers.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardwright.xla import private

MODULE = "jax._src.interpreters.mlir"

#: The tables: rules of any platform, and those of one.
TABLES = ("_lowerings", "_platform_specific_lowerings")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """The one custom call that a primitive is lowered to.

    operands: per operand of the call, the number of the primitive's. results: dimensions of the call's. returned: per
    result of the primitive, the number of the call's.
    """

    operands: tuple[int, ...]
    results: tuple[tuple[int, ...], ...]
    returned: tuple[int, ...]


def lowered_function(primitive: Any, platform: str) -> tuple[Callable[..., Any], bool] | None:
    """(function that a primitive is lowered to by `mlir.lower_fun`, whether it returns a list of results); None for a
    primitive that is lowered in another way."""
    module = importlib.import_module(MODULE)
    common, of_platforms = (getattr(module, name, {}) for name in TABLES)
    entry = of_platforms.get(platform, {}).get(primitive) or common.get(primitive)
    rule: Any = getattr(entry, "rule", None)
    if not getattr(rule, "__qualname__", "").startswith("lower_fun.") or not getattr(rule, "__closure__", None):
        return None
    held = dict(zip(rule.__code__.co_freevars, (cell.cell_contents for cell in rule.__closure__), strict=True))
    return (held["fun"], held["multiple_results"]) if {"fun", "multiple_results"} <= held.keys() else None


def one_custom_call(function: Callable[..., Any], types: list[Any], platform: str) -> CallForm | None:
    """The custom call that a function of these types is lowered to; None where it is lowered to anything else."""
    import jax

    try:
        lowered = jax.jit(function, keep_unused=True).trace(*types).lower(lowering_platforms=(platform,))
    except NotImplementedError:  # of another platform
        return None
    ir = private.ir()
    (main, *others) = lowered.compiler_ir("stablehlo").body.operations
    operations = list(main.regions[0].blocks[0].operations)
    if others or [each.operation.name for each in operations] != ["stablehlo.custom_call", "func.return"]:
        return None
    call, returned = operations
    if not all(isinstance(operand, ir.BlockArgument) for operand in call.operands):
        return None
    if not all(isinstance(value, ir.OpResult) for value in returned.operands):
        return None
    return CallForm(
        operands=tuple(operand.arg_number for operand in call.operands),
        results=tuple(tuple(result.type.shape) for result in call.results),
        returned=tuple(value.result_number for value in returned.operands),
    )
