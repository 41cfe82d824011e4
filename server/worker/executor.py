"""An executor child: `python -m shardwright.server.worker.executor PARENT_PID`, started by the daemon.

Reads its configuration (one line of JSON) from stdin; the end of stdin ends it.
Environment variables that decide its devices are set before jax is imported.
"""

from __future__ import annotations

import json
import os
import queue
import sys
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc

from shardwright import wire
from shardwright.errors import PlatformError, ShardwrightError
from shardwright.proto.v1 import master_pb2_grpc, worker_pb2, worker_pb2_grpc
from shardwright.server.processes import die_with_parent, exit_at_end_of
from shardwright.server.security import Protection, TokenInterceptor, join_address

#: Calls that may block on devices or on arrays that are still being computed.
_TRANSFER_THREADS = 32


def main() -> None:
    die_with_parent(int(sys.argv[1]))
    config = json.loads(sys.stdin.buffer.readline())
    exit_at_end_of(sys.stdin.buffer)
    code = 1
    try:
        _serve(config)
        code = 0
    except ShardwrightError as error:
        print(str(error).replace("\n", ";"), file=sys.stderr, flush=True)
    except grpc.RpcError as error:
        print(wire.error_from_rpc(error).message, file=sys.stderr, flush=True)
    sys.stderr.flush()
    os._exit(code)  # devices and threads need no goodbye, and may hang in one


def _serve(config: dict[str, Any]) -> None:
    _join_job(config)
    from shardwright.server.runtime.arrays import ArrayStore
    from shardwright.server.runtime.executor import Executor
    from shardwright.server.runtime.transfer import ArrayTransfer

    protection = Protection(
        **{
            key: value.encode() if key != "token" and value is not None else value
            for key, value in config["protection"].items()
        }
    )
    events: queue.SimpleQueue[worker_pb2.ExecutorEvent] = queue.SimpleQueue()
    store = ArrayStore()

    def arrived(session_id: str, array_id: int, size_bytes: int) -> None:
        message = worker_pb2.ArrayArrived(session_id=session_id, array_id=array_id, logical_bytes=size_bytes)
        events.put(worker_pb2.ExecutorEvent(arrived=message))

    server = grpc.server(
        futures.ThreadPoolExecutor(max_workers=_TRANSFER_THREADS, thread_name_prefix="transfer"),
        interceptors=[TokenInterceptor(protection)],
        options=wire.CHANNEL_OPTIONS,
    )
    transfer = ArrayTransfer(store, arrived, put_limit_bytes=config["put_limit_bytes"])
    master_pb2_grpc.add_ArrayTransferServicer_to_server(transfer, server)  # type: ignore[no-untyped-call]
    port = protection.bind(server, config["host"], config["data_port"])
    server.start()
    events.put(worker_pb2.ExecutorEvent(hello=_hello(config, port)))

    executor = Executor(store, events.put, read_back_bytes=config["read_back_bytes"])
    with protection.channel(config["master_address"]) as channel:
        stub = worker_pb2_grpc.ClusterStub(channel)  # type: ignore[no-untyped-call]
        for command in stub.Execute(_drain(events), metadata=protection.metadata):
            if command.WhichOneof("kind") == "shutdown":
                raise PlatformError(command.shutdown.reason)
            executor.handle(command)


def _drain(events: queue.SimpleQueue[worker_pb2.ExecutorEvent]) -> Iterator[worker_pb2.ExecutorEvent]:
    while True:
        yield events.get()


def _join_job(config: dict[str, Any]) -> None:
    """Import jax, join the job of all nodes, and start the devices; PlatformError where that fails."""
    import jax

    from shardwright.xla import check_platform

    check_platform()
    jax.config.update("jax_enable_x64", True)  # arrays keep the element type that the program says
    try:
        if config["process_count"] > 1:
            jax.distributed.initialize(
                coordinator_address=config["coordinator_address"],
                num_processes=config["process_count"],
                process_id=config["process_id"],
            )
        count = jax.local_device_count()
    except Exception as error:
        raise PlatformError(f"jax cannot start its devices: {str(error).strip().splitlines()[0]}") from None
    if count < config["device_count"]:
        raise PlatformError(
            f"node {config['node']} has {count} {config['platform']} devices, the cluster file says "
            f"{config['device_count']}",
            remedy="correct the cluster file",
        )


def _hello(config: dict[str, Any], port: int) -> worker_pb2.ExecutorHello:
    import jax

    device = jax.local_devices()[0]
    memory = (device.memory_stats() or {}).get("bytes_limit", 0)
    return worker_pb2.ExecutorHello(
        node_index=config["node"],
        generation=config["generation"],
        data_address=join_address(config["host"], port),
        device_count=jax.local_device_count(),
        platform=device.platform,
        device_kind=device.device_kind,
        device_memory_bytes=memory,
    )


if __name__ == "__main__":
    main()
