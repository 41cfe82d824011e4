"""`shardwright status`: a running server's nodes and sessions, and what everybody waits for; once, or on and on."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from shardwright.cli import status_view
from shardwright.cli.output import EXIT_OK, EXIT_UNHEALTHY, add_command, note, print_json
from shardwright.cli.servers import add_address, address_of, call_master
from shardwright.errors import DeadlineError, ServerUnavailableError, ShardwrightError

if TYPE_CHECKING:
    from shardwright.proto.v1 import master_pb2


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser) -> None:
    parser = add_command(
        commands,
        common,
        "status",
        summary="show a running server's nodes and sessions",
        description=(
            "Show the nodes and sessions of a server, queues, memory, and what everybody waits for: as tables on a "
            "terminal, else as lines. Takes the address and the token that connect() takes, from the same environment "
            "variables."
        ),
        examples=(
            "shardwright status 10.0.0.1:2222",
            "shardwright status 10.0.0.1:2222 --watch",
            "SERVER_IP=10.0.0.1 SERVER_PORT=2222 shardwright status --json",
        ),
    )
    add_address(parser)
    parser.add_argument("--json", action="store_true", help="print JSON; with --watch, an object a line")
    parser.add_argument("--watch", action="store_true", help="look again and again; Ctrl-C ends it")
    parser.add_argument(
        "--interval", metavar="SECONDS", type=_interval, default=1.0, help="between two looks of --watch (1)"
    )
    parser.set_defaults(run=run)


def _interval(text: str) -> float:
    if not 0.1 <= float(text) <= 3600:
        raise argparse.ArgumentTypeError("0.1 to 3600")
    return float(text)


def run(arguments: argparse.Namespace) -> int:
    """Exit code 3 where the server is not ready; 0 where --watch is ended."""
    address = address_of(arguments.address)
    if arguments.watch:
        _watch(address, arguments.interval, as_json=arguments.json)
        return EXIT_OK
    reply = _ask(address)
    if arguments.json:
        print_json(status_view.as_dict(reply))
    elif sys.stdout.isatty():
        from rich.console import Console

        Console().print(status_view.as_tables(reply))
    else:
        print("\n".join(status_view.as_lines(reply)))
    return EXIT_OK if reply.state == "ready" else EXIT_UNHEALTHY


def _ask(address: str) -> master_pb2.StatusReply:
    from shardwright.proto.v1 import master_pb2

    reply: master_pb2.StatusReply = call_master(address, "Status", master_pb2.StatusRequest())
    return reply


# ---- again and again -----------------------------------------------------------
def _watch(address: str, interval_s: float, *, as_json: bool) -> None:
    """A server that is away is asked on, once it has answered; other errors end it."""
    looks = _looks(address, interval_s)
    try:
        if as_json:
            _print_each(looks, lambda reply: json.dumps(status_view.as_dict(reply)))
        elif sys.stdout.isatty():
            _show_live(looks)
        else:
            _print_each(looks, lambda reply: "\n".join([*status_view.as_lines(reply), ""]))
    except KeyboardInterrupt:
        pass


def _looks(address: str, interval_s: float) -> Iterator[master_pb2.StatusReply | ShardwrightError]:
    yield _ask(address)
    while True:
        time.sleep(interval_s)
        try:
            yield _ask(address)
        except (ServerUnavailableError, DeadlineError) as error:
            yield error


def _print_each(
    looks: Iterator[master_pb2.StatusReply | ShardwrightError], text_of: Callable[[master_pb2.StatusReply], str]
) -> None:
    for look in looks:
        if isinstance(look, ShardwrightError):
            note(f"no status: {look.message}")
        else:
            print(text_of(look), flush=True)


def _show_live(looks: Iterator[master_pb2.StatusReply | ShardwrightError]) -> None:
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    with Live(auto_refresh=False, screen=True) as live:
        shown: master_pb2.StatusReply | None = None
        for look in looks:
            problem = None
            if isinstance(look, ShardwrightError):
                problem = Text(f"no status, asked again: {look.message}", style="bold red")
            else:
                shown = look
            at = Text(f"{time.strftime('%H:%M:%S')}  Ctrl-C ends this", style="dim")
            parts = [problem or at, *([status_view.as_tables(shown)] if shown is not None else [])]
            live.update(Group(*parts), refresh=True)
