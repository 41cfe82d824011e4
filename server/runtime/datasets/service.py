"""What clients ask of the datasets on this worker, on its data port."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import grpc
import jax
import numpy as np

from shardwright.checkpoints import pytrees, trees
from shardwright.dtypes import to_element_type
from shardwright.errors import DatasetError, ShardwrightError, add_place
from shardwright.proto.v1 import master_pb2, master_pb2_grpc
from shardwright.protocol import wire
from shardwright.server.handlers import abort
from shardwright.server.runtime.datasets.worker import DatasetReaders
from shardwright.server.tuning import BATCH_WAIT_S, MAX_BATCHES_AWAITED

T = TypeVar("T")


class DatasetService(master_pb2_grpc.DatasetsServicer):
    """Threaded; a call holds its thread for `BATCH_WAIT_S` at most."""

    def __init__(self, readers: DatasetReaders) -> None:
        self._readers = readers
        self._waiting = threading.BoundedSemaphore(MAX_BATCHES_AWAITED)

    def AwaitBatch(
        self, request: master_pb2.AwaitBatchRequest, context: grpc.ServicerContext
    ) -> master_pb2.AwaitBatchReply:
        return _answer(request, context, self._await_batch)

    def CloseDataset(
        self, request: master_pb2.CloseDatasetRequest, context: grpc.ServicerContext
    ) -> master_pb2.CloseDatasetReply:
        del context
        self._readers.close(request.session_id, request.dataset_id)
        return master_pb2.CloseDatasetReply()

    def _await_batch(self, request: master_pb2.AwaitBatchRequest) -> master_pb2.AwaitBatchReply:
        may_wait = self._waiting.acquire(blocking=False)
        try:
            ready, is_end, structure = self._readers.await_batch(request, BATCH_WAIT_S if may_wait else 0.0)
        finally:
            if may_wait:
                self._waiting.release()
        reply = master_pb2.AwaitBatchReply(ready=ready, is_end=is_end)
        if structure is not None:
            describe_structure(structure, request.dataset.function, reply)
        return reply


def _answer(request: Any, context: grpc.ServicerContext, act: Callable[[Any], T]) -> T:
    try:
        return act(request)
    except Exception as caught:
        error = wire.to_shardwright_error(caught)
        if isinstance(error, DatasetError) and jax.process_count() > 1:
            error = add_place(error, f"worker {jax.process_index()}")
        abort(context, error)
        raise


def describe_structure(structure: Any, function: str, reply: master_pb2.AwaitBatchReply) -> None:
    """Adds what a batch is like. Raises DatasetError on containers and types that cannot travel."""
    tree = pytrees.describe(structure, lambda _, path: trees.Leaf(name=".".join(path)))
    if any(node.kind == "object" for node in trees.nodes_of(tree)):
        raise DatasetError(
            "a batch holds a container other than dicts, lists, tuples and named tuples",
            where=function,
            remedy="yield a dict of arrays",
        )
    for leaf, array in zip(trees.leaves_of(tree), jax.tree.leaves(structure), strict=True):
        try:
            element_type = to_element_type(np.asarray(array).dtype)
        except ShardwrightError as error:
            raise DatasetError(f"{leaf.name or 'the batch'}: {error.message}", where=function) from None
        reply.leaves.add(element_type=element_type, row_shape=array.shape[1:])
    reply.tree_json = trees.to_text(tree)
