"""Layouts that a program is planned around: arrays on the servers stay where they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeGuard

from shardwright.client.arrays import RemoteArray
from shardwright.client.placement import Placement
from shardwright.client.programs import list_donated_leaves
from shardwright.options.plan_options import PlanOptions
from shardwright.options.user_options import name_matches
from shardwright.plans.layouts import Layout
from shardwright.plans.shardings import Mesh

if TYPE_CHECKING:
    from shardwright.client.frontends.program import Program
    from shardwright.client.programs import StepProgram


def pin_arrays(
    options: PlanOptions, lowered: Program, leaves: Sequence[Any], main: StepProgram | None, device_count: int
) -> PlanOptions:
    """The options of a step's program, plus pinned layouts of the arrays that stay in place.

    main: the step's first program, if this is another one. device_count: of the cluster.
    """
    options = replace(
        options,
        argument_names=lowered.argument_names,
        output_names=lowered.output_names,
        local_arguments=tuple(lowered.leaf_numbers[number] for number in list_batch_leaves(leaves)),
    )
    pinned = _layouts_to_pin(options, lowered, leaves, main, device_count)
    mesh = _common_mesh(options, list(pinned.values()))
    if mesh is None:
        return options
    numbers = lowered.leaf_numbers
    arguments = {numbers[n]: layout for n, layout in pinned.items() if layout.mesh == mesh}
    updated = {output: arguments[argument] for output, argument in lowered.aliases.items() if argument in arguments}
    outputs = {} if main is None else _first_output_layouts(lowered, main, mesh, device_count)
    return pin_layouts(replace(options, mesh=mesh.sizes), arguments, outputs | updated)


def pin_layouts(options: PlanOptions, arguments: Mapping[int, Layout], outputs: Mapping[int, Layout]) -> PlanOptions:
    """The options, plus pinned layouts of arguments and outputs (by flat number)."""

    def axes(layouts: Mapping[int, Layout]) -> dict[int, tuple[tuple[str, ...], ...]]:
        return {number: layout.sharding.dims for number, layout in layouts.items()}

    def views(layouts: Mapping[int, Layout]) -> dict[int, tuple[int, ...]]:
        return {number: layout.shape for number, layout in layouts.items() if layout.view_of is not None}

    return replace(
        options,
        argument_axes=axes(arguments),
        output_axes=axes(outputs),
        argument_views=views(arguments),
        output_views=views(outputs),
    )


def may_stay(place: Placement | None, device_count: int) -> TypeGuard[Layout]:
    """Whether a program can be planned around a placement: a layout over the whole cluster."""
    return isinstance(place, Layout) and len(place.devices) == device_count


def is_pinned_twice(options: PlanOptions) -> bool:
    """Whether both the user and arrays on the servers say how arguments lie."""
    return options.force is not None and bool(options.argument_axes or options.output_axes)


def list_batch_leaves(leaves: Sequence[Any]) -> tuple[int, ...]:
    """Numbers of the leaves that workers read themselves: no client sends them."""
    return tuple(number for number, leaf in enumerate(leaves) if getattr(leaf, "_is_batch", False))


def _layouts_to_pin(
    options: PlanOptions, lowered: Program, leaves: Sequence[Any], main: StepProgram | None, device_count: int
) -> dict[int, Layout]:
    """Leaf number → pinned layout.

    A step that updates arrays in place chooses mesh and layouts once: at its first plan, unless another such step has
    chosen before. Steps that only read arrays accept their layouts.
    """
    donated = set(list_donated_leaves(lowered))
    has_wishes = options.mesh is not None or options.force is not None
    pinned: dict[int, Layout] = {}
    for number, (leaf, argument) in enumerate(zip(leaves, lowered.leaf_numbers, strict=True)):
        if not isinstance(leaf, RemoteArray) or not may_stay(leaf._place, device_count):
            continue
        is_mine = number in donated
        if main is None and donated and ((is_mine and has_wishes) or not leaf._is_owned):
            continue
        if not is_mine and _is_forced(options, lowered.arguments[argument].name):
            continue
        pinned[number] = leaf._place
    if main is None:
        return pinned
    settled = _first_argument_layouts(lowered, main, device_count)
    return {n: layout for n, layout in settled.items() if n in donated} | pinned


def _first_argument_layouts(lowered: Program, main: StepProgram, device_count: int) -> dict[int, Layout]:
    """Leaf number → layout of the argument of the same name and type in the step's first program."""
    layout_by_argument = dict(zip(main.lowered.arguments, main.arguments, strict=True))
    arguments = [lowered.arguments[number] for number in lowered.leaf_numbers]
    places = {n: layout_by_argument[argument] for n, argument in enumerate(arguments) if argument in layout_by_argument}
    return {n: place for n, place in places.items() if may_stay(place, device_count)}


def _first_output_layouts(lowered: Program, main: StepProgram, mesh: Mesh, device_count: int) -> dict[int, Layout]:
    """Layouts of outputs shared with the step's first program: state that is not donated keeps its own."""
    layout_by_output = dict(zip(main.lowered.outputs, main.outputs, strict=True))
    places = {n: layout_by_output[output] for n, output in enumerate(lowered.outputs) if output in layout_by_output}
    return {n: place for n, place in places.items() if may_stay(place, device_count) and place.mesh == mesh}


def _is_forced(options: PlanOptions, name: str) -> bool:
    """Whether the user's force or rest pins this very argument; then the array is moved when needed."""
    if options.rest != "search":
        return True
    force = options.force
    return not isinstance(force, str | None) and any(name_matches(pattern, name) for pattern in force)


def _common_mesh(options: PlanOptions, pinned: Sequence[Layout]) -> Mesh | None:
    """The mesh with most bytes of `pinned`; None when the user wants another, or nothing is pinned."""
    sizes: dict[Mesh, int] = {}
    for layout in pinned:
        sizes[layout.mesh] = sizes.get(layout.mesh, 0) + layout.size_bytes
    if not sizes:
        return None
    mesh = max(sizes, key=lambda candidate: sizes[candidate])
    is_wanted = options.mesh is None or dict(options.mesh) == mesh.sizes
    return mesh if is_wanted else None
