"""`shardwright close`: an operator ends a session of a running server."""

from __future__ import annotations

import argparse

from shardwright.cli.output import EXIT_OK, add_command
from shardwright.cli.servers import add_address, address_of, call_master


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser) -> None:
    parser = add_command(
        commands,
        common,
        "close",
        summary="close a session of a running server",
        description=(
            "Close a session, whoever's it is: its steps end, its arrays are freed, its client gets a SessionError. "
            "Needs an operator's token, where the server has tokens with roles."
        ),
        examples=("shardwright close 10.0.0.1:2222 1a2b3c4d    # the digits that `shardwright status` shows",),
    )
    add_address(parser, is_required=True)
    parser.add_argument("session", metavar="SESSION", help="its first digits, as `shardwright status` shows them")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from shardwright.proto.v1 import master_pb2

    request = master_pb2.EndSessionRequest(session=arguments.session)
    reply = call_master(address_of(arguments.address), "EndSession", request)
    print(f"session {reply.session_id}{f' of {reply.owner}' if reply.owner else ''} is closed")
    return EXIT_OK
