"""Operations computed part by part on devices, because XLA's partitioner would gather their arrays whole.

In a Fourier transform, a top-k, or a custom call with a declared sharding rule, the elements of the batch are
independent. The partitioner has no case for them: it gathers every split operand, and every device computes all of it.
In a manual computation (Shardy's `sdy.manual_computation`, the lowering of `jax.shard_map`) the operation works on its
device's parts, and the partitioner leaves it alone.

Only for operations with parts computed by the same operation: no attribute names the size of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shardwright.plans.plan import InstructionPlan
from shardwright.plans.shardings import Mesh, TensorSharding
from shardwright.reserved_names import IDENTITY_TARGETS
from shardwright.xla import private
from shardwright.xla.strip import annotation_target

_MANUAL_OPERATIONS = frozenset({"stablehlo.fft", "mhlo.topk"})


def is_manual(operation: Any) -> bool:
    """Whether devices compute parts of an operation split by the plan. XLA splits calls that declare it themselves."""
    if operation.operation.name != "stablehlo.custom_call":
        return operation.operation.name in _MANUAL_OPERATIONS
    frontend = operation.attributes.get("mhlo.frontend_attributes", ())
    is_known = annotation_target(operation) in IDENTITY_TARGETS or any(
        attribute.name == "num_batch_dims" for attribute in frontend
    )
    return not is_known


def compute_manually(
    operation: Any, entry: InstructionPlan, mesh: Mesh, attribute: Callable[[TensorSharding], Any]
) -> None:
    """Put a manual computation in place of an operation split by the plan. attribute: a sharding in Shardy's form.

    Operands must have the layouts of the plan's uses. An unsplit operation stays.
    """
    used = tuple(leaf for operand in entry.operands for leaf in operand)
    if not any(sharding.axes for sharding in (*used, *entry.result)):
        return
    ir, sdy = private.ir(), private.dialect("sdy")
    operand_types, result_types = (
        [value.type for value in operation.operands],
        [value.type for value in operation.results],
    )
    is_tuple = len(result_types) == 1 and isinstance(result_types[0], ir.TupleType)
    if is_tuple:
        whole = result_types[0]
        result_types = [whole.get_type(number) for number in range(whole.num_types)]
    axes = sdy.ManualAxesAttr.get([ir.StringAttr.get(axis.name) for axis in mesh.axes])
    per_value = sdy.TensorShardingPerValueAttr.get
    with operation.location, ir.InsertionPoint(operation):
        manual = sdy.ManualComputationOp(
            result_types, list(operation.operands), per_value([*map(attribute, used)]),
            per_value([*map(attribute, entry.result)]), axes,
        )  # fmt: skip
        block = manual.regions[0].blocks.append(
            *_parts(operand_types, used, mesh), arg_locs=[operation.location] * len(operand_types)
        )
        with ir.InsertionPoint(block):
            parts = _parts(result_types, entry.result, mesh)
            part = ir.Operation.create(
                operation.operation.name,
                results=[ir.TupleType.get_tuple(parts)] if is_tuple else parts,
                operands=list(block.arguments),
                attributes={name: operation.attributes[name] for name in operation.attributes},
            )
            sdy.ReturnOp(
                [_element(part, number, kind) for number, kind in enumerate(parts)] if is_tuple else part.results
            )
    if is_tuple:
        _replace_elements(operation, manual.results)
    else:
        for whole, result in zip(operation.results, manual.results, strict=True):
            whole.replace_all_uses_with(result)
    operation.operation.erase()


def _element(operation: Any, number: int, kind: Any) -> Any:
    """One array of an operation's result tuple."""
    ir = private.ir()
    index = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), number)
    return ir.Operation.create(
        "stablehlo.get_tuple_element", results=[kind], operands=[operation.results[0]], attributes={"index": index}
    ).results[0]


def _replace_elements(operation: Any, results: Sequence[Any]) -> None:
    """Have the readers of a tuple's elements read these arrays."""
    for use in list(operation.results[0].uses):
        element = use.owner
        element.operation.results[0].replace_all_uses_with(results[element.attributes["index"].value])
        element.operation.erase()


def _parts(types: Sequence[Any], lies: Sequence[TensorSharding], mesh: Mesh) -> list[Any]:
    """The type of one device's part of each array."""
    return [
        private.ir().RankedTensorType.get(sharding.shard_shape(tuple(whole.shape), mesh), whole.element_type)
        for whole, sharding in zip(types, lies, strict=True)
    ]
