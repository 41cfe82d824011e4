"""From a plan's options to a rewrite's constraints, and from a rewrite to the variables of a plan."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from shardwright.hlo import Module
from shardwright.options.plan_options import PlanOptions
from shardwright.planner.rewrites.boundary import reshape_variables
from shardwright.planner.rewrites.dim_classes import Required, Views
from shardwright.planner.rewrites.split_dims import Rewritten, check_required, rewrite, variable_dims, views_between
from shardwright.plans.plan import Plan, VariablePlan


def rewrite_for(
    module: Module,
    options: PlanOptions,
    pinned_arguments: Collection[int] = (),
    original: Module | None = None,
    *,
    pinned_outputs: Collection[int] = (),
) -> Rewritten:
    """The program planned under these options.

    original: the user's program, for a `module` with changed storage of some arguments; changes are relative to it.
    pinned_arguments: array leaves with dimensions in the user's constraints, by number; they stay.
    pinned_outputs: the same for outputs.

    Arrays with an existing sharding (`argument_axes`, `output_axes`) keep their dimensions, in any view.
    `rewrites="none"` changes nothing else.
    Raises PlanError for a view that does not fit the program.
    """
    original = original or module
    arguments, outputs = variable_dims(original)
    required = Required(
        parameters={
            **{leaf: arguments[leaf] for leaf in pinned_arguments},
            **_views_required(options.argument_axes, options.argument_views, arguments),
        },
        outputs={
            **{leaf: outputs[leaf] for leaf in pinned_outputs},
            **_views_required(options.output_axes, options.output_views, outputs),
        },
    )
    if options.rewrites != "none":
        rewritten = rewrite(module, required)
        return views_between(original, rewritten.module, rewritten.notes)
    return views_between(original, reshape_variables(module, check_required(module, required)))


def _views_required(axes: Collection[int], views: Views, dims: list[tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
    return {leaf: views.get(leaf, dims[leaf]) for leaf in axes if leaf < len(dims)}


def with_views(plan: Plan, rewritten: Rewritten, original: Module, original_sha256: str) -> Plan:
    """The plan of a rewritten program, with the user's dimensions in its variables."""
    if rewritten.module is original:
        return plan
    arguments, outputs = variable_dims(original)
    return replace(
        plan,
        parameters=_attach_views(plan.parameters, rewritten.parameters, arguments),
        outputs=_attach_views(plan.outputs, rewritten.outputs, outputs),
        notes=(*plan.notes, *rewritten.notes),
        original_sha256=original_sha256,
    )


def _attach_views(
    variables: tuple[VariablePlan, ...], views: Mapping[int, tuple[int, ...]], dims: list[tuple[int, ...]]
) -> tuple[VariablePlan, ...]:
    return tuple(
        replace(variable, view_of=dims[leaf]) if leaf in views else variable for leaf, variable in enumerate(variables)
    )
