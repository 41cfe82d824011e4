"""Batches that the workers read themselves: `Session.dataset`.

The client knows numbers and types. It asks the workers whether a batch is there before it hands out its handles, and
again, of the very rows that a step wants, before the step is sent: the end of the data, or a function that raises, is
met before the step takes anything over.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import uuid
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from shardwright.checkpoints import trees
from shardwright.client.argument_checks import check_number
from shardwright.client.array_specs import ArraySpec, array_spec
from shardwright.client.arrays import RemoteArray
from shardwright.client.limits import BATCH_PAUSE_S, BATCH_REPORT_S, MAX_OPTIONS_BYTES
from shardwright.client.pending_arrays import PendingArrays
from shardwright.client.placement import Placement, parts_of
from shardwright.client.pytrees import rebuild
from shardwright.dtypes import to_dtype
from shardwright.errors import CheckpointError, DatasetError, OptionError, ShardwrightError
from shardwright.plans.layouts import Layout, distinct_shards
from shardwright.proto.v1 import master_pb2
from shardwright.protocol import wire

if TYPE_CHECKING:
    from shardwright.client.step_queue import StepQueue
    from shardwright.client.step_result import StepResult

#: Arguments of the function that are not the user's.
_RESERVED = frozenset({"start", "batch", "rows"})
#: Limits of what fits in the messages.
_MAX_BATCH, _MAX_PREFETCH, _MAX_POSITION = 1 << 26, 64, 1 << 62

_log = logging.getLogger("shardwright")

#: (leaf, layout, first row) of each array that is read of a batch.
Parts = tuple[tuple[int, Layout, int], ...]


class Dataset:
    """Batches on the workers, in order; made by `Session.dataset`.

    An iterator: each batch is a pytree of handles, read when a step is called with them. It ends before the first batch
    that some worker has fewer rows of. Thread-safe.
    """

    def __init__(
        self, steps: StepQueue, function: str, *, batch: int, prefetch: int, options: Mapping[str, Any]
    ) -> None:
        check_number("batch", batch, 1, _MAX_BATCH)
        check_number("prefetch", prefetch, 0, _MAX_PREFETCH)
        if not isinstance(function, str):
            raise OptionError(f"function={function!r}", where="function", remedy='name it: "module:function"')
        self._steps = steps
        self._order = master_pb2.Dataset(
            dataset_id=uuid.uuid4().hex,
            function=function,
            batch=batch,
            options_json=_to_json(options),
            prefetch=prefetch,
        )
        self._lock = threading.RLock()
        self._position = 0
        self._ready: dict[Parts, int] = {}  # batches before this one are there, of those that were asked for
        self._parts: Parts = ()  # what was read last
        self._asked_nodes: set[int] = set()
        self._end: int | None = None
        self._unread: weakref.WeakSet[_Batch] = weakref.WeakSet()  # batches that no step has been called with
        self._reads: list[tuple[int, StepResult]] = []  # under way, by number of the batch
        self._is_closed = False
        self._tree, self._specs = self._describe()

    # ---- what it is ------------------------------------------------------------------------

    @property
    def element_spec(self) -> Any:
        """A batch in types, for `Step.lower` and `Step.compile`: a pytree of `jax.ShapeDtypeStruct`.

        64-bit types are narrowed as `jnp.asarray` does.
        """
        specs = iter(self._specs)
        return self._rebuild(lambda _: BatchType.of(next(specs)))

    @property
    def position(self) -> int:
        """Number of the batch that comes next. Keep it with a checkpoint, and `seek` it after the restore."""
        return self._position

    def seek(self, position: int) -> None:
        """Goes on with the batch of this number, which may be behind or ahead.

        Raises OptionError on anything but a number from 0.
        """
        check_number("position", position, 0, _MAX_POSITION)
        with self._lock:
            self._position = int(position)
            self._ready.clear()
            self._unread.clear()

    def close(self) -> None:
        """Ends the reading on the workers; closing the session does so, too. May be called twice."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            nodes = self._asked_nodes
        request = master_pb2.CloseDatasetRequest(
            session_id=self._steps.cluster.info.session_id, dataset_id=self._order.dataset_id
        )
        if not self._steps.cluster.is_closed:
            try:
                self._steps.cluster.ask_nodes("Datasets", "CloseDataset", dict.fromkeys(nodes, request))
            except ShardwrightError as error:
                _log.warning("%s: its readers end with the session: %s", self._order.function, error.message)

    def __enter__(self) -> Dataset:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Dataset({self._order.function}, batch={self._order.batch}, position={self._position})"

    # ---- its batches -----------------------------------------------------------------------

    def __iter__(self) -> Dataset:
        return self

    def __next__(self) -> Any:
        """The next batch, once the workers have it. Raises DatasetError where it cannot be read."""
        with self._lock:
            self._require_open()
            position = self._position
            if not self._find(position, self._parts):
                raise StopIteration
            self._position += 1
            batch = _Batch(self, position)
            self._unread.add(batch)
            numbers = iter(range(len(self._specs)))
            return self._rebuild(lambda _: batch.handle_of_leaf(next(numbers)))

    def _find(self, position: int, parts: Parts) -> bool:
        """Whether there is such a batch; returns when the workers that hold `parts` have read theirs."""
        if self._end is not None and position >= self._end:
            return False
        if self._ready.get(parts, 0) <= position:
            replies = self._await(position, parts)
            ready = min((reply.ready for reply in replies.values()), default=position + 1)
            if ready <= position:
                self._end = position if self._end is None else min(self._end, position)
                return False
            self._ready[parts] = ready
        return True

    def _await(self, position: int, parts: Parts) -> dict[int, master_pb2.AwaitBatchReply]:
        """The replies of all workers that hold `parts`, once each has the batch or knows that it does not exist."""
        request = master_pb2.AwaitBatchRequest(
            session_id=self._steps.cluster.info.session_id,
            dataset=self._order,
            position=position,
            first=self._first_needed(position),
            parts=[_to_part(*part) for part in parts],
        )
        waiting = self._nodes_of(parts)
        self._asked_nodes |= waiting
        replies: dict[int, master_pb2.AwaitBatchReply] = {}
        began_s = said_s = time.monotonic()
        while waiting:
            answers = self._ask(dict.fromkeys(waiting, request))
            replies |= {node: reply for node, reply in answers.items() if reply.ready > position or reply.is_end}
            waiting -= replies.keys()
            if waiting:
                time.sleep(BATCH_PAUSE_S)
            now_s = time.monotonic()
            if waiting and now_s - said_s > BATCH_REPORT_S:
                said_s = now_s
                nodes = ", ".join(map(str, sorted(waiting)))
                _log.warning("%s: batch %d is not read yet on node %s, %.0f s so far",
                             self._order.function, position, nodes, now_s - began_s)  # fmt: skip
        return replies

    def _ask(self, requests: Mapping[int, master_pb2.AwaitBatchRequest]) -> dict[int, master_pb2.AwaitBatchReply]:
        return self._steps.recovery.retry(lambda: self._steps.cluster.ask_nodes("Datasets", "AwaitBatch", requests))

    def _first_needed(self, position: int) -> int:
        """The first batch that workers may still be asked for, `position` at most."""
        self._reads = [(number, result) for number, result in self._reads if not result.is_done]
        numbers = [number for number, _ in self._reads] + [batch.position for batch in self._unread]
        return min([position, *numbers])

    def _nodes_of(self, parts: Parts) -> set[int]:
        """The nodes whose devices hold some of the parts; without any, the first."""
        nodes = self._steps.cluster.info.nodes
        if not parts:
            return {nodes[0].index}
        return {node.index for node in nodes if any(distinct_shards(layout, node.devices) for _, layout, _ in parts)}

    def _read(self, batch: _Batch, chosen: Sequence[tuple[int, RemoteArray, Placement]]) -> None:
        """Has the workers put some leaves of a batch on their devices."""
        position = batch.position
        parts = tuple((leaf, layout, row) for leaf, _, place in chosen for layout, row in parts_of(place))
        with self._lock:
            self._require_open()
            if not self._find(position, parts):
                raise DatasetError(
                    f"there is no batch {position}: on some worker the data end before it",
                    where=self._order.function,
                    remedy="every worker must find as many batches, whatever its rows",
                )
            request = master_pb2.RunStepsRequest(
                read_batch=master_pb2.ReadBatch(dataset=self._order, position=position)
            )

            def add_part(to: master_pb2.RunStepsRequest, leaf: int, layout: Layout, first_row: int) -> None:
                to.read_batch.parts.append(_to_part(leaf, layout, first_row))

            result = batch._submit(chosen, request, f"batch {position} of {self._order.function}", add_part)
            self._reads.append((position, result))
            self._unread.discard(batch)
            self._parts = parts

    # ---- its structure ---------------------------------------------------------------------

    def _describe(self) -> tuple[trees.Tree, tuple[ArraySpec, ...]]:
        """Structure and types of a batch, from the first row of the first one."""
        (reply,) = self._await(0, ()).values()
        if reply.ready <= 0:
            raise DatasetError(
                "there is not a single batch",
                where=self._order.function,
                remedy=f"look at the data, and at batch={self._order.batch}: a smaller last batch is left out",
            )
        self._ready[()] = reply.ready
        specs = tuple(
            array_spec((self._order.batch, *leaf.row_shape), jax.dtypes.canonicalize_dtype(to_dtype(leaf.element_type)))
            for leaf in reply.leaves
        )
        return trees.from_text(reply.tree_json), specs

    def _rebuild(self, leaf: Any) -> Any:
        try:
            return rebuild(self._tree, leaf)
        except CheckpointError:
            names = {node.type_name for node in trees.nodes_of(self._tree) if node.kind == "namedtuple"}
            raise DatasetError(
                f"batches hold named tuples that this program does not know: {', '.join(sorted(names))}",
                where=self._order.function,
                remedy="import their module here, too, or yield dicts",
            ) from None

    def _require_open(self) -> None:
        self._steps.cluster.require_open()
        if self._is_closed:
            raise DatasetError("the dataset is closed", where=self._order.function, remedy="make another one")


class BatchType(jax.ShapeDtypeStruct):
    """Type of an array of a batch: a step that is compiled for it counts no time for sending it."""

    __slots__ = ()
    _is_batch = True

    @classmethod
    def of(cls, spec: ArraySpec) -> BatchType:
        return cls(spec.shape, spec.dtype, weak_type=spec.weak_type)


class _Batch(PendingArrays[int]):
    """A batch that was handed out; its leaves are read when a step says where."""

    def __init__(self, dataset: Dataset, position: int) -> None:
        super().__init__(dataset._steps)
        self._dataset = dataset
        self.position = position

    def handle_of_leaf(self, number: int) -> RemoteArray:
        handle = self.handle(number, self._dataset._specs[number])
        handle._is_batch = True
        return handle

    def _read(self, chosen: Sequence[tuple[int, RemoteArray, Placement]]) -> None:
        self._dataset._read(self, chosen)


def _to_part(leaf: int, layout: Layout, first_row: int) -> master_pb2.BatchPart:
    return master_pb2.BatchPart(leaf=leaf, layout=wire.layout_to_proto(layout), first_row=first_row)


# ---- the function's arguments ------------------------------------------------------------------
def _to_json(options: Mapping[str, Any]) -> str:
    """The options as a JSON object. Raises OptionError on what is no JSON value, and on names that are taken."""
    for name in sorted(_RESERVED & options.keys()):
        raise OptionError(f"{name}= is said by the servers", where=name, remedy="give the option another name")
    for name, value in options.items():
        _require_json(value, name)
    text = json.dumps(dict(options), allow_nan=False, sort_keys=True)
    if len(text) > MAX_OPTIONS_BYTES:
        largest = max(options, key=lambda name: len(json.dumps(options[name])))
        raise OptionError(
            f"the options take {len(text)} bytes of JSON, most of it {largest}; they go along with each batch",
            where=largest,
            remedy=f"keep them below {MAX_OPTIONS_BYTES} bytes: pass the path of a file that the workers see",
        )
    return text


def _require_json(value: Any, where: str) -> None:
    if type(value) is list:
        for number, item in enumerate(value):
            _require_json(item, f"{where}[{number}]")
    elif type(value) is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise OptionError(f"{where} has the key {key!r}", where=where, remedy="keys of JSON are texts")
            _require_json(item, f"{where}[{key!r}]")
    elif not (value is None or type(value) in (bool, int, str) or (type(value) is float and np.isfinite(value))):
        raise OptionError(
            f"{where} is {value!r} of type {type(value).__name__}, which is no JSON value",
            where=where,
            remedy="pass finite numbers, texts, True, False, None, and lists and dicts of them",
        )
