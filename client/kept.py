"""What a named session keeps for a successor of this program: a pytree of arrays, followed from step to step.

A step that takes a kept array over has its successor kept in its place, in the same message: whenever this program
ends, the servers know a state that belongs together.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from shardwright.checkpoints import trees
from shardwright.client.array_specs import ArraySpec, array_type, spec_of_stored, spec_of_value
from shardwright.client.arrays import RemoteArray
from shardwright.client.pending_arrays import even_layout
from shardwright.client.placement import Placement, RowParts, parts_of
from shardwright.client.pytrees import rebuild, structure_of
from shardwright.client.relocation import KnownArray, add_stored
from shardwright.errors import OptionError, SnapshotLostError
from shardwright.plans.layouts import Layout
from shardwright.proto.v1 import common_pb2, master_pb2
from shardwright.protocol import wire

if TYPE_CHECKING:
    from shardwright.client.automatic_saves import CheckpointPolicy
    from shardwright.client.programs import StepProgram
    from shardwright.client.session_state import SessionState


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


class KeptState:
    """Of one session. The caller of its methods holds the session's lock.

    tree, leaves: the state as it is after the last step that was sent. updates: see `Resumed`. is_lost: whether its
    arrays are gone with the executors: then nothing is kept.
    """

    def __init__(self, tree: trees.Tree, leaves: Sequence[RemoteArray], updates: int) -> None:
        self.tree = tree
        self.leaves = list(leaves)
        self._sent = b""  # the description that the server has
        self.updates = updates
        self.is_lost = False

    def message_after(
        self, program: StepProgram, leaves: Sequence[Any], outputs: Sequence[tuple[int, ...]]
    ) -> master_pb2.KeptState | None:
        """What is kept once a step has begun; None while some of it has yet to be made. outputs: ids of its results."""
        if self.is_lost:
            return master_pb2.KeptState(updates=self.updates)
        successors = _successors(program, leaves)
        places: list[tuple[tuple[int, ...], Placement]] = []
        for leaf in self.leaves:
            output = successors.get(id(leaf))
            ids, place = (leaf._ids, leaf._place) if output is None else (outputs[output], program.outputs[output])
            if not ids or place is None:
                return None
            places.append((ids, place))
        description = self._describe([place for _, place in places])
        replaced = any(id(leaf) in successors for leaf in self.leaves)
        message = master_pb2.KeptState(
            array_ids=[array_id for ids, _ in places for array_id in ids], updates=self.updates + replaced
        )
        if description != self._sent:
            message.description = self._sent = description
        return message

    def put_into(
        self,
        request: master_pb2.RunStepsRequest,
        program: StepProgram,
        leaves: Sequence[Any],
        outputs: Sequence[tuple[int, ...]],
    ) -> None:
        """Has a step's request say what is kept once it has begun; see `message_after`."""
        message = self.message_after(program, leaves, outputs)
        if message is not None:
            request.kept.CopyFrom(message)

    def forget_sent(self) -> None:
        """The last request was not sent: the next one describes the state again."""
        self._sent = b""

    def follow(self, program: StepProgram, leaves: Sequence[Any], results: Sequence[RemoteArray | None]) -> None:
        """A step was sent: its results take the place of what it took over."""
        successors = _successors(program, leaves)
        followed = [successors.get(id(leaf)) for leaf in self.leaves]
        self.updates += any(output is not None for output in followed)
        for number, output in enumerate(followed):
            result = None if output is None else results[output]
            if result is not None:
                self.leaves[number] = result

    def _describe(self, places: Sequence[Placement]) -> bytes:
        arrays = [
            {
                "type": array_type("", leaf.spec).element_type,
                "shape": array_type("", leaf.spec).shape,
                "in_rows": isinstance(place, RowParts),
                "parts": [
                    [b64encode(wire.layout_to_proto(layout).SerializeToString()).decode(), row]
                    for layout, row in parts_of(place)
                ],
            }
            for leaf, place in zip(self.leaves, places, strict=True)
        ]
        return json.dumps({"tree": trees.to_json(self.tree), "arrays": arrays}, separators=(",", ":")).encode()


def keep(session: SessionState, state: Any, checkpoints: CheckpointPolicy | None, step: int | None) -> None:
    """See `Session.keep`."""
    from shardwright.client.automatic_saves import AutomaticSaves
    from shardwright.client.checkpoints import as_handles, check_step

    if not session.name and checkpoints is None:
        raise OptionError(
            "the session has no name by which another program could take it up",
            where="keep",
            remedy='open it with connect(address, name="…"), or pass checkpoints=…',
        )
    check_step(step)
    tree, leaves = structure_of(state, _spec_of)
    handles = as_handles(session, leaves)
    latest = 0 if checkpoints is None else max(session.list_checkpoints(checkpoints.directory), default=0)
    with session.lock:
        before = session.kept
        updates = session.kept_updates if before is None else before.updates
        session.kept = KeptState(tree, handles, updates)
        session.automatic_saves = None
        if checkpoints is not None:
            default = max(updates, latest) if before is None else latest
            first = default if step is None else step
            session.automatic_saves = AutomaticSaves(session, session.kept, checkpoints, first)


def _spec_of(leaf: Any) -> ArraySpec:
    return leaf.spec if isinstance(leaf, RemoteArray) else spec_of_value(leaf)


def resume(session: SessionState, like: Any) -> Resumed | None:
    """See `Session.resume`."""
    reply = session.master.taken_up
    if reply is None:
        return None
    if reply.HasField("kept"):
        return _resume_from(session, reply.kept, 0, like)
    if reply.HasField("snapshot_kept") and reply.snapshot_kept.array_ids:
        return _resume_from(session, reply.snapshot_kept, reply.snapshot, like)
    if reply.was_kept:
        raise SnapshotLostError(
            f"what the session {session.name!r} kept is lost with its executors, and no snapshot has it",
            remedy="restore a checkpoint, or run init again; snapshot_every=… takes snapshots",
        )
    return None


def _resume_from(session: SessionState, kept: master_pb2.KeptState, snapshot: int, like: Any) -> Resumed:
    """snapshot: number of the one that has the arrays; 0: they are there."""
    try:
        description = json.loads(kept.description)
    except ValueError:
        raise SnapshotLostError(
            f"the description of what the session {session.name!r} kept is damaged",
            remedy="restore a checkpoint, or run init again",
        ) from None
    tree = trees.from_json(description["tree"])
    leaves, array_ids, arrays = list(trees.leaves_of(tree)), iter(kept.array_ids), list[KnownArray]()
    for leaf, stored in zip(leaves, description["arrays"], strict=True):
        place = _read_place(session, stored)
        ids = tuple(next(array_ids) for _ in parts_of(place))
        spec = spec_of_stored(stored["type"], tuple(stored["shape"]), key_impl=leaf.key_impl, is_weak=leaf.is_weak)
        arrays.append(KnownArray(name=ids, spec=spec, ids=ids, place=place))
    handles = _restore(session, snapshot, arrays) if snapshot else _take_over(session, arrays)
    session.kept_updates = kept.updates
    by_name = {leaf.name: handle for leaf, handle in zip(leaves, handles, strict=True)}
    state = rebuild(tree, lambda leaf: by_name[leaf.name]) if like is None else _fill(like, handles)
    return Resumed(state=state, updates=kept.updates, is_live=not snapshot)


def _take_over(session: SessionState, arrays: Sequence[KnownArray]) -> list[RemoteArray]:
    """Handles of arrays that are there."""
    handles = [RemoteArray(session, array.spec, ids=array.ids, place=array.place) for array in arrays]
    session.adopt_arrays(
        {
            array_id: layout
            for array in arrays
            for array_id, (layout, _) in zip(array.ids, parts_of(array.place), strict=True)
        }
    )
    return handles


def _restore(session: SessionState, snapshot: int, arrays: Sequence[KnownArray]) -> list[RemoteArray]:
    """Handles of arrays of a snapshot; laid out anew, where it is of a cluster with more nodes."""
    request = master_pb2.RunStepsRequest(restore_snapshot=master_pb2.RestoreSnapshot(snapshot=snapshot))
    layouts = [layout for array in arrays for layout, _ in parts_of(array.place)]
    if all(layout.first_device + layout.mesh.device_count <= session.info.device_count for layout in layouts):
        placed = [(array.ids, array.place) for array in arrays]
        request.restore_snapshot.layouts.extend(map(wire.layout_to_proto, layouts))
        request.outputs.extend(array_id for array in arrays for array_id in array.ids)
    else:
        intern, count = session.program_cache.intern, session.info.device_count
        places: list[Placement] = [intern(even_layout(array.spec, count)) for array in arrays]
        placed = [
            (add_stored(session, request, array, place), place) for array, place in zip(arrays, places, strict=True)
        ]
        layouts = [layout for place in places for layout, _ in parts_of(place)]
    made = list(zip(request.outputs, layouts, strict=True))
    result = session.submit(request, "the restore of a snapshot", made=made)
    result.wait()
    handles = [
        RemoteArray(session, array.spec, ids=ids, place=place, result=result)
        for array, (ids, place) in zip(arrays, placed, strict=True)
    ]
    if session.info.is_elastic:
        session.adopt_arrays({})  # other nodes than the snapshot's could not replay its restore
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


def _read_place(session: SessionState, array: Mapping[str, Any]) -> Placement:
    layouts: list[Layout] = []
    bounds: list[tuple[int, int]] = []
    for text, row in array["parts"]:
        message = common_pb2.ArrayLayout.FromString(b64decode(text))
        layouts.append(session.program_cache.intern(wire.layout_from_proto(message)))
        bounds.append((row, row + (layouts[-1].shape[0] if layouts[-1].shape else 1)))
    if not array["in_rows"]:
        return layouts[0]
    return session.program_cache.intern_rows(RowParts(tuple(layouts), tuple(bounds)))


def _successors(program: StepProgram, leaves: Sequence[Any]) -> dict[int, int]:
    """`id()` of each handle that a step takes over → the number of the result in its place."""
    numbers = {argument: leaf for leaf, argument in enumerate(program.leaf_numbers)}
    return {
        id(leaves[numbers[argument]]): output
        for output, argument in program.lowered.aliases.items()
        if argument in numbers and isinstance(leaves[numbers[argument]], RemoteArray)
    }
