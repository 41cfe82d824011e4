"""`shardwright logs`: the last lines of the logs of all nodes of a running server, and those to come."""

from __future__ import annotations

import argparse
import time

from shardwright.cli.output import EXIT_OK, add_command, note
from shardwright.cli.servers import add_address, address_of, dialed
from shardwright.log_lines import LEVELS, LogLine


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser) -> None:
    parser = add_command(
        commands,
        common,
        "logs",
        summary="show the logs of all nodes of a running server",
        description=(
            "Show the last lines of the logs of all processes on all nodes, as far as the master keeps them: also of "
            "executors that ended, and of nodes that are gone. Takes the address and the token that connect() takes, "
            "from the same environment variables."
        ),
        examples=(
            "shardwright logs 10.0.0.1:2222 --follow",
            "shardwright logs 10.0.0.1:2222 --node 3 --level warning",
            "shardwright logs 10.0.0.1:2222 --session 1a2b3c4d --tail 50 --json",
        ),
    )
    add_address(parser)
    parser.add_argument("--follow", "-f", action="store_true", help="go on with lines to come; Ctrl-C ends it")
    parser.add_argument("--node", metavar="N", type=int, help="of this node alone")
    parser.add_argument("--session", metavar="ID", default="", help="of the session whose id begins so")
    parser.add_argument("--level", choices=LEVELS, default="", help="of this level at least (default: all)")
    parser.add_argument("--tail", metavar="N", type=_count, default=0, help="the last N of those there (default: all)")
    parser.add_argument("--json", action="store_true", help="print an object a line, as --log-format json writes them")
    parser.set_defaults(run=run)


def _count(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Print lines as they come."""
    import grpc

    from shardwright.proto.v1 import operators_pb2, operators_pb2_grpc
    from shardwright.protocol import log_messages, wire

    address = address_of(arguments.address)
    request = operators_pb2.ReadLogsRequest(
        node=arguments.node,
        session=arguments.session,
        level=arguments.level,
        tail=arguments.tail,
        follow=arguments.follow,
    )
    with dialed(address) as (channel, metadata, deadline_s):
        stub = operators_pb2_grpc.OperatorsStub(channel)  # type: ignore[no-untyped-call]
        try:
            timeout_s = None if arguments.follow else deadline_s
            for reply in stub.ReadLogs(request, timeout=timeout_s, metadata=metadata):
                if reply.has_gap:
                    note("some lines before the next ones came too fast, and are gone")
                for message in reply.lines:
                    line = log_messages.from_proto(message)
                    print(line.to_json() if arguments.json else as_text(line), flush=arguments.follow)
        except grpc.RpcError as error:
            wire.raise_from_rpc(error, where=address)
    return EXIT_OK


def as_text(line: LogLine) -> str:
    """E.g. `08:27:30 node 1 executor warning [session 1a2b3c4d step 5] …`."""
    about = [f"{name} {value}" for name in ("session", "step", "plan") if (value := getattr(line, name))]
    words = [
        time.strftime("%H:%M:%S", time.localtime(line.time_s)),
        f"node {line.node}",
        line.process,
        *([line.level] if line.level != "info" else []),
        *([f"[{' '.join(about)}]"] if about else []),
    ]
    return f"{' '.join(words)}: {line.text}"
