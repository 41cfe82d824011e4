"""An executor child: `python -m shardwright.server.worker.executor PARENT_PID`, started by the daemon.

Reads its configuration (one line of JSON) from stdin; the end of stdin ends it.
Environment variables that decide its devices are set before jax is imported.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import sys
import threading
import time
from concurrent import futures
from typing import TYPE_CHECKING, Any

import grpc

from shardwright.clusters.cluster import join_address
from shardwright.errors import PlatformError, ShardwrightError, WorkerLostError
from shardwright.plans.layouts import Layout
from shardwright.processes import die_with_parent, exit_at_end_of, imports_for_good
from shardwright.proto.v1 import master_pb2_grpc, worker_pb2
from shardwright.protocol import wire
from shardwright.server.access import Access, AccessInterceptor, SessionInterceptor
from shardwright.server.black_box import BlackBox
from shardwright.server.handlers import ProtocolInterceptor
from shardwright.server.logs import log_as_child
from shardwright.server.security import Protection
from shardwright.server.tuning import HEARTBEAT_S, LAST_WORDS_S, MOST_UPLOADS, TRANSFER_THREADS
from shardwright.server.worker.exit_codes import CANNOT_START

if TYPE_CHECKING:
    from shardwright.server.runtime.executor import Executor
    from shardwright.server.runtime.figures import ExecutorGauge
    from shardwright.server.runtime.transfer_service import TransferService
    from shardwright.server.runtime.uploads import Uploads
    from shardwright.server.worker.master_link import MasterLink

_log = logging.getLogger("shardwright.server")


def main() -> None:
    die_with_parent(int(sys.argv[1]))
    config = json.loads(sys.stdin.buffer.readline())
    exit_at_end_of(sys.stdin.buffer)
    log = log_as_child("executor", config["node"], config["log_level"])
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
    except Exception as error:
        _log.exception("the executor ends: %s: %s", type(error).__name__, error)
    sys.stderr.flush()
    log.wait_until_written(LAST_WORDS_S)
    os._exit(code)  # devices and threads need no goodbye, and may hang in one


def _serve(config: dict[str, Any]) -> None:
    with imports_for_good():
        _join_job(config)
        from shardwright.server.runtime.arrays import ArrayStore, array_arrived, local_positions
        from shardwright.server.runtime.checkpoints.service import CheckpointService
        from shardwright.server.runtime.command_log import CommandLog
        from shardwright.server.runtime.datasets.service import DatasetService
        from shardwright.server.runtime.datasets.worker import DatasetReaders
        from shardwright.server.runtime.executor import Executor
        from shardwright.server.runtime.figures import ExecutorGauge
        from shardwright.server.runtime.transfer_service import TransferService
        from shardwright.server.runtime.transport import Endpoint
        from shardwright.server.runtime.uploads import Uploads
        from shardwright.server.worker.master_link import MasterLink

    protection = Protection.from_json(config["protection"])
    store, log = ArrayStore(), CommandLog()
    link = MasterLink(config["master_address"], protection, log, lease_s=config["lease_s"])

    def report_arrivals(session_id: str, arrays: list[tuple[int, Layout]]) -> None:
        arrived = [array_arrived(array_id, layout) for array_id, layout in arrays]
        message = worker_pb2.ArraysArrived(session_id=session_id, arrays=arrived)
        link.put(worker_pb2.ExecutorEvent(arrived=message))

    access = Access(protection)
    server = grpc.server(
        futures.ThreadPoolExecutor(max_workers=TRANSFER_THREADS, thread_name_prefix="transfer"),
        interceptors=[AccessInterceptor(access), ProtocolInterceptor(), SessionInterceptor()],
        options=wire.CHANNEL_OPTIONS,
    )
    uploads = Uploads(session_bytes=config["put_limit_bytes"], person_bytes=config["person_bytes"])
    transfer = TransferService(
        store, report_arrivals, uploads, access.person_of, put_limit_bytes=config["put_limit_bytes"]
    )
    transfer.add_to(server)
    checkpoints = CheckpointService(store)
    master_pb2_grpc.add_CheckpointsServicer_to_server(checkpoints, server)  # type: ignore[no-untyped-call]
    box = BlackBox(config["black_box"]) if "black_box" in config else None
    datasets = DatasetReaders(store, config["dataset_modules"], box)
    master_pb2_grpc.add_DatasetsServicer_to_server(DatasetService(datasets), server)  # type: ignore[no-untyped-call]
    port = protection.bind(server, config["host"], config["data_port"])
    server.start()
    endpoint = Endpoint(local_positions(), config["host"] if config["process_count"] > 1 else None)
    hello = _hello(config, port, endpoint.address)
    _log.info(
        "the executor of generation %d has %d devices, arrays at %s",
        hello.generation,
        hello.device_count,
        hello.data_address,
    )

    executor = Executor(
        store,
        link.put,
        read_back_bytes=config["read_back_bytes"],
        transport_to=endpoint.transport_to,
        transfer_wait_s=config["transfer_wait_s"],
        protection=protection,
        log=log,
        datasets=datasets,
        box=box,
        uploads=uploads,
    )
    commands: queue.SimpleQueue[worker_pb2.ExecutorCommand] = queue.SimpleQueue()
    threading.Thread(target=_carry_out, args=(executor, commands), name="commands", daemon=True).start()
    gauge = ExecutorGauge(store, transfer, lambda: endpoint.fetched_bytes)
    beats = (executor, transfer, uploads, gauge, link)
    threading.Thread(target=_send_heartbeats, args=beats, name="heartbeats", daemon=True).start()

    def handle(command: worker_pb2.ExecutorCommand) -> None:
        if command.HasField("abort"):  # of a step that the other thread may be in
            executor.abort(command.abort.sequence, wire.error_from_proto(command.abort.error))
        else:
            commands.put(command)

    link.run(hello, handle)


def _carry_out(executor: Executor, commands: queue.SimpleQueue[worker_pb2.ExecutorCommand]) -> None:
    while True:
        executor.handle(commands.get())


def _send_heartbeats(
    executor: Executor, transfer: TransferService, uploads: Uploads, gauge: ExecutorGauge, link: MasterLink
) -> None:
    while True:
        time.sleep(HEARTBEAT_S)
        heartbeat = executor.heartbeat()
        heartbeat.transfers = transfer.transfer_count
        heartbeat.uploading.extend(uploads.sessions())
        uploads.cut_stalled(MOST_UPLOADS, time.monotonic())
        uploads.freed.give_back()
        try:
            heartbeat.figures.CopyFrom(gauge.read())
        except Exception as error:  # of a platform or a driver; that the executor lives counts more
            _log.debug("no figures of this executor: %s", error)
        link.put(worker_pb2.ExecutorEvent(heartbeat=heartbeat))


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

    from shardwright.xla.machine_code import machine_code_target

    return worker_pb2.ExecutorHello(
        node_index=config["node"],
        generation=config["generation"],
        data_address=join_address(config["host"], port),
        device_count=jax.local_device_count(),
        transfer_address=transfer_address,
        pid=os.getpid(),
        machine_code=machine_code_target(),
    )


if __name__ == "__main__":
    main()
