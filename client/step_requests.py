"""What the client sends for a step: its arguments' arrays, small ones inside the request, and ids of its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwright.client.arrays import RemoteArray
from shardwright.client.limits import INLINE_BYTES, INLINE_TOTAL_BYTES, RESENDABLE_BYTES
from shardwright.client.placement import Placement, RowParts, can_be_moved, parts_of, placement_of
from shardwright.client.transfer import Upload, as_bytes
from shardwright.plans.layouts import Layout
from shardwright.proto.v1 import master_pb2
from shardwright.protocol import wire

if TYPE_CHECKING:
    from shardwright.client.array_store import ArrayStore
    from shardwright.client.checks import Checks
    from shardwright.client.placement import ExecutableEntry
    from shardwright.client.programs import ArgumentSource, StepProgram


@dataclass(frozen=True, slots=True)
class BuiltRequest:
    """A step that is ready to be sent. outputs: ids by output number. temporary: ids of its own copies.

    uploads: its arguments that were written to the nodes, where they can be written again.
    """

    request: master_pb2.RunStepsRequest
    outputs: list[tuple[int, ...]]
    temporary: list[int]
    uploads: tuple[Upload, ...] = ()

    def list_consumed(self, program: StepProgram) -> list[int]:
        """Ids of the arrays that it takes over."""
        return [self.request.arguments[number] for number in program.consumed]


class HoistedConstants:
    """Constants of programs: uploaded once, and again after workers were lost."""

    def __init__(self) -> None:
        self._ids: dict[ArgumentSource, tuple[int, int]] = {}  # losses of workers before, id
        self._epoch = 0

    def send(self, arrays: ArrayStore, program: StepProgram) -> dict[ArgumentSource, int]:
        """Ids of a program's constants; what does not lie on the servers is uploaded."""
        sources = [source for source in program.sources if source.constant is not None]
        if self._epoch != arrays.cluster.epoch:
            self.forget()  # they are gone with the nodes that held them
            self._epoch = arrays.cluster.epoch
        losses = arrays.recovery.losses
        missing = [source for source in sources if self._ids.get(source, (-1, 0))[0] != losses]
        lost = [self._ids[source][1] for source in missing if source in self._ids]
        if lost:
            arrays.free(*lost)
            arrays.cluster.await_workers()
        values = [(source.constant, source.entry.layout) for source in missing if source.constant is not None]
        for source, (array_id,) in zip(missing, arrays.upload(values), strict=True):
            self._ids[source] = (losses, array_id)
        return {source: self._ids[source][1] for source in sources}

    def forget(self) -> None:
        """All arrays are gone."""
        self._ids.clear()


def build_request(
    arrays: ArrayStore,
    program: StepProgram,
    leaves: Sequence[Any],
    output_mask: Sequence[bool] | None,
    *,
    constants: HoistedConstants,
    copies: Mapping[int, int],
    is_traced: bool,
    checks: Checks,
) -> BuiltRequest:
    """The request of a step; its arguments are sent, or ride along.

    copies: arrays, by source, in the place of arguments that lie elsewhere (see `list_moves`).
    """
    request = master_pb2.RunStepsRequest(
        executable_id=program.executable_id, trace=is_traced, check_nans=checks.nans, check_infs=checks.infs
    )
    result_ids = [
        arrays.new_id() if output_mask is None or output_mask[entry.number] else 0 for entry in program.results
    ]
    outputs: list[tuple[int, ...]] = [()] * len(program.outputs)
    for array_id, entry in zip(result_ids, program.results, strict=True):
        if array_id:
            outputs[entry.number] += (array_id,)
    temporary: list[int] = []
    uploads: list[Upload] = []
    try:
        ids = _send_arguments(arrays, program, leaves, constants, copies, request, temporary, uploads)
    except BaseException:
        arrays.free(*temporary)
        raise
    request.arguments.extend(ids)
    request.outputs.extend(result_ids)
    request.read_back.extend(outputs[number][0] for number in program.read_back if outputs[number])
    request.resendable.extend(upload.array_id for upload in uploads)
    return BuiltRequest(request, outputs, temporary, tuple(uploads))


def build_move(
    arrays: ArrayStore, handles: Sequence[RemoteArray], places: Sequence[Placement]
) -> tuple[master_pb2.RunStepsRequest, list[tuple[int, ...]]]:
    """The request of a move, and the ids of the copies' parts."""
    request = master_pb2.RunStepsRequest()
    new_ids = [tuple(arrays.new_id() for _ in parts_of(place)) for place in places]
    for handle, place, ids in zip(handles, places, new_ids, strict=True):
        assert handle._place is not None
        request.move.arrays.add(sources=_to_moved_parts(handle._place), targets=_to_moved_parts(place))
        request.arguments.extend(arrays.usable_ids(handle))
        request.outputs.extend(ids)
    return request, new_ids


def list_arrays(program: StepProgram, request: master_pb2.RunStepsRequest) -> list[tuple[int, Layout]]:
    """The arrays that a request brings along, and those that its step makes."""
    inline = {array.array_id for array in request.inline_arguments}
    arrays = [
        (array_id, source.entry.layout)
        for array_id, source in zip(request.arguments if inline else (), program.sources, strict=False)
        if array_id in inline
    ]
    outputs = zip(request.outputs, program.results, strict=True)
    return arrays + [(array_id, entry.layout) for array_id, entry in outputs if array_id]


def _send_arguments(
    arrays: ArrayStore,
    program: StepProgram,
    leaves: Sequence[Any],
    constants: HoistedConstants,
    copies: Mapping[int, int],
    request: master_pb2.RunStepsRequest,
    temporary: list[int],
    resendable: list[Upload],
) -> list[int]:
    """Ids of all arguments of the executable; ids of this step's own copies are added to `temporary`, and what can be
    written again to `resendable`.
    """
    from shardwright.client.array_specs import host_value
    from shardwright.client.placement import part_of

    ids: list[int] = []
    uploads: list[Upload] = []
    inline_bytes = 0
    specs = program.lowered.leaf_specs
    constant_ids = constants.send(arrays, program)
    for number, source in enumerate(program.sources):
        if source.constant is not None:
            ids.append(constant_ids[source])
            continue
        leaf = leaves[source.leaf]
        if isinstance(leaf, RemoteArray):
            array_id = copies.get(number) or _find_id(arrays, leaf, source.entry)
            if array_id is not None:
                ids.append(array_id)
                if number in copies:
                    temporary.append(array_id)
                continue
            leaf = leaf._read()
        value = part_of(host_value(leaf, specs[source.leaf]), source.entry)
        array_id = arrays.new_id()
        ids.append(array_id)
        temporary.append(array_id)
        if value.nbytes <= INLINE_BYTES and inline_bytes + value.nbytes <= INLINE_TOTAL_BYTES:
            inline_bytes += value.nbytes
            request.inline_arguments.add(array_id=array_id, layout=source.proto, data=bytes(as_bytes(value)))
        else:
            uploads.append(Upload(array_id=array_id, value=value, layout=source.entry.layout))
    if _brings_all(arrays, leaves, uploads):
        uploads = [replace(upload, value=_private(upload.value)) for upload in uploads]
        resendable += uploads
        resendable += [
            Upload(array_id=constant_ids[source], value=source.constant, layout=source.entry.layout)
            for source in program.sources
            if source.constant is not None
        ]
    arrays.recovery.put(uploads, are_private=arrays.cluster.info.is_elastic and arrays.recovery.is_on)
    return ids


def _brings_all(arrays: ArrayStore, leaves: Sequence[Any], uploads: Sequence[Upload]) -> bool:
    """Whether a step reads nothing of before: after a loss it can run again, if what it uploads is kept until then."""
    is_kept = sum(upload.value.nbytes for upload in uploads) <= RESENDABLE_BYTES
    has_handles = any(isinstance(leaf, RemoteArray) for leaf in leaves)
    return is_kept and not (has_handles or arrays.recovery.is_on or arrays.cluster.info.is_elastic)


def _private(value: np.ndarray) -> np.ndarray:
    """Contents that nobody changes."""
    return np.array(value) if value.flags.writeable else value


def list_moves(
    arrays: ArrayStore, program: StepProgram, leaves: Sequence[Any]
) -> tuple[list[RemoteArray], dict[int, Placement]]:
    """Handles stored on one stage and read on another, and where they are to be copied to, by source."""
    handles: list[RemoteArray] = []
    places: dict[int, Placement] = {}
    for number, source in enumerate(program.sources):
        leaf = leaves[source.leaf] if source.leaf >= 0 else None
        if not isinstance(leaf, RemoteArray) or leaf._place is source.entry.layout:
            continue
        if _find_id(arrays, leaf, source.entry) is None and leaf._place is not None:
            target = placement_of(source.entry)
            if can_be_moved(leaf._place, target):
                handles.append(leaf)
                places[number] = target
    return handles, places


def _find_id(arrays: ArrayStore, handle: RemoteArray, entry: ExecutableEntry) -> int | None:
    """The handle's array for the entry, or None when its layout differs."""
    ids, place = arrays.usable_ids(handle), handle._place
    if isinstance(place, RowParts):
        parts = zip(ids, place.bounds, place.layouts, strict=True)
        return next((part for part, rows, layout in parts if rows == entry.rows and layout == entry.layout), None)
    return ids[0] if place is entry.layout else None


def _to_moved_parts(place: Placement) -> list[master_pb2.MovedPart]:
    return [master_pb2.MovedPart(layout=wire.layout_to_proto(layout), first_row=row) for layout, row in parts_of(place)]
