"""Operations that devices compute part by part, though XLA's partitioner would gather their arrays whole.

Of a Fourier transform, a top-k, or a custom call that declares its sharding rule, each element of the batch is
computed by itself, but the partitioner has no case for them: whatever lies split, it gathers, and every device computes
all of it. Written as a manual computation (Shardy's `sdy.manual_computation`, what `jax.shard_map` lowers to) an
operation takes and makes the parts of its device, and the partitioner leaves it alone.

Only for operations whose parts are computed alike by the same operation: no attribute names the size of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shardwright.config import IDENTITY_TARGETS
from shardwright.plans import InstructionPlan
from shardwright.shardings import Mesh, TensorSharding
from shardwright.xla import private
from shardwright.xla.strip import annotation_target

_MANUAL_OPERATIONS = frozenset({"stablehlo.fft", "mhlo.topk"})


def is_manual(operation: Any) -> bool:
    """Whether devices compute parts of an operation where the plan splits it. XLA splits calls that say so itself."""
    if operation.operation.name != "stablehlo.custom_call":
        return operation.operation.name in _MANUAL_OPERATIONS
    frontend = operation.attributes.get("mhlo.frontend_attributes", ())
    is_known = annotation_target(operation) in IDENTITY_TARGETS or any(
        each.name == "num_batch_dims" for each in frontend
    )
    return not is_known


def compute_manually(
    operation: Any, entry: InstructionPlan, mesh: Mesh, attribute: Callable[[TensorSharding], Any]
) -> None:
    """Put a manual computation in place of an operation that the plan splits; attribute: a sharding as Shardy's.

    Operands must lie as the plan uses them. Where nothing is split the operation stays.
    """
    used = tuple(leaf for operand in entry.operands for leaf in operand)
    if not any(lies.axes for lies in (*used, *entry.result)):
        return
    ir, sdy = private.ir(), private.dialect("sdy")
    taken, made = [value.type for value in operation.operands], [value.type for value in operation.results]
    is_tuple = len(made) == 1 and isinstance(made[0], ir.TupleType)
    if is_tuple:
        whole = made[0]
        made = [whole.get_type(number) for number in range(whole.num_types)]
    axes = sdy.ManualAxesAttr.get([ir.StringAttr.get(axis.name) for axis in mesh.axes])
    per_value = sdy.TensorShardingPerValueAttr.get
    with operation.location, ir.InsertionPoint(operation):
        manual = sdy.ManualComputationOp(
            made, list(operation.operands), per_value([*map(attribute, used)]),
            per_value([*map(attribute, entry.result)]), axes,
        )  # fmt: skip
        block = manual.regions[0].blocks.append(*_parts(taken, used, mesh), arg_locs=[operation.location] * len(taken))
        with ir.InsertionPoint(block):
            parts = _parts(made, entry.result, mesh)
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
    """An array of the tuple that an operation makes."""
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
        private.ir().RankedTensorType.get(each.shard_shape(tuple(whole.shape), mesh), whole.element_type)
        for whole, each in zip(types, lies, strict=True)
    ]
