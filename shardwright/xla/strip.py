"""Taking the user's own sharding marks out of a converted module.

A `with_sharding_constraint` of the user's (another mesh, other axis names) left
beside our mesh aborts XLA's process; the planner has read it as pins before.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shardwright.errors import UnsupportedProgramError
from shardwright.reserved_names import CALLBACK_TARGET, MANUAL_TARGETS
from shardwright.xla.operations import operations_within

_SHARDING_ATTRIBUTES = ("mhlo.sharding", "sdy.sharding", "mhlo.spmd_parameters_shardings", "mhlo.spmd_output_sharding")
_FRONTEND = "mhlo.frontend_attributes"


def annotation_target(operation: Any) -> str | None:
    """The target of a custom-call operation, else None."""
    if operation.operation.name != "stablehlo.custom_call":
        return None
    return str(operation.attributes["call_target_name"].value)


def strip_foreign_shardings(module: Any) -> None:
    """Remove sharding attributes and meshes not of the plan.

    Raises UnsupportedProgramError on `shard_map` and its like.
    """
    _strip_attributes(module.operation)
    for operation in list(module.body.operations):
        if operation.operation.name == "sdy.mesh":
            operation.operation.erase()
            continue
        if operation.operation.name == "func.func":
            _strip_function(operation)
        for inner in operations_within(operation):
            _refuse_manual(inner)
            _strip_attributes(inner)


def erase_annotations(operations: Iterable[Any]) -> None:
    """Replace annotation custom-calls by their operand."""
    for operation in operations:
        operation.results[0].replace_all_uses_with(operation.operands[0])
        operation.operation.erase()


def _refuse_manual(operation: Any) -> None:
    target = annotation_target(operation)
    if target == CALLBACK_TARGET:
        raise UnsupportedProgramError(
            "the program calls Python of the process that printed it: it can be planned, not run",
            where=target,
            remedy="lower the step with `shardwright lower`, or by session.parallelize: they write the function of a "
            "jax.experimental.custom_partitioning out",
        )
    if target in MANUAL_TARGETS:
        raise UnsupportedProgramError(
            f"the program holds computations written for one device ({target}; shard_map or the like)",
            remedy="hand over the step without shard_map: the planner shards it",
        )


def _strip_attributes(operation: Any) -> None:
    attributes = operation.attributes
    for name in _SHARDING_ATTRIBUTES:
        if name in attributes:
            del attributes[name]
    if _FRONTEND in attributes:
        remaining = {item.name: item.attr for item in attributes[_FRONTEND] if not item.name.startswith("xla.sdy.")}
        del attributes[_FRONTEND]
        if remaining:
            from shardwright.xla import private

            attributes[_FRONTEND] = private.ir().DictAttr.get(remaining)


def _strip_function(function: Any) -> None:
    from shardwright.xla import private

    ir = private.ir()
    for key in ("arg_attrs", "res_attrs"):
        if key not in function.attributes:
            continue
        stripped = []
        for entry in function.attributes[key]:
            remaining = {item.name: item.attr for item in entry if not _is_foreign(item.name)}
            stripped.append(ir.DictAttr.get(remaining))
        function.attributes[key] = ir.ArrayAttr.get(stripped)


def _is_foreign(name: str) -> bool:
    return name in _SHARDING_ATTRIBUTES or name == _FRONTEND
