"""Operations that devices compute part by part, though XLA's partitioner would gather their arrays whole.

Of a Fourier transform or a top-k each element of the batch is computed by itself, but the partitioner has no case for
them: whatever lies split, it gathers, and every device computes all of it. Written as a manual computation (Shardy's
`sdy.manual_computation`, what `jax.shard_map` lowers to) an operation takes and makes the parts of its device, and the
partitioner leaves it alone.

Only for operations whose parts are computed alike by the same operation: no attribute names the size of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shardwright.plans import InstructionPlan
from shardwright.shardings import Mesh, TensorSharding
from shardwright.xla import private

IN_PARTS = frozenset({"stablehlo.fft", "mhlo.topk"})


def compute_in_parts(
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
    axes = sdy.ManualAxesAttr.get([ir.StringAttr.get(axis.name) for axis in mesh.axes])
    per_value = sdy.TensorShardingPerValueAttr.get
    with operation.location, ir.InsertionPoint(operation):
        manual = sdy.ManualComputationOp(
            made, list(operation.operands), per_value([*map(attribute, used)]),
            per_value([*map(attribute, entry.result)]), axes,
        )  # fmt: skip
        block = manual.regions[0].blocks.append(*_parts(taken, used, mesh), arg_locs=[operation.location] * len(taken))
        with ir.InsertionPoint(block):
            part = ir.Operation.create(
                operation.operation.name,
                results=_parts(made, entry.result, mesh),
                operands=list(block.arguments),
                attributes={name: operation.attributes[name] for name in operation.attributes},
            )
            sdy.ReturnOp(part.results)
    for whole, result in zip(operation.results, manual.results, strict=True):
        whole.replace_all_uses_with(result)
    operation.operation.erase()


def _parts(types: Sequence[Any], lies: Sequence[TensorSharding], mesh: Mesh) -> list[Any]:
    """The type of one device's part of each array."""
    return [
        private.ir().RankedTensorType.get(each.shard_shape(tuple(whole.shape), mesh), whole.element_type)
        for whole, each in zip(types, lies, strict=True)
    ]
