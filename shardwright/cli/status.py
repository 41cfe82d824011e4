"""`shardwright status`: a running server's nodes and sessions, and what everybody waits for."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from shardwright.cli.output import EXIT_OK, EXIT_UNHEALTHY, add_command, print_json
from shardwright.errors import OptionError

if TYPE_CHECKING:
    from shardwright.proto.v1 import master_pb2

_DEADLINE_S = 10.0


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser) -> None:
    parser = add_command(
        commands,
        common,
        "status",
        summary="show a running server's nodes and sessions",
        description=(
            "Show the nodes and sessions of a server, and what everybody waits for. Takes the address and the token "
            "that connect() takes, from the same environment variables."
        ),
        examples=("shardwright status 10.0.0.1:2222", "SERVER_IP=10.0.0.1 SERVER_PORT=2222 shardwright status --json"),
    )
    parser.add_argument("address", metavar="HOST:PORT", nargs="?", help="default: $SERVER_IP and $SERVER_PORT")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Exit code 3 where the server is not ready."""
    reply = _ask(_address(arguments.address))
    if arguments.json:
        print_json(_as_dict(reply))
    else:
        print("\n".join(_lines(reply)))
    return EXIT_OK if reply.state == "ready" else EXIT_UNHEALTHY


def _address(given: str | None) -> str:
    from shardwright.client.addresses import address_from_environment, read_address

    address = address_from_environment() if given is None else read_address(given)
    if address is None:
        raise OptionError("no address", remedy="give HOST:PORT, or set SERVER_IP and SERVER_PORT")
    return address


def _ask(address: str) -> master_pb2.StatusReply:
    import grpc

    from shardwright.client.connection import Dialer
    from shardwright.proto.v1 import master_pb2, master_pb2_grpc
    from shardwright.protocol import wire

    dialer = Dialer(os.environ.get("SHARDWRIGHT_TOKEN"), os.environ.get("SHARDWRIGHT_CA"))
    with dialer.dial(address) as channel:
        stub = master_pb2_grpc.MasterStub(channel)  # type: ignore[no-untyped-call]
        try:
            reply: master_pb2.StatusReply = stub.Status(
                master_pb2.StatusRequest(), timeout=_DEADLINE_S, metadata=dialer.metadata
            )
        except grpc.RpcError as error:
            wire.raise_from_rpc(error, where=address)
    return reply


def _as_dict(reply: master_pb2.StatusReply) -> dict[str, Any]:
    return {
        "state": reply.state,
        "waiting_for": reply.waiting_for,
        "server_version": reply.server_version,
        "cluster": reply.cluster_name,
        "nodes": [
            {
                "index": each.node.index, "state": each.state, "generation": each.generation,
                "devices": each.node.device_count, "detail": each.detail,
            }
            for each in reply.nodes
        ],
        "sessions": [
            {
                "session": each.session_id, "last_step": each.last_step, "arrays": each.array_count,
                "array_bytes": each.array_bytes, "programs": each.executable_count,
                "snapshot": each.snapshot, "snapshot_bytes": each.snapshot_bytes,
            }
            for each in reply.sessions
        ],
    }  # fmt: skip


def _lines(reply: master_pb2.StatusReply) -> list[str]:
    from shardwright.report.units import format_bytes

    lines = [f"{reply.cluster_name or 'cluster'}: {reply.state} (server {reply.server_version}, {reply.platform})"]
    if reply.waiting_for:
        lines.append(f"waiting for: {reply.waiting_for}")
    for each in reply.nodes:
        detail = f"  {each.detail}" if each.detail else ""
        lines.append(f"node {each.node.index}: {each.state}, {each.node.device_count} devices{detail}")
    for session in reply.sessions:
        held = f"{session.array_count} arrays, {format_bytes(session.array_bytes)}, {session.executable_count} programs"
        if session.snapshot:
            held += f"; snapshot of step {session.snapshot}, {format_bytes(session.snapshot_bytes)} in host memory"
        lines.append(f"session {session.session_id[:8]}: step {session.last_step}, {held}")
    return lines
