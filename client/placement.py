"""Bringing handles into the layout that a program wants.

In steady state nothing is moved: programs are planned to fit the arrays. What
is left is arrays that a function planned earlier has laid out otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from shardwright.client.arrays import Pending, RemoteArray
from shardwright.client.frontends.jax import JaxFunction, Signature
from shardwright.config import PlanOptions
from shardwright.errors import InternalError
from shardwright.layouts import Layout
from shardwright.plans import Mesh

if TYPE_CHECKING:
    from shardwright.client.programs import Program
    from shardwright.client.session import Session


def fits(leaves: Sequence[Any], layouts: Sequence[Layout]) -> bool:
    """Whether every handle among `leaves` lies as `layouts` say."""
    for leaf, layout in zip(leaves, layouts, strict=True):
        if type(leaf) is RemoteArray and leaf._layout is not layout:
            return False
    return True


def place(session: Session, leaves: Sequence[Any], program: Program, donated: Sequence[int] = ()) -> list[Any]:
    """`leaves`, with every handle laid out as `program` wants it.

    Initializers and checkpoints that wait are run and read now, straight into these layouts. Handles that lie
    otherwise are moved and keep their new layout. Copies are passed, and the
    handles left as they are, where they stand twice with different layouts, or
    belong to another step and are not donated to this one.
    """
    layouts = program.leaf_layouts
    _materialize(leaves, layouts, program.plan.mesh)
    placed = list(leaves)
    movers = [
        number
        for number, (leaf, layout) in enumerate(zip(leaves, layouts, strict=True))
        if type(leaf) is RemoteArray and leaf._layout is not layout
    ]
    if not movers:
        return placed
    moved = _move(session, [leaves[number] for number in movers], [layouts[number] for number in movers])
    seen: set[int] = {id(leaf) for leaf, layout in zip(leaves, layouts, strict=True) if _lies_as(leaf, layout)}
    for number, copy in zip(movers, moved, strict=True):
        if id(leaves[number]) in seen or (leaves[number]._is_owned and number not in donated):
            placed[number] = copy
        else:
            seen.add(id(leaves[number]))
            leaves[number]._adopt(copy)
    return placed


def settled(options: PlanOptions, arguments: Mapping[int, Layout], outputs: Mapping[int, Layout]) -> PlanOptions:
    """The options, with arguments and outputs (by flat number) that must lie as these layouts say."""

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


def _lies_as(leaf: Any, layout: Layout) -> bool:
    return type(leaf) is RemoteArray and leaf._layout is layout


def _materialize(leaves: Sequence[Any], layouts: Sequence[Layout], mesh: Mesh) -> None:
    wanted: dict[int, Layout] = {}
    waiting: dict[int, Pending] = {}
    for leaf, layout in zip(leaves, layouts, strict=True):
        if type(leaf) is RemoteArray and leaf._pending is not None:
            wanted.setdefault(id(leaf), layout)
            waiting[id(leaf._pending)] = leaf._pending
    for pending in waiting.values():
        pending.materialize(mesh, wanted)


def _move(session: Session, handles: Sequence[RemoteArray], layouts: Sequence[Layout]) -> list[RemoteArray]:
    """Copies of `handles` in `layouts`, all of one mesh."""
    on_mesh = [n for n, (handle, layout) in enumerate(zip(handles, layouts, strict=True)) if _same_mesh(handle, layout)]
    copies: dict[int, RemoteArray] = {}
    if on_mesh:
        moved = _move_on_servers(session, [handles[n] for n in on_mesh], [layouts[n] for n in on_mesh])
        copies.update(zip(on_mesh, moved, strict=True))
    for number, (handle, layout) in enumerate(zip(handles, layouts, strict=True)):
        if number not in copies:  # no program spans two meshes: through the client
            array_id = session.upload(np.asarray(handle), layout)
            copies[number] = RemoteArray(session, handle.spec, array_id=array_id, layout=layout)
    return [copies[number] for number in range(len(handles))]


def _same_mesh(handle: RemoteArray, layout: Layout) -> bool:
    return handle._layout is not None and handle._layout.mesh == layout.mesh


def _move_on_servers(session: Session, handles: Sequence[RemoteArray], layouts: Sequence[Layout]) -> list[RemoteArray]:
    """One program that returns its arguments, planned with both sides pinned."""

    def relayout(*arrays: Any) -> tuple[Any, ...]:
        return arrays

    tree = jax.tree.structure((tuple(handles), {}))
    lowered = JaxFunction(relayout).lower(
        Signature((), tree, tuple(handle.spec for handle in handles)), platform=session.info.platform
    )
    program = session.prepare(
        lowered,
        settled(
            PlanOptions(mesh=layouts[0].mesh.sizes),
            {n: handle._layout for n, handle in enumerate(handles) if handle._layout},
            dict(enumerate(layouts)),
        ),
    )
    results = [result for result in session.run(program, handles) if result is not None]
    for result, layout in zip(results, layouts, strict=True):
        if result._layout is not layout:
            raise InternalError(f"a move to {layout.sharding} ended as {result.sharding}")
    return results
