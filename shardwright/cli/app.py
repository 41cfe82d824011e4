"""Puts the subcommands together, and turns their errors into messages and exit codes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from shardwright.cli import (
    cancel,
    checkpoints,
    close,
    diff,
    doctor,
    drain,
    explain,
    logs,
    lower,
    plan,
    run,
    serve,
    status,
    token,
    tune,
    verify,
)
from shardwright.cli.output import EXIT_CODES, EXIT_ERROR, EXIT_INTERRUPTED, note, print_error
from shardwright.command_line import CommandParser
from shardwright.errors import ShardwrightError
from shardwright.package import VERSION

_COMMANDS = (
    plan,
    lower,
    explain,
    diff,
    verify,
    tune,
    serve,
    run,
    status,
    logs,
    cancel,
    close,
    drain,
    token,
    checkpoints,
    doctor,
)


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; each subcommand sets `run`."""
    parser = CommandParser(
        prog="shardwright",
        description="Plan how a training step is spread over many devices, and serve it.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"shardwright {VERSION}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    common = CommandParser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show the Python traceback of an error")
    for command in _COMMANDS:
        command.register(commands, common)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code (documented in `--help`)."""
    arguments = build_parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except ShardwrightError as error:
        if arguments.debug:
            raise
        print_error(error)
        return EXIT_ERROR
    except KeyboardInterrupt as interrupt:
        note(": ".join(("interrupted", *map(str, interrupt.args))))
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) has gone; what Python still holds for it must not raise at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ERROR
    return code
