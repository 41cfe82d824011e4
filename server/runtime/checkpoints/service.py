"""Contents of a checkpoint directory, for clients without access to it; on the data port of the first node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import grpc

from shardwright.checkpoints import trees
from shardwright.proto.v1 import master_pb2, master_pb2_grpc
from shardwright.protocol import wire
from shardwright.server.handlers import abort
from shardwright.server.runtime.arrays import ArrayStore

T = TypeVar("T")


class CheckpointService(master_pb2_grpc.CheckpointsServicer):
    """Threaded: each call reads a directory. Orbax is loaded by the first."""

    def __init__(self, store: ArrayStore) -> None:
        self._store = store

    def ListCheckpoints(
        self, request: master_pb2.ListCheckpointsRequest, context: grpc.ServicerContext
    ) -> master_pb2.ListCheckpointsReply:
        return self._answer(request, context, _list)

    def DescribeCheckpoint(
        self, request: master_pb2.DescribeCheckpointRequest, context: grpc.ServicerContext
    ) -> master_pb2.DescribeCheckpointReply:
        return self._answer(request, context, _describe)

    def _answer(self, request: Any, context: grpc.ServicerContext, act: Callable[[Any], T]) -> T:
        try:
            self._store.require(request.session_id)
            return act(request)
        except Exception as caught:
            abort(context, wire.to_shardwright_error(caught))
            raise


def _list(request: master_pb2.ListCheckpointsRequest) -> master_pb2.ListCheckpointsReply:
    from shardwright.server.runtime.checkpoints import files

    return master_pb2.ListCheckpointsReply(steps=files.steps(request.directory))


def _describe(request: master_pb2.DescribeCheckpointRequest) -> master_pb2.DescribeCheckpointReply:
    from shardwright.server.runtime.checkpoints import files

    contents = files.contents(request.directory, request.step)
    arrays = [
        master_pb2.CheckpointArray(name=name, type=wire.array_type_to_proto(stored.element_type, stored.shape))
        for name, stored in sorted(contents.arrays.items())
    ]
    return master_pb2.DescribeCheckpointReply(
        tree_json=trees.to_text(contents.tree), arrays=arrays, has_checksums=contents.has_checksums
    )
