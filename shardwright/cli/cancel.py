"""`shardwright cancel`: an operator ends a step that everybody waits for."""

from __future__ import annotations

import argparse

from shardwright.cli.output import EXIT_OK, add_command
from shardwright.cli.servers import add_address, address_of, call_operators


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser) -> None:
    parser = add_command(
        commands,
        common,
        "cancel",
        summary="end a step of a running server",
        description=(
            "End a step, whoever's it is, without the time that cancelled steps have. One that waits fails at once. "
            "Where one runs, all executors are replaced: arrays that no snapshot keeps are gone, of other sessions "
            "too. The session stays. Needs an operator's token, where the server has tokens with roles."
        ),
        examples=(
            "shardwright cancel 10.0.0.1:2222 1a2b3c4d/57    # as `shardwright status` names it",
            "shardwright cancel 10.0.0.1:2222 1a2b3c4d       # all that are under way",
        ),
    )
    add_address(parser, is_required=True)
    parser.add_argument("step", metavar="SESSION/STEP", type=_step, help="the session's first digits, and the number")
    parser.set_defaults(run=run)


def _step(text: str) -> tuple[str, int]:
    session, slash, number = text.partition("/")
    if not session or (slash and not (number.isdecimal() and 0 < int(number) < 1 << 63)):
        raise argparse.ArgumentTypeError("write SESSION/STEP, such as 1a2b3c4d/57, or SESSION alone")
    return session, int(number or 0)


def run(arguments: argparse.Namespace) -> int:
    from shardwright.proto.v1 import operators_pb2

    session, number = arguments.step
    request = operators_pb2.EndStepsRequest(session=session, number=number)
    reply = call_operators(address_of(arguments.address), "EndSteps", request)
    of = f"of session {reply.session_id}{f' of {reply.owner}' if reply.owner else ''}"
    for numbers, fate in ((reply.cancelled, "will not run"), (reply.running, "ends now, and with it all executors")):
        if numbers:
            print(f"step {', '.join(map(str, numbers))} {of} {fate}")
    return EXIT_OK
