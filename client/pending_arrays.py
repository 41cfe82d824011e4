"""Handles of arrays that workers make once a step says how they are to lie: those of a checkpoint, of a batch."""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from shardwright.client.array_specs import ArraySpec, array_type
from shardwright.client.arrays import RemoteArray
from shardwright.client.calls import ReadCall
from shardwright.client.placement import Placement, parts_of
from shardwright.plans.layouts import Layout
from shardwright.plans.shardings import Mesh, TensorSharding

if TYPE_CHECKING:
    from shardwright.client.step_queue import StepQueue
    from shardwright.client.step_result import StepResult
    from shardwright.proto.v1 import master_pb2

#: What an array is called where it comes from.
Name = TypeVar("Name", str, int)


class PendingArrays(ABC, Generic[Name]):
    """Arrays with one origin that have yet to be read: their layouts become final when a step is called with them."""

    def __init__(self, steps: StepQueue) -> None:
        self._steps = steps
        self._lock = threading.RLock()
        self._waiting: dict[int, tuple[Name, weakref.ref[RemoteArray]]] = {}  # by id of the handle

    @abstractmethod
    def _read(self, chosen: Sequence[tuple[Name, RemoteArray, Placement]]) -> None:
        """Has the workers make these arrays, which their handles adopt (see `_submit`)."""

    def handle(self, name: Name, spec: ArraySpec) -> RemoteArray:
        """A handle that waits for its array."""
        array = RemoteArray(self._steps.arrays, spec)
        array._pending = PendingArray(self, id(array))
        self._waiting[id(array)] = (name, weakref.ref(array))
        return array

    def is_waiting(self, key: int) -> bool:
        return key in self._waiting

    def materialize(self, targets: Mapping[int, Placement | None]) -> None:
        """Reads the waiting ones of `targets` (`id()` of a handle → placement).

        Handles without a placement are split over all devices when the split is even.
        """
        with self._lock:
            chosen = []
            for key in targets.keys() & self._waiting.keys():
                name, reference = self._waiting[key]
                handle = reference()
                if handle is not None:
                    place = targets[key] or even_layout(handle.spec, self._steps.cluster.info.device_count)
                    chosen.append((name, handle, place))
            if chosen:
                self._read(sorted(chosen, key=lambda each: each[0]))
            for key in targets:  # not before they were asked for: the session may raise an earlier step's error
                self._waiting.pop(key, None)

    def _submit(
        self,
        chosen: Sequence[tuple[Name, RemoteArray, Placement]],
        request: master_pb2.RunStepsRequest,
        title: str,
        add_part: Callable[[master_pb2.RunStepsRequest, Name, Layout, int], object],
    ) -> StepResult:
        """The step, sent, that makes the arrays. add_part: describes one part of an array in a request."""
        order = type(request)()
        order.CopyFrom(request)
        new_ids: list[tuple[int, ...]] = []
        arrays: list[tuple[int, Layout]] = []
        for name, _, place in chosen:
            parts = parts_of(place)
            new_ids.append(tuple(self._steps.arrays.new_id() for _ in parts))
            request.outputs.extend(new_ids[-1])
            arrays += zip(new_ids[-1], (layout for layout, _ in parts), strict=True)
            for layout, first_row in parts:
                add_part(request, name, layout, first_row)
        read_arrays = [(name, handle.spec, ids) for ids, (name, handle, _) in zip(new_ids, chosen, strict=True)]
        call = ReadCall(order=order, arrays=tuple(read_arrays), add_part=add_part)
        result = self._steps.submit(request, title, new_arrays=arrays, call=call)
        for ids, (_, handle, place) in zip(new_ids, chosen, strict=True):
            handle._adopt(RemoteArray(self._steps.arrays, handle.spec, ids=ids, place=place, result=result))
        return result


class PendingArray:
    """One handle's part of a `PendingArrays`."""

    def __init__(self, origin: PendingArrays[str] | PendingArrays[int], key: int) -> None:
        self._origin = origin
        self._key = key

    def materialize(self, targets: Mapping[int, Placement | None]) -> None:
        """Reads it, with the other wanted arrays of its origin."""
        if self._origin.is_waiting(self._key):
            self._origin.materialize({self._key: None, **targets})


def even_layout(spec: ArraySpec, device_count: int) -> Layout:
    """Spread over all devices, where they divide a dimension."""
    kind = array_type("", spec)
    mesh = Mesh.of({"x": device_count})
    split = next((dim for dim, size in enumerate(kind.shape) if size and size % device_count == 0), None)
    dims = tuple(("x",) if dim == split else () for dim in range(len(kind.shape)))
    return Layout(
        element_type=kind.element_type,
        shape=kind.shape,
        mesh=mesh,
        sharding=TensorSharding(dims),
        stored_shape=kind.shape,
    )
