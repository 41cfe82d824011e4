"""Recovery on another cluster: arrays of a snapshot in new layouts, and calls run again under new plans.

A cluster of fewer or more nodes runs no program of before. So the calls since the snapshot are not sent again as they
were, but made again, as the user made them: each is planned for the devices that there are, around the arrays' new
layouts. Arrays get new ids, since an id stands for contents in one layout; handles are changed to them at the end.

Between recoveries an array is known by its *name*: the ids that its parts had when it was first made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwright.client.arrays import RemoteArray
from shardwright.client.calls import Call, CopyCall, KnownArray, Name, ProgramCall, ReadCall
from shardwright.client.journal import Entry, ReleasedArrays, SentArrays, SentStep
from shardwright.client.pending_arrays import even_layout
from shardwright.client.placement import Placement, RowParts, parts_of
from shardwright.client.protection import Snapshot
from shardwright.client.resharding import place as place_leaves
from shardwright.client.step_requests import build_move, list_arrays
from shardwright.client.step_result import StepResult
from shardwright.client.transfer import Upload
from shardwright.errors import WorkerLostError
from shardwright.options.plan_options import PlanOptions
from shardwright.plans.layouts import Layout
from shardwright.proto.v1 import master_pb2
from shardwright.protocol import wire

if TYPE_CHECKING:
    from shardwright.client.array_specs import ArraySpec
    from shardwright.client.array_store import ArrayStore
    from shardwright.client.frontends.program import Program
    from shardwright.client.programs import StepProgram
    from shardwright.client.step_queue import StepQueue


def relocate(steps: StepQueue, base: Snapshot, entries: Sequence[Entry], check: Callable[[], None]) -> int:
    """Restores a session, and makes again what it has sent since, on other nodes than before; see `Recovery`."""
    relocation = Relocation(steps, base.number, base.named_arrays, check)
    replayed = 0
    steps.begin_replay()
    try:
        for entry in entries:
            check()
            match entry:
                case SentArrays(uploads):
                    relocation.note_uploads(uploads)
                case ReleasedArrays(names=names):
                    relocation.release(names)
                case SentStep(result=result, call=call, released=names):
                    relocation.release(names)
                    if call is not None and result.error is None:
                        relocation.repeat(call, result)
                        replayed += isinstance(call, ProgramCall)
                    elif call is None and not result.is_done:
                        result.finish(None)
        steps.wait_until_idle()
        check()
        relocation.finish()
    except BaseException:
        relocation.abandon()
        raise
    finally:
        steps.end_replay()
    return replayed


class Relocation:
    """One replay on another cluster.

    snapshot: number of the step that took it, 0: there is none. stored: its arrays, by the first id of their names.
    check: raises where the executors are lost again.
    """

    def __init__(
        self, steps: StepQueue, snapshot: int, stored: Mapping[int, KnownArray], check: Callable[[], None]
    ) -> None:
        self._steps = steps
        self._store = steps.arrays
        self._snapshot = snapshot
        self._stored = dict(stored)
        self._check = check
        self._uploads: dict[int, Upload] = {}
        self._arrays: dict[int, tuple[Name, RemoteArray]] = {}  # handles of our own, by the first id of their names
        self._results: list[StepResult] = []

    # ---- calls ---------------------------------------------------------------------------

    def repeat(self, call: Call, result: StepResult) -> None:
        """Makes a call again; `result` is to get the outcome. Raises the errors of planning and sending."""
        match call:
            case ProgramCall():
                self._run_again(call, result)
            case CopyCall():
                self._copy_again(call, result)
            case ReadCall():
                self._read_again(call, result)

    def _run_again(self, call: ProgramCall, result: StepResult) -> None:
        steps = self._steps
        leaves = [self.find(leaf) if isinstance(leaf, KnownArray) else leaf for leaf in call.leaves]
        program = call.plan_again(leaves) if call.plan_again is not None else self._plan_freely(call.program.lowered)
        self.bring(
            (leaf, where)
            for leaf, where in zip(leaves, program.leaf_places, strict=True)
            if isinstance(leaf, RemoteArray)
        )
        placed = place_leaves(steps, leaves, program, program.donated)
        output_mask = [bool(name) for name in call.outputs]
        built = steps.build(program, placed, output_mask, is_traced=call.is_traced, checks=call.checks)
        built.request.timeout_s = call.timeout_s
        self.send(built.request, result, list_arrays(program, built.request), built.list_consumed(program))
        self._store.free(*built.temporary)
        reused = set(program.lowered.aliases.values())
        for number in program.donated:
            self.consume(placed[number], is_reused=program.leaf_numbers[number] in reused)
        for name, spec, ids, where in zip(
            call.outputs, program.lowered.results, built.outputs, program.outputs, strict=True
        ):
            if name:
                self.add(name, RemoteArray(self._store, spec, ids=ids, place=where))

    def _plan_freely(self, lowered: Program) -> StepProgram:
        names = PlanOptions(argument_names=lowered.argument_names, output_names=lowered.output_names)
        return self._steps.programs.prepare_freely(lowered, names)

    def _copy_again(self, call: CopyCall, result: StepResult) -> None:
        sources = [self.find(array) for array in call.arrays]
        self.bring((source, None) for source in sources)
        places = [source._place for source in sources if source._place is not None]
        request, ids = build_move(self._store, sources, places)
        layouts = [layout for place in places for layout, _ in parts_of(place)]
        self.send(request, result, list(zip(request.outputs, layouts, strict=True)))
        for name, source, new_ids, place in zip(call.copies, sources, ids, places, strict=True):
            self.add(name, RemoteArray(self._store, source.spec, ids=new_ids, place=place))

    def _read_again(self, call: ReadCall, result: StepResult) -> None:
        request = master_pb2.RunStepsRequest()
        request.CopyFrom(call.order)
        places = [self.default_place(spec) for _, spec, _ in call.arrays]
        for (origin, _, _), layout in zip(call.arrays, places, strict=True):
            call.add_part(request, origin, layout, 0)
            request.outputs.append(self._store.new_id())
        self.send(request, result, list(zip(request.outputs, places, strict=True)))
        for (_, spec, name), array_id, layout in zip(call.arrays, request.outputs, places, strict=True):
            self.add(name, RemoteArray(self._store, spec, ids=(array_id,), place=layout))

    # ---- what calls need -------------------------------------------------------------------

    def find(self, array: KnownArray) -> RemoteArray:
        """A handle of an array; it has no place before `bring`."""
        first = array.name[0]
        entry = self._arrays.get(first)
        if entry is not None and entry[0] == array.name:
            return entry[1]
        if len(array.name) > 1 and all(part in self._arrays for part in array.name):
            handle = self._join(array)
        elif first in self._stored or all(part in self._uploads for part in array.name):
            handle = RemoteArray(self._store, array.spec)
        else:
            raise WorkerLostError(
                f"an array of shape {list(array.spec.shape)} is in no snapshot, and no call made it",
                remedy="run init again, or restore a checkpoint",
            )
        self._arrays[first] = array.name, handle
        return handle

    def _join(self, array: KnownArray) -> RemoteArray:
        """Several arrays as rows of one."""
        assert isinstance(array.place, RowParts)
        handles = [self._arrays.pop(part)[1] for part in array.name]
        layouts = tuple(handle._place for handle in handles if isinstance(handle._place, Layout))
        place = RowParts(layouts, array.place.bounds)
        ids = tuple(array_id for handle in handles for array_id in handle._ids)
        for handle in handles:
            handle._ids = ()
        return RemoteArray(self._store, array.spec, ids=ids, place=place)

    def bring(self, targets: Iterable[tuple[RemoteArray, Placement | None]]) -> None:
        """Makes the arrays that are nowhere yet, at these places; None: any."""
        names = {id(handle): name for name, handle in self._arrays.values()}
        places: dict[int, tuple[RemoteArray, Placement]] = {}
        for handle, place in targets:
            if not handle._ids and id(handle) not in places:
                places[id(handle)] = handle, place or self.default_place(handle.spec)
        request = master_pb2.RunStepsRequest(restore_snapshot=master_pb2.RestoreSnapshot(snapshot=self._snapshot))
        new_arrays: list[tuple[int, Layout]] = []
        for handle, place in places.values():
            name = names[id(handle)]
            stored = self._stored.pop(name[0], None)
            if stored is None:
                value = _join_uploads([self._uploads[part] for part in name])
                (handle._ids,) = self._store.upload([(value, place)])
            else:
                handle._ids = add_stored(self._store, request, stored, place)
                new_arrays += zip(handle._ids, (layout for layout, _ in parts_of(place)), strict=True)
            handle._place = place
        if request.outputs:
            self.send(request, self._follow("the restore of a snapshot"), new_arrays)

    def send(
        self,
        request: master_pb2.RunStepsRequest,
        result: StepResult,
        new_arrays: Sequence[tuple[int, Layout]],
        consumed: Sequence[int] = (),
    ) -> None:
        self._check()
        result.output_ids = tuple(array_id for array_id in request.outputs if array_id)
        self._steps.resend(request, result, new_arrays, consumed)

    def _follow(self, name: str) -> StepResult:
        result = StepResult(0, name, is_followed=True)
        self._results.append(result)
        return result

    def add(self, name: Name, handle: RemoteArray) -> None:
        self._arrays[name[0]] = name, handle

    def consume(self, leaf: Any, *, is_reused: bool) -> None:
        """A call has taken an array over."""
        if not isinstance(leaf, RemoteArray):
            return
        if not is_reused:
            self._store.free(*leaf._ids)
        leaf._ids = ()
        for first, (_, handle) in list(self._arrays.items()):
            if handle is leaf:
                del self._arrays[first]

    def note_uploads(self, uploads: Sequence[Upload]) -> None:
        """Arrays that the client had sent; they are sent again when they are needed."""
        self._uploads.update((upload.array_id, upload) for upload in uploads)

    def release(self, names: Iterable[int]) -> None:
        """Arrays that nobody needs any more, by the first ids of their names."""
        for first in names:
            self._stored.pop(first, None)
            self._arrays.pop(first, None)  # its handle frees it

    def default_place(self, spec: ArraySpec) -> Layout:
        """Spread over all devices where a dimension is divided by them, else on each."""
        return self._store.intern(even_layout(spec, self._store.cluster.info.device_count))

    # ---- the end -----------------------------------------------------------------------------

    def finish(self) -> None:
        """Brings what is left, waits for all of it, and hands it over to the user's handles."""
        own = {id(handle) for handle in self._own_handles()}
        live = {
            name[0]: (name, handle)
            for handle in self._store.handles.list_placed()
            if id(handle) not in own and (name := self._store.handles.name_of(handle._ids))
        }
        for name, handle in live.values():
            if name[0] not in self._arrays and name[0] in self._stored:
                self._arrays[name[0]] = name, RemoteArray(self._store, handle.spec)
        self._settle_state(live)
        unsettled = [first for first, (_, handle) in self._arrays.items() if first in live and not handle._ids]
        self.bring((self._arrays[first][1], None) for first in unsettled)
        for result in self._results:
            result.wait_for_outcome()
            self._check()
            if result.error is not None:
                raise result.error
        names: dict[int, Name] = {}
        for first, (name, handle) in live.items():
            entry = self._arrays.pop(first, None)
            if entry is None or entry[0] != name:
                continue
            own_handle = entry[1]
            names[own_handle._ids[0]] = name
            handle.relocate(own_handle._ids, own_handle._place, is_settled=first not in unsettled)
            own_handle._ids = ()
        self._store.handles.rename(names)

    def _own_handles(self) -> Iterable[RemoteArray]:
        return (handle for _, handle in self._arrays.values())

    def _settle_state(self, live: Mapping[int, tuple[Name, RemoteArray]]) -> None:
        """Lays out the state of steps as they will be called with it next."""
        first_of = {id(handle): first for first, (_, handle) in live.items()}
        for step in self._steps.list_users():
            state = step.current_state()
            mine = {
                argument: first_of[id(handle)]
                for argument, handle in state.items()
                if (first := first_of.get(id(handle))) in self._arrays and not self._arrays[first][1]._ids
            }
            if mine:
                places = step.plan_again_for_state()
                self.bring((self._arrays[first][1], places[argument]) for argument, first in mine.items())

    def abandon(self) -> None:
        """The executors are lost again: what was made is gone."""
        for handle in self._own_handles():
            handle._ids = ()


def add_stored(
    arrays: ArrayStore, request: master_pb2.RunStepsRequest, stored: KnownArray, place: Placement
) -> tuple[int, ...]:
    """Adds an array of a snapshot, to be laid out anew, to the request of its restore; the new ids of its parts."""
    parts = [
        master_pb2.MovedPart(layout=wire.layout_to_proto(before), first_row=row)
        for before, row in parts_of(stored.place)
    ]
    ids = []
    for layout, first_row in parts_of(place):
        request.restore_snapshot.layouts.append(wire.layout_to_proto(layout))
        request.restore_snapshot.stored.add(ids=stored.ids, parts=parts, first_row=first_row)
        ids.append(arrays.new_id())
    request.outputs.extend(ids)
    return tuple(ids)


def _join_uploads(uploads: Sequence[Upload]) -> np.ndarray:
    values = [upload.value for upload in uploads]
    return values[0] if len(values) == 1 else np.concatenate(values)
