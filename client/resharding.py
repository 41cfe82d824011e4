"""Resharding of handles to a program's layouts.

In steady state nothing is moved: programs are planned around the arrays' layouts. The exception: arrays laid out
otherwise by a function planned earlier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwright.client.arrays import Pending, RemoteArray
from shardwright.client.frontends.identity import identity_program
from shardwright.client.placement import Placement, can_be_moved
from shardwright.errors import InternalError
from shardwright.options.plan_options import PlanOptions
from shardwright.plans.layouts import Layout
from shardwright.plans.shardings import Mesh

if TYPE_CHECKING:
    from shardwright.client.programs import StepProgram
    from shardwright.client.session_state import SessionState


def fits(leaves: Sequence[Any], places: Sequence[Placement | None]) -> bool:
    """Whether every handle in `leaves` has its layout in `places`; None takes any."""
    for leaf, place in zip(leaves, places, strict=True):
        if isinstance(leaf, RemoteArray) and leaf._place is not place and place is not None:
            return False
    return True


def place(state: SessionState, leaves: Sequence[Any], program: StepProgram, donated: Sequence[int] = ()) -> list[Any]:
    """`leaves`, with every handle in `program`'s layouts.

    Pending initializers run and pending checkpoints are read now, straight into these places. Other handles are moved
    and keep the new layout. Exceptions, passed in copies with the handles unchanged: a handle with two different
    places; a handle of another step that is not donated to this one.
    """
    places = program.leaf_places
    materialize(leaves, places)
    placed = list(leaves)
    movers: dict[int, Placement] = {
        number: wanted
        for number, (leaf, wanted) in enumerate(zip(leaves, places, strict=True))
        if isinstance(leaf, RemoteArray) and wanted is not None and leaf._place is not wanted
    }
    if not movers:
        return placed
    moved = _move(state, [leaves[number] for number in movers], list(movers.values()))
    seen: set[int] = {id(leaf) for leaf, wanted in zip(leaves, places, strict=True) if _has_placement(leaf, wanted)}
    for number, copy in zip(movers, moved, strict=True):
        if id(leaves[number]) in seen or (leaves[number]._is_owned and number not in donated):
            placed[number] = copy
        else:
            seen.add(id(leaves[number]))
            leaves[number]._adopt(copy)
    return placed


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


def _has_placement(leaf: Any, wanted: Placement | None) -> bool:
    return isinstance(leaf, RemoteArray) and leaf._place is wanted


def materialize(leaves: Sequence[Any], places: Sequence[Placement | None]) -> None:
    """Runs pending initializers and reads pending checkpoints of `leaves`, straight into these places."""
    wanted: dict[int, Placement | None] = {}
    waiting: dict[int, Pending] = {}
    for leaf, wish in zip(leaves, places, strict=True):
        if isinstance(leaf, RemoteArray) and leaf._pending is not None:
            wanted[id(leaf)] = wanted.get(id(leaf)) or wish
            waiting[id(leaf._pending)] = leaf._pending
    for pending in waiting.values():
        pending.materialize(wanted)


def _move(state: SessionState, handles: Sequence[RemoteArray], places: Sequence[Placement]) -> list[RemoteArray]:
    """Copies of `handles` at `places`."""
    on_mesh: dict[tuple[Mesh, int], list[int]] = {}
    between: list[int] = []
    through_client: list[int] = []
    copies: dict[int, RemoteArray] = {}
    for number, (handle, wanted) in enumerate(zip(handles, places, strict=True)):
        mesh = _common_mesh(handle._place, wanted)
        if mesh is not None:
            on_mesh.setdefault(mesh, []).append(number)
        elif handle._place is not None and can_be_moved(handle._place, wanted):
            between.append(number)
        else:  # viewed in other dimensions
            through_client.append(number)
            handle.copy_to_host_async()
    contents = [(np.asarray(handles[n]), places[n]) for n in through_client]
    for number, ids in zip(through_client, state.upload(contents), strict=True):
        copies[number] = RemoteArray(state, handles[number].spec, ids=ids, place=places[number])
    copies.update(zip(between, state.move([handles[n] for n in between], [places[n] for n in between]), strict=True))
    for numbers in on_mesh.values():
        layouts = [layout for layout in (places[n] for n in numbers) if isinstance(layout, Layout)]
        copies.update(zip(numbers, _move_on_servers(state, [handles[n] for n in numbers], layouts), strict=True))
    return [copies[number] for number in range(len(handles))]


def _common_mesh(here: Placement | None, there: Placement) -> tuple[Mesh, int] | None:
    """Mesh and first device of both, or None when they differ."""
    if not (isinstance(here, Layout) and isinstance(there, Layout)):
        return None
    mesh = (here.mesh, here.first_device)
    return mesh if mesh == (there.mesh, there.first_device) else None


def _move_on_servers(
    state: SessionState, handles: Sequence[RemoteArray], layouts: Sequence[Layout]
) -> list[RemoteArray]:
    """One program returning its arguments, planned with both sides pinned; all layouts share one mesh."""

    lowered = identity_program([handle.spec for handle in handles])
    program = state.prepare(
        lowered,
        pin_layouts(
            PlanOptions(mesh=layouts[0].mesh.sizes),
            {n: handle._place for n, handle in enumerate(handles) if isinstance(handle._place, Layout)},
            dict(enumerate(layouts)),
        ),
        devices=state.part_of_cluster(layouts[0]),
    )
    results = [result for result in state.run(program, handles) if result is not None]
    for result, layout in zip(results, layouts, strict=True):
        if result._place is not layout:
            raise InternalError(f"a move to {layout.sharding} ended as {result.sharding}")
    return results
