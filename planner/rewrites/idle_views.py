"""Drop views a plan makes no use of: these variables keep the user's storage.

Storage of a dimension of n in the form k and n/k pays off under a sharding of the second: each device then holds a
part of every piece. With only the first split, or neither, the same shards are blocks of the whole dimension, and the
program reshapes its argument at no cost.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

from shardwright.hlo import ArrayShape, Instruction, Module
from shardwright.planner.rewrites.boundary import reshape_variables
from shardwright.planner.rewrites.dim_classes import Required
from shardwright.planner.rules.data_movement import reshape_groups
from shardwright.plans.plan import InstructionPlan, Plan, VariablePlan
from shardwright.plans.shardings import TensorSharding, ValueSharding


def drop_idle_views(
    module: Module, plan: Plan, *, arguments: Collection[int] = (), outputs: Collection[int] = ()
) -> tuple[Module, Plan]:
    """The planned program and its plan, with the fewest views the plan allows.

    module: the program of `plan`.
    arguments: numbers of arguments that must stay in their view.
    outputs: the same for outputs.

    An argument and the output in its buffer change together. All other decisions and the plan's cost stay: a reshape
    that only merges dimensions moves nothing.
    """
    settled = _drop_views(module, plan, frozenset(arguments), frozenset(outputs))
    if not settled.parameters and not settled.outputs:
        return module, plan
    required = Required(
        parameters={n: variable.shape for n, variable in settled.parameters.items()},
        outputs={n: variable.shape for n, variable in settled.outputs.items()},
    )
    rewritten = reshape_variables(module, required)
    text = rewritten.to_text()
    return rewritten, replace(
        plan,
        parameters=tuple(settled.parameters.get(v.number, v) for v in plan.parameters),
        outputs=tuple(settled.outputs.get(v.number, v) for v in plan.outputs),
        instructions=tuple(_instructions(rewritten, plan, settled)),
        hlo_sha256=sha256(text.encode()).hexdigest(),
        hlo_text=text,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _WithoutViews:
    """Variables by number, in their storage without a view."""

    parameters: Mapping[int, VariablePlan]
    outputs: Mapping[int, VariablePlan]


def _drop_views(
    module: Module, plan: Plan, kept_arguments: frozenset[int], kept_outputs: frozenset[int]
) -> _WithoutViews:
    root = module.entry.root
    is_flat = isinstance(root.shape, ArrayShape) or root.opcode == "tuple"
    values = [*module.entry.parameters, *(root.operands if root.opcode == "tuple" else ())]
    if not is_flat or not all(isinstance(value.shape, ArrayShape) for value in values):
        return _WithoutViews(parameters={}, outputs={})
    parameters, outputs = (
        {v.number: stored for v in variables if v.number not in required and (stored := _as_written(v)) is not None}
        for variables, required in ((plan.parameters, kept_arguments), (plan.outputs, kept_outputs))
    )
    return _WithoutViews(
        parameters={n: v for n, v in parameters.items() if v.alias is None or v.alias in outputs},
        outputs={n: v for n, v in outputs.items() if v.alias is None or v.alias in parameters},
    )


def _as_written(variable: VariablePlan) -> VariablePlan | None:
    """The variable without its view: the same shards on the same devices; None: no view, or a needed one."""
    if variable.view_of is None:
        return None
    dims: list[tuple[str, ...]] = [()] * len(variable.view_of)
    stored = list(variable.view_of)
    left_out = dict(enumerate(variable.sharding.dims))
    for whole, parts in reshape_groups(variable.view_of, variable.shape):
        is_padded = any(variable.stored_shape[part] != variable.shape[part] for part in parts)
        if len(whole) != 1 or (is_padded and len(parts) > 1):
            return None
        dims[whole[0]] = left_out.pop(parts[0])
        if len(parts) == 1:
            stored[whole[0]] = variable.stored_shape[parts[0]]
    if any(left_out.values()):
        return None
    return replace(
        variable,
        shape=variable.view_of,
        view_of=None,
        sharding=TensorSharding(tuple(dims)),
        stored_shape=tuple(stored),
    )


def _instructions(module: Module, plan: Plan, settled: _WithoutViews) -> Iterator[InstructionPlan]:
    """The plan's entries, and those of the reshapes beside arguments and outputs."""
    entry = module.entry
    entries = {entry.name: entry for entry in plan.instructions}
    of_entry = {instruction.name for instruction in entry}
    for instruction in entry:
        old = entries.get(instruction.name)
        if instruction.opcode == "parameter" and instruction.index in settled.parameters:
            assert old is not None
            yield replace(old, result=(settled.parameters[instruction.index].sharding,), shared=())
        elif instruction is entry.root:
            yield _root(instruction, old, plan, settled)
        elif old is not None:
            yield old
        else:
            before = entries.get(instruction.operands[0].name)
            shared = before.shared if before is not None and before.opcode == "parameter" else ()
            yield replace(_reshape(instruction, plan, settled, entry.root), shared=shared)
    yield from (entry for entry in plan.instructions if entry.name not in of_entry)


def _reshape(reshape: Instruction, plan: Plan, settled: _WithoutViews, root: Instruction) -> InstructionPlan:
    """The entry of a reshape behind an argument, or ahead of an output."""
    (operand,) = reshape.operands
    if operand.opcode == "parameter" and operand.index in settled.parameters:
        before, after = settled.parameters[operand.index], plan.parameters[operand.index]
    else:
        number = 0 if reshape is root else root.operands.index(reshape)
        before, after = plan.outputs[number], settled.outputs[number]
    return InstructionPlan(
        computation=plan.instructions[0].computation,
        name=reshape.name,
        opcode="reshape",
        operands=((before.sharding,),),
        result=(after.sharding,),
    )


def _root(root: Instruction, old: InstructionPlan | None, plan: Plan, settled: _WithoutViews) -> InstructionPlan:
    """The entry of the root: the old tuple with new output shardings, or a reshape of its own."""
    if old is None:
        return _reshape(root, plan, settled, root)

    def leaves(value: Sequence[TensorSharding], first: int) -> ValueSharding:
        at = enumerate(value, start=first)
        return tuple(settled.outputs[n].sharding if n in settled.outputs else leaf for n, leaf in at)

    if root.opcode != "tuple":
        return old
    operands = tuple(leaves(operand, number) for number, operand in enumerate(old.operands))
    return replace(old, operands=operands, result=leaves(old.result, 0))
