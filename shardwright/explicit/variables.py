"""Arguments and results in the dimensions of the user's program, where a plan has them in others."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from shardwright.plans.plan import Plan, VariablePlan
from shardwright.plans.shardings import Mesh, TensorSharding


def as_user_sees(plan: Plan) -> tuple[Plan, list[str]]:
    """The plan with its variables in the user's dimensions, and a sentence for each that cannot lie so as it does."""
    notes: list[str] = []

    def project(variable: VariablePlan) -> VariablePlan:
        if variable.view_of is None:
            return variable
        sharding = _merge_dims(variable, plan.mesh)
        if sharding is None:
            notes.append(
                f"{variable.name}: the plan has it as {list(variable.shape)}, {variable.sharding}; of the "
                f"{list(variable.user_shape)} of the function no sharding says that, and it is whole here"
            )
            sharding = TensorSharding.replicated(len(variable.user_shape))
        return VariablePlan.from_sharding(
            variable.number,
            variable.name,
            variable.element_type,
            variable.user_shape,
            sharding,
            plan.mesh,
            alias=variable.alias,
        )

    parameters, outputs = (tuple(map(project, variables)) for variables in (plan.parameters, plan.outputs))
    return replace(plan, parameters=parameters, outputs=outputs), notes


def _merge_dims(variable: VariablePlan, mesh: Mesh) -> TensorSharding | None:
    """The layout over the user's dimensions: of those that a dimension became, the first may be split; None: others
    are, or a planned dimension is several of the user's.
    """
    if variable.is_padded or variable.is_stacked:
        return None
    pairs = list(zip(variable.shape, variable.sharding.dims, strict=True))
    dims: list[tuple[str, ...]] = []
    for size in variable.user_shape:
        part: list[tuple[int, tuple[str, ...]]] = []
        while pairs and prod(each for each, _ in part) < size:
            part.append(pairs.pop(0))
        while not dims and pairs and pairs[0][0] == 1 and not part:
            part.append(pairs.pop(0))
        if prod(each for each, _ in part) != size:
            return None
        split = [(each, axes) for each, axes in part if each > 1 or axes]
        if any(axes for _, axes in split[1:]):
            return None
        dims.append(split[0][1] if split else ())
    return TensorSharding(tuple(dims)) if all(each == 1 for each, _ in pairs) else None
