"""What a named session keeps for a successor of this program: a pytree of arrays, followed from step to step."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from shardwright.checkpoints import trees
from shardwright.client.array_specs import ArraySpec, spec_of_stored, spec_of_value
from shardwright.client.arrays import RemoteArray
from shardwright.client.automatic_saves import AutomaticSaves
from shardwright.client.calls import KnownArray
from shardwright.client.checkpoints import as_handles, check_step
from shardwright.client.kept_state import KeptState
from shardwright.client.pending_arrays import even_layout
from shardwright.client.placement import Placement, RowParts, parts_of
from shardwright.client.pytrees import rebuild, structure_of
from shardwright.client.relocation import add_stored
from shardwright.errors import OptionError, SnapshotLostError
from shardwright.plans.layouts import Layout
from shardwright.proto.v1 import common_pb2, master_pb2
from shardwright.protocol import wire

if TYPE_CHECKING:
    from shardwright.client.array_store import ArrayStore
    from shardwright.client.automatic_saves import CheckpointPolicy
    from shardwright.client.session_state import SessionState
    from shardwright.client.step_queue import StepQueue


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """What a session's program before has left.

    state: the pytree that it kept, in handles. updates: steps that had replaced some of it since `keep`, over all
    programs: of a training loop that keeps its state, the steps that it has done. is_live: whether the arrays were
    still on the devices; else they are those of the newest snapshot.
    """

    state: Any
    updates: int
    is_live: bool


def keep(session: SessionState, state: Any, checkpoints: CheckpointPolicy | None, step: int | None) -> None:
    """See `Session.keep`."""
    if not session.cluster.name and checkpoints is None:
        raise OptionError(
            "the session has no name by which another program could take it up",
            where="keep",
            remedy='open it with connect(address, name="…"), or pass checkpoints=…',
        )
    check_step(step)
    tree, leaves = structure_of(state, _spec_of)
    steps = session.steps
    handles = as_handles(steps.arrays, leaves)
    latest = 0 if checkpoints is None else max(session.saves.list_checkpoints(checkpoints.directory), default=0)
    with steps.lock:
        before = steps.kept
        updates = steps.kept_updates if before is None else before.updates
        steps.kept = KeptState(tree, handles, updates)
        automatic = None
        if checkpoints is not None:
            default = max(updates, latest) if before is None else latest
            first = default if step is None else step
            automatic = AutomaticSaves(session.saves, steps.kept, checkpoints, first)
        session.save_by(automatic)


def _spec_of(leaf: Any) -> ArraySpec:
    return leaf.spec if isinstance(leaf, RemoteArray) else spec_of_value(leaf)


def resume(steps: StepQueue, like: Any) -> Resumed | None:
    """See `Session.resume`."""
    name, reply = steps.cluster.name, steps.cluster.master.taken_up
    if reply is None:
        return None
    if reply.HasField("kept"):
        return _resume_from(steps, reply.kept, 0, like)
    if reply.HasField("snapshot_kept") and reply.snapshot_kept.array_ids:
        return _resume_from(steps, reply.snapshot_kept, reply.snapshot, like)
    if reply.was_kept:
        raise SnapshotLostError(
            f"what the session {name!r} kept is lost with its executors, and no snapshot has it",
            remedy="restore a checkpoint, or run init again; snapshot_every=… takes snapshots",
        )
    return None


def _resume_from(steps: StepQueue, message: master_pb2.KeptState, snapshot: int, like: Any) -> Resumed:
    """snapshot: number of the one that has the arrays; 0: they are there."""
    try:
        description = json.loads(message.description)
    except ValueError:
        raise SnapshotLostError(
            f"the description of what the session {steps.cluster.name!r} kept is damaged",
            remedy="restore a checkpoint, or run init again",
        ) from None
    tree = trees.from_json(description["tree"])
    leaves, array_ids, arrays = list(trees.leaves_of(tree)), iter(message.array_ids), list[KnownArray]()
    for leaf, stored in zip(leaves, description["arrays"], strict=True):
        place = _read_place(steps.arrays, stored)
        ids = tuple(next(array_ids) for _ in parts_of(place))
        spec = spec_of_stored(stored["type"], tuple(stored["shape"]), key_impl=leaf.key_impl, is_weak=leaf.is_weak)
        arrays.append(KnownArray(name=ids, spec=spec, ids=ids, place=place))
    handles = _restore(steps, snapshot, arrays) if snapshot else _take_over(steps, arrays)
    steps.kept_updates = message.updates
    by_name = {leaf.name: handle for leaf, handle in zip(leaves, handles, strict=True)}
    state = rebuild(tree, lambda leaf: by_name[leaf.name]) if like is None else _fill(like, handles)
    return Resumed(state=state, updates=message.updates, is_live=not snapshot)


def _take_over(steps: StepQueue, arrays: Sequence[KnownArray]) -> list[RemoteArray]:
    """Handles of arrays that are there."""
    handles = [RemoteArray(steps.arrays, array.spec, ids=array.ids, place=array.place) for array in arrays]
    steps.adopt_arrays(
        {
            array_id: layout
            for array in arrays
            for array_id, (layout, _) in zip(array.ids, parts_of(array.place), strict=True)
        }
    )
    return handles


def _restore(steps: StepQueue, snapshot: int, arrays: Sequence[KnownArray]) -> list[RemoteArray]:
    """Handles of arrays of a snapshot; laid out anew, where it is of a cluster with more nodes."""
    request = master_pb2.RunStepsRequest(restore_snapshot=master_pb2.RestoreSnapshot(snapshot=snapshot))
    layouts = [layout for array in arrays for layout, _ in parts_of(array.place)]
    if all(layout.first_device + layout.mesh.device_count <= steps.cluster.info.device_count for layout in layouts):
        placed = [(array.ids, array.place) for array in arrays]
        request.restore_snapshot.layouts.extend(map(wire.layout_to_proto, layouts))
        request.outputs.extend(array_id for array in arrays for array_id in array.ids)
    else:
        intern, count = steps.arrays.intern, steps.cluster.info.device_count
        places: list[Placement] = [intern(even_layout(array.spec, count)) for array in arrays]
        placed = [
            (add_stored(steps.arrays, request, array, place), place)
            for array, place in zip(arrays, places, strict=True)
        ]
        layouts = [layout for place in places for layout, _ in parts_of(place)]
    new_arrays = list(zip(request.outputs, layouts, strict=True))
    result = steps.submit(request, "the restore of a snapshot", new_arrays=new_arrays)
    result.wait()
    handles = [
        RemoteArray(steps.arrays, array.spec, ids=ids, place=place, result=result)
        for array, (ids, place) in zip(arrays, placed, strict=True)
    ]
    if steps.cluster.info.is_elastic:
        steps.adopt_arrays({})  # other nodes than the snapshot's could not replay its restore
    return handles


def _fill(like: Any, handles: Sequence[RemoteArray]) -> Any:
    """A pytree of the structure of `like`."""
    structure: Any = jax.tree.structure(like)
    if structure.num_leaves != len(handles):
        raise OptionError(
            f"`like` has {structure.num_leaves} arrays, {len(handles)} were kept",
            where="like",
            remedy="pass a pytree of the structure that was kept",
        )
    return jax.tree.unflatten(structure, handles)


def _read_place(arrays: ArrayStore, array: Mapping[str, Any]) -> Placement:
    layouts: list[Layout] = []
    bounds: list[tuple[int, int]] = []
    for text, row in array["parts"]:
        message = common_pb2.ArrayLayout.FromString(b64decode(text))
        layouts.append(arrays.intern(wire.layout_from_proto(message)))
        bounds.append((row, row + (layouts[-1].shape[0] if layouts[-1].shape else 1)))
    if not array["in_rows"]:
        return layouts[0]
    return arrays.intern_rows(RowParts(tuple(layouts), tuple(bounds)))
