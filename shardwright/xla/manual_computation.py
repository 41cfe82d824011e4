"""Operations computed part by part on devices, because XLA's partitioner would gather their arrays whole.

In a Fourier transform, a top-k, a grouped convolution, a custom call with a declared sharding rule, or a gather among
the collectives of a manual region that is split over other axes than its own, the parts are independent. The
partitioner has no case for them, or a wrong one: it gathers every split operand, and every device computes all of it.
In a manual computation (Shardy's `sdy.manual_computation`, the lowering of `jax.shard_map`) the operation works on its
device's parts, and the partitioner leaves it alone.

Parts are computed by the same operation; only the groups of a convolution are fewer (`local_convolutions`). Around the
manual computation:

- what axes do not divide is padded with zeros, and the result sliced: the padding is masked in a sum, and cut off else;
- partial results lie side by side along a dimension in front, and a reduction adds them: the partitioner makes of it an
  all-reduce, or what the plan does with the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shardwright.plans.plan import InstructionPlan
from shardwright.plans.shardings import Mesh, TensorSharding
from shardwright.reserved_names import ENTER_REGION, IDENTITY_TARGETS, LEAVE_REGION, PLACEMENT_TARGET
from shardwright.xla import private
from shardwright.xla.local_convolutions import is_gathered_whole, local_groups
from shardwright.xla.manual_region import ManualRegion, first_numbers, pad_to_parts, replace_elements
from shardwright.xla.one_row import reach_row, split_rows
from shardwright.xla.part_results import part_results, result_types
from shardwright.xla.partial_sums import splits_image
from shardwright.xla.strip import annotation_target

_MANUAL_OPERATIONS = frozenset({"stablehlo.fft", "mhlo.topk"})
#: XLA keeps sums and permutes of devices' parts split.
_COLLECTIVES = frozenset({"stablehlo.all_gather", "stablehlo.all_to_all", "stablehlo.reduce_scatter"})
_CONVOLUTION = "stablehlo.convolution"


def is_manual(operation: Any, entry: InstructionPlan) -> bool:
    """Whether devices compute parts of an operation split by the plan. XLA splits calls that declare it themselves, and
    exchanges the borders of a split image."""
    if operation.operation.name == _CONVOLUTION:
        return is_gathered_whole(operation) and not splits_image(operation, entry)
    if split_rows(operation, entry):
        return True
    if operation.operation.name != "stablehlo.custom_call":
        return operation.operation.name in _MANUAL_OPERATIONS | _COLLECTIVES
    if annotation_target(operation) in (ENTER_REGION, LEAVE_REGION):
        return False
    frontend = operation.attributes.get("mhlo.frontend_attributes", ())
    is_known = annotation_target(operation) in {*IDENTITY_TARGETS, PLACEMENT_TARGET} or any(
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
    whole_types, is_tuple = result_types(operation)
    results = part_results(whole_types, entry, mesh)
    with operation.location, private.ir().InsertionPoint(operation):
        rows = split_rows(operation, entry)
        operands = pad_to_parts(operation.operands, used, mesh)
        shape = operands[0].type.shape
        firsts = [first_numbers(each.axes, shape[each.dim] // mesh.size(each.axes), mesh) for each in rows]
        operands += [first for first, _ in firsts]
        used += tuple(lies for _, lies in firsts)
        region = ManualRegion(operands, used, results, mesh, attribute)
        with region:
            arguments, parts = region.arguments, region.parts
            if rows:
                count = len(arguments) - len(rows)
                values = reach_row(operation, arguments[:count], arguments[count:], rows, parts)
            else:
                values = _compute_part(operation, arguments, parts, used, mesh, is_tuple=is_tuple)
            region.hand_out(values)
        values = region.join()
    if is_tuple:
        replace_elements(operation, values)
    else:
        for whole, result in zip(operation.results, values, strict=True):
            whole.replace_all_uses_with(result)
    operation.operation.erase()


def _compute_part(
    operation: Any,
    arguments: Sequence[Any],
    parts: Sequence[Any],
    used: Sequence[TensorSharding],
    mesh: Mesh,
    *,
    is_tuple: bool,
) -> list[Any]:
    """The same operation of one device's parts, at the current insertion point. parts: the types of its results."""
    ir = private.ir()
    if operation.operation.name in _COLLECTIVES:
        return _clone_part(operation, arguments, parts)
    attributes = {name: operation.attributes[name] for name in operation.attributes}
    if operation.operation.name == _CONVOLUTION:
        attributes |= local_groups(operation, used, mesh)
    part = ir.Operation.create(
        operation.operation.name,
        results=[ir.TupleType.get_tuple(parts)] if is_tuple else parts,
        operands=list(arguments),
        attributes=attributes,
    )
    return [_element(part, number, kind) for number, kind in enumerate(parts)] if is_tuple else [*part.results]


def _clone_part(operation: Any, arguments: Sequence[Any], parts: Sequence[Any]) -> list[Any]:
    """The same operation of one device's parts, with the regions within it."""
    part = operation.operation.clone(private.ir().InsertionPoint.current)
    for number, argument in enumerate(arguments):
        part.operands[number] = argument
    for result, kind in zip(part.results, parts, strict=True):
        result.set_type(kind)
    return [*part.results]


def _element(operation: Any, number: int, kind: Any) -> Any:
    """One array of an operation's result tuple."""
    ir = private.ir()
    index = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), number)
    return ir.Operation.create(
        "stablehlo.get_tuple_element", results=[kind], operands=[operation.results[0]], attributes={"index": index}
    ).results[0]
