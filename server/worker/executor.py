"""An executor child: `python -m shardwright.server.worker.executor PARENT_PID`, started by the daemon.

Reads its configuration (one line of JSON) from stdin; the end of stdin ends it.
Environment variables that decide its devices are set before jax is imported.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent import futures
from typing import TYPE_CHECKING, Any

import grpc

from shardwright.clusters.cluster import join_address
from shardwright.errors import PlatformError, ShardwrightError, WorkerLostError
from shardwright.plans.layouts import Layout
from shardwright.processes import die_with_parent, exit_at_end_of
from shardwright.proto.v1 import master_pb2_grpc, worker_pb2, worker_pb2_grpc
from shardwright.protocol import wire
from shardwright.server.handlers import ProtocolInterceptor
from shardwright.server.master.formation import CANNOT_START
from shardwright.server.security import Protection, TokenInterceptor

if TYPE_CHECKING:
    from shardwright.server.runtime.executor import Executor
    from shardwright.server.runtime.transfer_service import TransferService

#: Seconds between two signs of life.
HEARTBEAT_S = 2.0

#: Calls that may block on devices or on their clients.
_TRANSFER_THREADS = 32


def main() -> None:
    die_with_parent(int(sys.argv[1]))
    config = json.loads(sys.stdin.buffer.readline())
    exit_at_end_of(sys.stdin.buffer)
    code = 1
    try:
        _serve(config)
        code = 0
    except PlatformError as error:
        code = CANNOT_START
        print(error.message, file=sys.stderr)
    except ShardwrightError as error:
        print(error.message, file=sys.stderr)
    except grpc.RpcError as error:
        print(wire.error_from_rpc(error).message, file=sys.stderr)
    except Exception:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)  # devices and threads need no goodbye, and may hang in one


def _serve(config: dict[str, Any]) -> None:
    _join_job(config)
    from shardwright.server.runtime.arrays import ArrayStore, local_positions
    from shardwright.server.runtime.checkpoints.service import CheckpointService
    from shardwright.server.runtime.executor import Executor
    from shardwright.server.runtime.transfer_service import TransferService
    from shardwright.server.runtime.transport import Endpoint

    protection = Protection(
        **{
            key: value.encode() if key != "token" and value is not None else value
            for key, value in config["protection"].items()
        }
    )
    events: queue.SimpleQueue[worker_pb2.ExecutorEvent] = queue.SimpleQueue()
    store = ArrayStore()

    def report_arrivals(session_id: str, arrays: list[tuple[int, Layout]]) -> None:
        message = worker_pb2.ArraysArrived(
            session_id=session_id,
            arrays=[
                worker_pb2.ArrayArrived(
                    array_id=array_id,
                    logical_bytes=layout.size_bytes,
                    first_device=layout.first_device,
                    device_count=layout.mesh.device_count,
                )
                for array_id, layout in arrays
            ],
        )
        events.put(worker_pb2.ExecutorEvent(arrived=message))

    server = grpc.server(
        futures.ThreadPoolExecutor(max_workers=_TRANSFER_THREADS, thread_name_prefix="transfer"),
        interceptors=[TokenInterceptor(protection), ProtocolInterceptor()],
        options=wire.CHANNEL_OPTIONS,
    )
    transfer = TransferService(store, report_arrivals, put_limit_bytes=config["put_limit_bytes"])
    transfer.add_to(server)
    checkpoints = CheckpointService(store)
    master_pb2_grpc.add_CheckpointsServicer_to_server(checkpoints, server)  # type: ignore[no-untyped-call]
    port = protection.bind(server, config["host"], config["data_port"])
    server.start()
    endpoint = Endpoint(local_positions(), config["host"] if config["process_count"] > 1 else None)
    events.put(worker_pb2.ExecutorEvent(hello=_hello(config, port, endpoint.address)))

    executor = Executor(
        store,
        events.put,
        read_back_bytes=config["read_back_bytes"],
        transport_to=endpoint.transport_to,
        transfer_wait_s=config["transfer_wait_s"],
        protection=protection,
    )
    commands: queue.SimpleQueue[worker_pb2.ExecutorCommand] = queue.SimpleQueue()
    threading.Thread(target=_carry_out, args=(executor, commands), name="commands", daemon=True).start()
    threading.Thread(target=_send_heartbeats, args=(executor, transfer, events), name="heartbeats", daemon=True).start()
    with protection.channel(config["master_address"]) as channel:
        stub = worker_pb2_grpc.ClusterStub(channel)  # type: ignore[no-untyped-call]
        for command in stub.Execute(_drain(events), metadata=protection.metadata):
            kind = command.WhichOneof("kind")
            if kind == "shutdown":
                raise WorkerLostError(command.shutdown.reason)
            if kind == "abort":  # of a step that the other thread may be in
                executor.abort(command.abort.sequence, wire.error_from_proto(command.abort.error))
            else:
                commands.put(command)


def _carry_out(executor: Executor, commands: queue.SimpleQueue[worker_pb2.ExecutorCommand]) -> None:
    while True:
        executor.handle(commands.get())


def _send_heartbeats(
    executor: Executor, transfer: TransferService, events: queue.SimpleQueue[worker_pb2.ExecutorEvent]
) -> None:
    while True:
        time.sleep(HEARTBEAT_S)
        heartbeat = executor.heartbeat()
        heartbeat.transfers = transfer.transfer_count
        events.put(worker_pb2.ExecutorEvent(heartbeat=heartbeat))


def _drain(events: queue.SimpleQueue[worker_pb2.ExecutorEvent]) -> Iterator[worker_pb2.ExecutorEvent]:
    while True:
        yield events.get()


def _join_job(config: dict[str, Any]) -> None:
    """Import jax, join the job of all nodes, and start the devices.

    Raises WorkerLostError where the others do not answer, PlatformError where trying again is no use.
    """
    import jax

    from shardwright.xla import check_platform

    check_platform()
    jax.config.update("jax_enable_x64", True)  # type: ignore[no-untyped-call]  # arrays keep the element type that the program says
    if config["process_count"] > 1:
        try:
            jax.distributed.initialize(
                coordinator_address=config["coordinator_address"],
                coordinator_bind_address=config["coordinator_address"],  # else it listens on every interface
                num_processes=config["process_count"],
                process_id=config["process_id"],
            )
        except Exception as error:
            raise WorkerLostError(f"the other nodes cannot be joined: {_first_line(error)}") from None
    try:
        count = jax.local_device_count()
    except Exception as error:
        raise PlatformError(f"jax cannot start {config['platform']} devices: {_first_line(error)}") from None
    if count != config["device_count"]:
        raise PlatformError(
            f"jax found {count} {config['platform']} devices, the cluster file says {config['device_count']}"
        )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _hello(config: dict[str, Any], port: int, transfer_address: str) -> worker_pb2.ExecutorHello:
    import jax

    return worker_pb2.ExecutorHello(
        node_index=config["node"],
        generation=config["generation"],
        data_address=join_address(config["host"], port),
        device_count=jax.local_device_count(),
        transfer_address=transfer_address,
        pid=os.getpid(),
    )


if __name__ == "__main__":
    main()
