"""Names of parts of snapshots on the wire: (array id, number of its distinct shard) and `ArrayParts`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from shardwright.proto.v1 import worker_pb2

#: Full name of the daemons' service.
SNAPSHOTS = worker_pb2.DESCRIPTOR.services_by_name["Snapshots"].full_name

#: Metadata of its calls: the daemon's own key.
SNAPSHOT_KEY = "shardwright-snapshots"


def keys_of(arrays: Iterable[worker_pb2.ArrayParts]) -> Iterator[tuple[int, int]]:
    return ((array.array_id, shard) for array in arrays for shard in array.shards)


def parts_of(
    keys: Iterable[tuple[int, int]], shard_bytes: Mapping[tuple[int, int], int] | None = None
) -> Iterator[worker_pb2.ArrayParts]:
    """Messages of these keys, in their order; those of one array that follow each other share one."""
    message: worker_pb2.ArrayParts | None = None
    for key in keys:
        if message is None or message.array_id != key[0]:
            if message is not None:
                yield message
            message = worker_pb2.ArrayParts(array_id=key[0], shard_bytes=shard_bytes[key] if shard_bytes else 0)
        message.shards.append(key[1])
    if message is not None:
        yield message
