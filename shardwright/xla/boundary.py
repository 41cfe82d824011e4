"""Arguments and outputs of an emitted module: shardings, explicit padding, stacks of partial sums, aliases.

A partial sum does not survive a program's boundary: XLA reduces it there. It is stored as the stack of its terms, one
on each device, along a dimension in front: `[4, n]` split over an axis of four for a sum over that axis. A manual
computation over the axis takes the dimension off, or puts it there, and says to Shardy that the value inside is
partial: nothing moves, on either side.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwright.errors import PlanError
from shardwright.placements import HOST
from shardwright.plans.plan import Plan, VariablePlan
from shardwright.plans.shardings import TensorSharding
from shardwright.reserved_names import MESH_NAME
from shardwright.xla import private
from shardwright.xla.zeros import pad_with_zeros

_ALIAS = "mhlo.input_output_alias"

#: The attribute by which PJRT's clients learn in which memory of its device an argument or a result lies.
_MEMORY = "mhlo.memory_kind"

AttributeOf = Callable[[TensorSharding], Any]


def sharding_text(sharding: TensorSharding) -> str:
    """`[{"data"}, {}], unreduced={"model"}`: the inside of an `#sdy.sharding`, closed in every dimension."""
    dims = ", ".join("{" + ", ".join(f'"{axis}"' for axis in dim) + "}" for dim in sharding.dims)
    unreduced = ", ".join(f'"{axis}"' for axis in sharding.unreduced)
    return f"[{dims}]" + (f", unreduced={{{unreduced}}}" if unreduced else "")


def store_arguments(main: Any, plan: Plan, attribute: AttributeOf) -> list[Any]:
    """Give padded and stacked arguments their stored type; returns the logical value of each argument.

    At the start of `main` a padded argument is sliced to its logical shape, and a stack of terms becomes the
    partial sum that they make.
    """
    ir = private.ir()
    block = main.body.blocks[0]
    logical = []
    for argument, variable in zip(list(block.arguments), plan.parameters, strict=True):
        _check_shape("argument", argument, variable)
        if not (variable.is_padded or variable.is_stacked):
            logical.append(argument)
            continue
        users = list(argument.uses)
        argument.set_type(ir.RankedTensorType.get(list(variable.stored_shape), argument.type.element_type))
        with ir.InsertionPoint.at_block_begin(block):
            inside = (
                _unstack_terms(argument, variable, plan) if variable.is_stacked else _slice_padding(argument, variable)
            )
        for use in users:
            use.owner.operands[use.operand_number] = inside
        logical.append(inside)
    return logical


def _slice_padding(argument: Any, variable: VariablePlan) -> Any:
    rank = len(variable.shape)
    return private.dialect("stablehlo").SliceOp(argument, [0] * rank, list(variable.shape), [1] * rank).result


def _unstack_terms(argument: Any, variable: VariablePlan, plan: Plan) -> Any:
    """The partial sum whose terms `argument` holds."""
    return _in_manual_computation(
        argument, variable, plan, variable.shape, (variable.stored_sharding, variable.sharding)
    )


def _stack_terms(value: Any, variable: VariablePlan, plan: Plan) -> Any:
    """The terms of a partial sum, one on each device along a dimension in front."""
    return _in_manual_computation(
        value, variable, plan, variable.stored_shape, (variable.sharding, variable.stored_sharding)
    )


def _in_manual_computation(
    value: Any,
    variable: VariablePlan,
    plan: Plan,
    shape: tuple[int, ...],
    shardings: tuple[TensorSharding, TensorSharding],
) -> Any:
    """`value`, seen with other dimensions by each device along the axes of a partial sum. shardings: before, after."""
    ir, sdy = private.ir(), private.dialect("sdy")
    element_type = value.type.element_type
    before_text, after_text = (
        f"#sdy.sharding_per_value<[<@{MESH_NAME}, {sharding_text(sharding)}>]>" for sharding in shardings
    )
    axes = ", ".join(f'"{axis}"' for axis in variable.sharding.unreduced)
    term = {variable.shape: variable.shape, variable.stored_shape: (1, *variable.stored_shape[1:])}
    before, after = (
        ir.RankedTensorType.get(list(term[dims]), element_type) for dims in (tuple(value.type.shape), shape)
    )
    manual = sdy.ManualComputationOp(
        [ir.RankedTensorType.get(list(shape), element_type)],
        [value],
        ir.Attribute.parse(before_text),
        ir.Attribute.parse(after_text),
        ir.Attribute.parse(f"#sdy<manual_axes{{{axes}}}>"),
    )
    block = manual.body.blocks.append(before)
    with ir.InsertionPoint(block):
        sdy.ReturnOp([private.dialect("stablehlo").ReshapeOp(after, block.arguments[0]).result])
    return manual.results[0]


def finish_boundary(module: Any, main: Any, plan: Plan, attribute: AttributeOf, *, has_host_memory: bool) -> None:
    """Pad and stack outputs, write the function's type, its arguments' and results' shardings and aliases.

    has_host_memory: whether the devices tell their memory from their host's; then those on the host say so, too.
    """
    ir = private.ir()
    block = main.body.blocks[0]
    terminator = list(block.operations)[-1]
    if len(terminator.operands) != len(plan.outputs):
        raise PlanError(
            f"the plan has {len(plan.outputs)} outputs, the program {len(terminator.operands)}", where=plan.module_name
        )
    for index, variable in enumerate(plan.outputs):
        value = terminator.operands[index]
        _check_shape("output", value, variable)
        if variable.is_padded:
            with ir.InsertionPoint(terminator):
                terminator.operands[index] = pad_with_zeros(value, variable.stored_shape)
        elif variable.is_stacked:
            with ir.InsertionPoint(terminator):
                terminator.operands[index] = _stack_terms(value, variable, plan)
    inputs = [argument.type for argument in block.arguments]
    outputs = [operand.type for operand in terminator.operands]
    main.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(inputs, outputs))
    main.attributes["arg_attrs"] = _written(main, "arg_attrs", plan.parameters, attribute, has_host_memory)
    main.attributes["res_attrs"] = _written(main, "res_attrs", plan.outputs, attribute, has_host_memory)
    module.operation.attributes[_ALIAS] = _aliases(plan)


def _written(
    main: Any, key: str, variables: tuple[VariablePlan, ...], attribute: AttributeOf, has_host_memory: bool
) -> Any:
    ir = private.ir()
    present = list(main.attributes[key]) if key in main.attributes else [None] * len(variables)
    written = []
    for existing, variable in zip(present, variables, strict=True):
        items = {item.name: item.attr for item in existing} if existing is not None else {}
        items["sdy.sharding"] = attribute(variable.stored_sharding)
        items.pop(_MEMORY, None)
        if variable.is_on_host and has_host_memory:
            items[_MEMORY] = ir.StringAttr.get(HOST)
        written.append(ir.DictAttr.get(items))
    return ir.ArrayAttr.get(written)


def _aliases(plan: Plan) -> Any:
    """The module's alias attribute: an output of the plan may reuse its parameter's buffer."""
    items = []
    for output in plan.outputs:
        if output.alias is None:
            continue
        _check_alias(plan.parameters[output.alias], output)
        index = f"array<i64: {output.number}>" if len(plan.outputs) > 1 else "array<i64>"
        items.append(
            '{alias = {kind = "may_alias", parameter_index = array<i64>, '
            f"parameter_number = {output.alias} : i64}}, output_index = {index}}}"
        )
    return private.ir().Attribute.parse(f"[{', '.join(items)}]")


def _check_alias(parameter: VariablePlan, output: VariablePlan) -> None:
    """Check an alias: an output can only reuse a buffer of its own size; XLA's refusal does not say which."""
    if (parameter.element_type, parameter.stored_shape, parameter.sharding) != (
        output.element_type,
        output.stored_shape,
        output.sharding,
    ):
        raise PlanError(
            f"output {output.number} ({output.name}) lies as {output.sharding} and cannot reuse the buffer of "
            f"argument {parameter.number} ({parameter.name}), which lies as {parameter.sharding}",
            where=output.name,
        )


def _check_shape(what: str, value: Any, variable: VariablePlan) -> None:
    if not hasattr(value.type, "shape") or tuple(value.type.shape) != variable.shape:
        raise PlanError(
            f"{what} {variable.number} is {value.type} in the program, {list(variable.shape)} in the plan",
            where=variable.name,
        )
    if variable.is_stacked and variable.stored_shape[1:] != variable.shape:
        raise PlanError(
            f"{what} {variable.number} is partial and split unevenly: {variable.sharding}", where=variable.name
        )
