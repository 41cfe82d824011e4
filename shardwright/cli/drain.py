"""`shardwright drain`: an operator has a running server end in order."""

from __future__ import annotations

import argparse

from shardwright.cli.output import EXIT_OK, add_command
from shardwright.cli.servers import add_address, address_of, call_master


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser) -> None:
    parser = add_command(
        commands,
        common,
        "drain",
        summary="have a running server end in order",
        description=(
            "As SIGTERM to the master does: nothing new begins, what runs ends, clients are told and can save, and "
            "all servers of the cluster end. Returns at once. Needs an operator's token, where the server has tokens "
            "with roles."
        ),
        examples=('shardwright drain 10.0.0.1:2222 --reason "new kernel"',),
    )
    add_address(parser, is_required=True)
    parser.add_argument("--reason", default="maintenance", help="what clients and the log are told (%(default)s)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from shardwright.proto.v1 import master_pb2

    reply = call_master(address_of(arguments.address), "Drain", master_pb2.DrainRequest(reason=arguments.reason))
    print(f"draining: the server ends within {reply.limit_s:g} s")
    return EXIT_OK
