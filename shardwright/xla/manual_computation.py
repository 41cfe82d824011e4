"""Operations computed part by part on devices, because XLA's partitioner would gather their arrays whole.

In a Fourier transform, a top-k, a grouped convolution, or a custom call with a declared sharding rule, the parts are
independent. The partitioner has no case for them, or a wrong one: it gathers every split operand, and every device
computes all of it. In a manual computation (Shardy's `sdy.manual_computation`, the lowering of `jax.shard_map`) the
operation works on its device's parts, and the partitioner leaves it alone.

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
from shardwright.reserved_names import IDENTITY_TARGETS
from shardwright.xla import private
from shardwright.xla.local_convolutions import is_gathered_whole, local_groups
from shardwright.xla.one_row import first_rows, reach_row, split_rows
from shardwright.xla.partial_sums import splits_image
from shardwright.xla.strip import annotation_target
from shardwright.xla.zeros import pad_with_zeros, zero_constant

_MANUAL_OPERATIONS = frozenset({"stablehlo.fft", "mhlo.topk"})
_CONVOLUTION = "stablehlo.convolution"


def is_manual(operation: Any, entry: InstructionPlan) -> bool:
    """Whether devices compute parts of an operation split by the plan. XLA splits calls that declare it themselves, and
    exchanges the borders of a split image."""
    if operation.operation.name == _CONVOLUTION:
        return is_gathered_whole(operation) and not splits_image(operation, entry)
    if split_rows(operation, entry):
        return True
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
    summands = {*entry.partial, *(axis for lies in entry.result for axis in lies.unreduced)}
    summed = tuple(axis for axis in mesh.sizes if axis in summands)
    whole_types, is_tuple = _result_types(operation)
    made = tuple(_before_sum(lies, summed) for lies in entry.result)
    stacked = tuple(TensorSharding((summed, *lies.dims)) for lies in made) if summed else made
    axes = sdy.ManualAxesAttr.get([ir.StringAttr.get(axis.name) for axis in mesh.axes])
    per_value = sdy.TensorShardingPerValueAttr.get
    with operation.location, ir.InsertionPoint(operation):
        operands = [
            pad_with_zeros(value, _even_shape(value.type, lies, mesh))
            for value, lies in zip(operation.operands, used, strict=True)
        ]
        even_types = [_tensor_type(_even_shape(*pair, mesh), pair[0]) for pair in zip(whole_types, made, strict=True)]
        terms = [_tensor_type((mesh.size(summed), *kind.shape), kind) for kind in even_types] if summed else even_types
        rows = split_rows(operation, entry)
        firsts = [first_rows(each, operands[0].type.shape[each.dim], mesh) for each in rows]
        operands += [first for first, _ in firsts]
        used += tuple(lies for _, lies in firsts)
        manual = sdy.ManualComputationOp(
            terms, operands, per_value([*map(attribute, used)]), per_value([*map(attribute, stacked)]), axes
        )
        inputs = _parts([operand.type for operand in operands], used, mesh)
        block = manual.regions[0].blocks.append(*inputs, arg_locs=[operation.location] * len(inputs))
        with ir.InsertionPoint(block):
            parts, arguments = _parts(even_types, made, mesh), [*block.arguments]
            if rows:
                count = len(arguments) - len(rows)
                results = reach_row(operation, arguments[:count], arguments[count:], rows, parts)
            else:
                results = _compute_part(operation, arguments, parts, used, mesh, is_tuple=is_tuple)
            sdy.ReturnOp([_as_term(result) for result in results] if summed else results)
        values = [_add_terms(value) for value in manual.results] if summed else [*manual.results]
        values = [_slice_to(value, kind) for value, kind in zip(values, whole_types, strict=True)]
    if is_tuple:
        _replace_elements(operation, values)
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


def _result_types(operation: Any) -> tuple[list[Any], bool]:
    """The types of the arrays of an operation's result, and whether they come in a tuple."""
    types = [value.type for value in operation.results]
    if len(types) == 1 and isinstance(types[0], private.ir().TupleType):
        return [types[0].get_type(number) for number in range(types[0].num_types)], True
    return types, False


def _before_sum(sharding: TensorSharding, summed: Sequence[str]) -> TensorSharding:
    """The layout of a device's part of a result, before it is added up, and scattered, over the axes `summed`."""
    return TensorSharding(tuple(tuple(axis for axis in dim if axis not in summed) for dim in sharding.dims))


def _even_shape(kind: Any, sharding: TensorSharding, mesh: Mesh) -> tuple[int, ...]:
    """The dimensions of an array with all parts as large as the first."""
    parts = sharding.shard_shape(tuple(kind.shape), mesh)
    return tuple(size * mesh.size(axes) for size, axes in zip(parts, sharding.dims, strict=True))


def _as_term(result: Any) -> Any:
    """One device's partial result along a dimension in front."""
    return private.dialect("stablehlo").ReshapeOp(_tensor_type((1, *result.type.shape), result.type), result).result


def _add_terms(terms: Any) -> Any:
    """The sum along the first dimension."""
    ir, stablehlo = private.ir(), private.dialect("stablehlo")
    scalar = _tensor_type((), terms.type)
    whole = _tensor_type(tuple(terms.type.shape)[1:], terms.type)
    total = stablehlo.ReduceOp([whole], [terms], [zero_constant(terms.type.element_type)], [0])
    body = total.regions[0].blocks.append(scalar, scalar)
    with ir.InsertionPoint(body):
        stablehlo.ReturnOp([stablehlo.AddOp(*body.arguments).result])
    return total.results[0]


def _slice_to(value: Any, kind: Any) -> Any:
    """The value without its padding."""
    if value.type == kind:
        return value
    rank = len(kind.shape)
    return private.dialect("stablehlo").SliceOp(value, [0] * rank, list(kind.shape), [1] * rank).result


def _tensor_type(shape: Sequence[int], like: Any) -> Any:
    return private.ir().RankedTensorType.get(list(shape), like.element_type)


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


def _parts(types: Sequence[Any], shardings: Sequence[TensorSharding], mesh: Mesh) -> list[Any]:
    """The type of one device's part of each array."""
    return [
        _tensor_type(sharding.shard_shape(tuple(whole.shape), mesh), whole)
        for whole, sharding in zip(types, shardings, strict=True)
    ]
