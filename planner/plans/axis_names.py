"""Names of mesh axes that say what they do: the axis that splits the batch is `data`.

A search takes axes by their sizes and places; their names are nothing to it, so that the batch may end on `model` and
the weights on `data`. Where the user named no axis, the finished plan is put right: the axis that splits the inputs'
first dimension and `data` exchange their names, wherever the plan writes them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from math import prod

from shardwright.options.user_options import DEFAULT_AXES
from shardwright.plans.plan import InstructionPlan, Plan, VariablePlan
from shardwright.plans.shardings import Mesh, TensorSharding, ValueSharding

DATA = DEFAULT_AXES[0]

#: A layout in a text: `[model, data·sequence, -]`, with ` partial over data`.
_LAYOUT = re.compile(r"\[[-\w·, ]*\](?: partial over [\w·]+)?")
_NAME = re.compile(r"\w+")


def name_axes(plan: Plan) -> Plan:
    """The plan with `data` as the name of the axis that splits the batch; itself where it has that name or there is
    none, or where axes have the names of the program's manual ones.
    """
    batch = _find_batch_axis(plan)
    if batch is None or plan.manual_axes:
        return plan
    return _rename(plan, {batch: DATA, DATA: batch})


def _find_batch_axis(plan: Plan) -> str | None:
    """The axis that splits most of the inputs' first dimensions; None where `data` splits some, or no axis does, or the
    plan knows no state apart from its inputs.
    """
    inputs = [variable for variable in plan.parameters if variable.alias is None and variable.shape]
    if DATA not in plan.mesh.sizes or len(inputs) == len(plan.parameters):
        return None
    elements: dict[str, int] = {}
    for variable in inputs:
        for axis in variable.sharding.dims[0]:
            elements[axis] = elements.get(axis, 0) + prod(variable.shape)
    if not elements or DATA in elements:
        return None
    return max(plan.mesh.sizes, key=lambda axis: elements.get(axis, 0))


def _rename(plan: Plan, names: dict[str, str]) -> Plan:
    known: dict[TensorSharding, TensorSharding] = {}

    def axes(old: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(names.get(axis, axis) for axis in old)

    def sharding(old: TensorSharding) -> TensorSharding:
        if old not in known:
            known[old] = TensorSharding(tuple(map(axes, old.dims)), axes(old.unreduced))
        return known[old]

    before, mesh = plan.mesh, Mesh.of({names.get(axis.name, axis.name): axis.size for axis in plan.mesh.axes})

    def text(old: str) -> str:
        renamed = old.replace(str(before), str(mesh))
        return _LAYOUT.sub(lambda layout: _rename_layout(layout[0], names, before), renamed)

    return replace(
        plan,
        mesh=mesh,
        instructions=_rename_instructions(plan.instructions, sharding, axes, text),
        parameters=_rename_variables(plan.parameters, sharding),
        outputs=_rename_variables(plan.outputs, sharding),
        collectives=tuple(replace(each, axes=axes(each.axes), cause=text(each.cause)) for each in plan.collectives),
        cost=replace(plan.cost, bound_scope=text(plan.cost.bound_scope)),
        candidates=tuple(
            replace(each, mesh=mesh) if each.mesh == before and each.step_s == plan.cost.step_s else each
            for each in plan.candidates
        ),
        segments=tuple(
            replace(each, boundary=tuple((name, sharding(lies)) for name, lies in each.boundary))
            for each in plan.segments
        ),
        notes=tuple(map(text, plan.notes)),
    )


def _rename_instructions(
    instructions: tuple[InstructionPlan, ...],
    sharding: Callable[[TensorSharding], TensorSharding],
    axes: Callable[[tuple[str, ...]], tuple[str, ...]],
    text: Callable[[str], str],
) -> tuple[InstructionPlan, ...]:
    known: dict[ValueSharding, ValueSharding] = {}

    def value(old: ValueSharding) -> ValueSharding:
        if old not in known:
            known[old] = tuple(map(sharding, old))
        return known[old]

    return tuple(
        [
            replace(
                each,
                operands=tuple(map(value, each.operands)),
                result=value(each.result),
                partial=axes(each.partial),
                shared=value(each.shared),
                reason=text(each.reason) if each.reason else "",
            )
            for each in instructions
        ]
    )


def _rename_variables(
    variables: tuple[VariablePlan, ...], sharding: Callable[[TensorSharding], TensorSharding]
) -> tuple[VariablePlan, ...]:
    return tuple(replace(each, sharding=sharding(each.sharding)) for each in variables)


def _rename_layout(layout: str, names: dict[str, str], mesh: Mesh) -> str:
    """A layout with other names; what only looks like one (`params[data]`) stays."""
    words = set(_NAME.findall(layout)) - {"partial", "over"}
    if not words <= mesh.sizes.keys():
        return layout
    return _NAME.sub(lambda word: names.get(word[0], word[0]), layout)
