"""Resharding of handles to a program's layouts.

In steady state nothing is moved: programs are planned around the arrays' layouts. The exception: arrays laid out
otherwise by a function planned earlier, and state under a plan that another one replaces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwright.client.arrays import Pending, RemoteArray
from shardwright.client.frontends.identity import identity_program
from shardwright.client.limits import MIN_PART_BYTES, MOVE_PARTS
from shardwright.client.pins import pin_layouts
from shardwright.client.placement import Placement, can_be_moved, parts_of
from shardwright.errors import InternalError, ShardwrightError
from shardwright.options.plan_options import PlanOptions
from shardwright.plans.layouts import Layout
from shardwright.plans.shardings import Mesh, TensorSharding

if TYPE_CHECKING:
    from shardwright.client.array_store import ArrayStore
    from shardwright.client.programs import StepProgram
    from shardwright.client.step_queue import StepQueue


def fits(leaves: Sequence[Any], places: Sequence[Placement | None]) -> bool:
    """Whether every handle in `leaves` has its layout in `places`, or can still be read there; None takes any."""
    for leaf, place in zip(leaves, places, strict=True):
        is_elsewhere = isinstance(leaf, RemoteArray) and leaf._place is not place and place is not None
        if is_elsewhere and not is_unread_batch(leaf):
            return False
    return True


def is_unread_batch(leaf: Any) -> bool:
    """Whether workers have yet to read it, in any layout."""
    return isinstance(leaf, RemoteArray) and leaf._is_batch and leaf._pending is not None


def place(steps: StepQueue, leaves: Sequence[Any], program: StepProgram, donated: Sequence[int] = ()) -> list[Any]:
    """`leaves`, with every handle in `program`'s layouts.

    Pending initializers run and pending checkpoints are read now, straight into these places. Other handles are moved
    and keep the new layout. Exceptions, passed in copies with the handles unchanged: a handle with two different
    places; a handle of another step that is not donated to this one.
    """
    places = program.leaf_places
    read = [(leaf, target) for leaf, target in zip(leaves, places, strict=True) if target or not is_unread_batch(leaf)]
    materialize([leaf for leaf, _ in read], [target for _, target in read])
    placed = list(leaves)
    movers: dict[int, Placement] = {
        number: target
        for number, (leaf, target) in enumerate(zip(leaves, places, strict=True))
        if isinstance(leaf, RemoteArray) and target is not None and leaf._place is not target
    }
    if not movers:
        return placed
    moved = _move(steps, [leaves[number] for number in movers], list(movers.values()))
    seen: set[int] = {id(leaf) for leaf, target in zip(leaves, places, strict=True) if _has_placement(leaf, target)}
    for number, copy in zip(movers, moved, strict=True):
        if id(leaves[number]) in seen or (leaves[number]._is_owned and number not in donated):
            placed[number] = copy
        else:
            seen.add(id(leaves[number]))
            leaves[number]._adopt(copy)
    return placed


def _has_placement(leaf: Any, target: Placement | None) -> bool:
    return isinstance(leaf, RemoteArray) and leaf._place is target


def materialize(leaves: Sequence[Any], places: Sequence[Placement | None]) -> None:
    """Runs pending initializers and reads pending checkpoints of `leaves`, straight into these places."""
    targets: dict[int, Placement | None] = {}
    waiting: dict[int, Pending] = {}
    for leaf, wish in zip(leaves, places, strict=True):
        if isinstance(leaf, RemoteArray) and leaf._pending is not None:
            targets[id(leaf)] = targets.get(id(leaf)) or wish
            waiting[id(leaf._pending)] = leaf._pending
    for pending in waiting.values():
        pending.materialize(targets)


def move_leaves(steps: StepQueue, leaves: Sequence[RemoteArray | None], places: Sequence[Placement | None]) -> None:
    """Moves handles, one for each leaf or none, to a program's layouts; see `move_state`."""
    movers: dict[int, tuple[RemoteArray, Placement]] = {}
    for leaf, target in zip(leaves, places, strict=True):
        if leaf is None or target is None or leaf._pending is not None or leaf.is_deleted():
            continue
        if leaf._place is not target:
            movers.setdefault(id(leaf), (leaf, target))
    move_state(steps, [leaf for leaf, _ in movers.values()], [target for _, target in movers.values()])


def move_state(steps: StepQueue, handles: Sequence[RemoteArray], places: Sequence[Placement]) -> None:
    """Moves computed handles on the servers, and waits for it; the handles stay the users'.

    A part of the arrays after the other: only one lies twice at a time. Raises the error of a move; then all lie as
    before.
    """
    moved: list[tuple[RemoteArray, Placement]] = []
    try:
        for group in _in_parts(handles):
            _move_and_wait(steps, [handles[n] for n in group], [places[n] for n in group], moved)
    except ShardwrightError:
        with suppress(ShardwrightError):  # then they lie in either way: the next call moves them
            _move_and_wait(steps, [handle for handle, _ in moved], [before for _, before in moved], [])
        raise


def _move_and_wait(
    steps: StepQueue,
    handles: Sequence[RemoteArray],
    places: Sequence[Placement],
    moved: list[tuple[RemoteArray, Placement]],
) -> None:
    """moved: takes the handles, with their places before."""
    copies = _move(steps, handles, places, compiles=False)
    for copy in copies:
        copy.block_until_ready()
    for handle, copy in zip(handles, copies, strict=True):
        assert handle._place is not None
        moved.append((handle, handle._place))
        handle._adopt(copy)


def _in_parts(handles: Sequence[RemoteArray]) -> Iterator[list[int]]:
    """Numbers of the handles, in parts of about equal sizes."""
    sizes = [sum(layout.size_bytes for layout, _ in parts_of(handle._place)) for handle in handles if handle._place]
    part: list[int] = []
    part_bytes = 0
    for number, size in enumerate(sizes):
        part.append(number)
        part_bytes += size
        if part_bytes >= max(MIN_PART_BYTES, sum(sizes) / MOVE_PARTS):
            yield part
            part, part_bytes = [], 0
    if part:
        yield part


def _move(
    steps: StepQueue, handles: Sequence[RemoteArray], places: Sequence[Placement], *, compiles: bool = True
) -> list[RemoteArray]:
    """Copies of `handles` at `places`.

    compiles: moves on one mesh are a program's, with the collectives of XLA, not pieces from device to device.
    """
    on_mesh: dict[tuple[Mesh, int], list[int]] = {}
    between: list[int] = []
    copies: dict[int, RemoteArray] = {}
    for number, (handle, target) in enumerate(zip(handles, places, strict=True)):
        assert handle._place is not None
        mesh = _common_mesh(handle._place, target)
        is_movable = can_be_moved(handle._place, target)
        if mesh is not None and (compiles or not is_movable):
            on_mesh.setdefault(mesh, []).append(number)
        elif is_movable:
            between.append(number)
        else:
            copies[number] = _move_view(steps, handle, target)
    copies.update(zip(between, steps.move([handles[n] for n in between], [places[n] for n in between]), strict=True))
    for numbers in on_mesh.values():
        layouts = [layout for layout in (places[n] for n in numbers) if isinstance(layout, Layout)]
        copies.update(zip(numbers, _move_on_servers(steps, [handles[n] for n in numbers], layouts), strict=True))
    return [copies[number] for number in range(len(handles))]


def _move_view(steps: StepQueue, handle: RemoteArray, target: Placement) -> RemoteArray:
    """A copy of an array that is viewed in other dimensions, or parts of one: in the user's dimensions on its way."""
    here, there = (_without_view(steps.arrays, place) for place in (handle._place, target))
    if here is None or there is None or not can_be_moved(here, there):  # parts with views of their own
        (ids,) = steps.arrays.upload([(np.asarray(handle), target)])
        return RemoteArray(steps.arrays, handle.spec, ids=ids, place=target)
    if isinstance(here, Layout) and here is not handle._place:
        (handle,) = _move_on_servers(steps, [handle], [here])
    if here is not there:
        (handle,) = steps.move([handle], [there])
    if isinstance(target, Layout) and there is not target:
        (handle,) = _move_on_servers(steps, [handle], [target])
    return handle


def _without_view(arrays: ArrayStore, place: Placement | None) -> Placement | None:
    """The same array in the user's dimensions, on the same devices; None for parts with views."""
    if not isinstance(place, Layout):
        is_viewed = place is None or any(layout.view_of is not None for layout in place.layouts)
        return None if is_viewed else place
    if place.view_of is None:
        return place
    shape, free = place.view_of, list(place.mesh.axes)
    dims: list[tuple[str, ...]] = []
    for size in shape:
        axes: list[str] = []
        parts = 1
        for axis in list(free):
            if size % (parts * axis.size) == 0:
                parts *= axis.size
                axes.append(axis.name)
                free.remove(axis)
        dims.append(tuple(axes))
    plain = Layout(
        element_type=place.element_type,
        shape=shape,
        mesh=place.mesh,
        sharding=TensorSharding(tuple(dims)),
        stored_shape=shape,
        first_device=place.first_device,
    )
    return arrays.intern(plain)


def _common_mesh(here: Placement | None, there: Placement) -> tuple[Mesh, int] | None:
    """Mesh and first device of both, or None when they differ."""
    if not (isinstance(here, Layout) and isinstance(there, Layout)):
        return None
    mesh = (here.mesh, here.first_device)
    return mesh if mesh == (there.mesh, there.first_device) else None


def _move_on_servers(steps: StepQueue, handles: Sequence[RemoteArray], layouts: Sequence[Layout]) -> list[RemoteArray]:
    """One program returning its arguments, planned with both sides pinned; all layouts share one mesh."""

    lowered = identity_program([handle.spec for handle in handles])
    program = steps.programs.prepare_freely(
        lowered,
        pin_layouts(
            PlanOptions(mesh=layouts[0].mesh.sizes),
            {n: handle._place for n, handle in enumerate(handles) if isinstance(handle._place, Layout)},
            dict(enumerate(layouts)),
        ),
        devices=steps.cluster.part_of_cluster(layouts[0]),
    )
    results = [result for result in steps.run(program, handles) if result is not None]
    for result, layout in zip(results, layouts, strict=True):
        if result._place is not layout:
            raise InternalError(f"a move to {layout.sharding} ended as {result.sharding}")
    return results
