"""The options of a server process, for everything that starts one."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from shardwright.clusters.cluster import join_address
from shardwright.clusters.module_names import read_module_names
from shardwright.command_line import CommandParser
from shardwright.errors import OptionError
from shardwright.server.limits import Limits
from shardwright.units import format_bytes, parse_bytes

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
#: Environment variable with the default of `--log-format`.
LOG_FORMAT_VARIABLE = "SHARDWRIGHT_LOG_FORMAT"


def _seconds(text: str) -> float:
    """Argparse's type of a positive number of seconds."""
    value = float(text)
    if not 0 < value < math.inf:
        raise ValueError
    return value


def _bytes(text: str) -> int:
    """Argparse's type of an amount of memory."""
    try:
        return parse_bytes(text)
    except OptionError as error:
        raise argparse.ArgumentTypeError(f"{error.message}: {error.remedy}") from None


def _count(text: str) -> int:
    """Argparse's type of a number from 1."""
    if int(text) < 1:
        raise ValueError
    return int(text)


def _silence(text: str) -> float:
    """Argparse's type of the longest silence: signs of life come every 2 seconds."""
    if float(text) < 5:
        raise argparse.ArgumentTypeError("5 or more")
    return _seconds(text)


def _notice(text: str) -> str:
    """Argparse's type of a preemption notice: a path, or an http(s) URL."""
    scheme = urlsplit(text).scheme
    if not text or ("://" in text and scheme not in ("http", "https")):
        raise argparse.ArgumentTypeError(f"{text!r} is neither the path of a file nor an http(s) URL")
    return text


def _log_format(text: str) -> str:
    """Argparse's type of a log's format; `choices` would not look at a default."""
    if text not in LOG_FORMATS:
        raise argparse.ArgumentTypeError(f"{text!r} is neither text nor json")
    return text


def _listening(text: str) -> str:
    """Argparse's type of an address to listen at: a port, of loopback, or host:port."""
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no [HOST:]PORT")
    return join_address(host.strip("[]") or "127.0.0.1", port)


def _module_names(text: str) -> str:
    """Argparse's type of names of modules with commas between them."""
    try:
        return ",".join(read_module_names(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}: write my_data,other.pkg") from None


@dataclass(frozen=True, slots=True)
class _LimitOption:
    """An option that sets a limit. read: argparse's type. default_text: the default, where its value says little."""

    flag: str
    limit: str
    read: Callable[[str], float]
    help: str
    default_text: str = ""

    @property
    def default(self) -> Any:
        return getattr(Limits(), self.limit)

    def add_to(self, parser: argparse._ActionsContainer) -> None:
        metavar = {"_bytes": "SIZE", "_count": "N"}.get(self.read.__name__, "SECONDS")
        shown = format_bytes(self.default) if self.read is _bytes else f"{self.default:g}".replace("inf", "no limit")
        parser.add_argument(
            self.flag, type=self.read, default=self.default, metavar=metavar, dest=self.limit,
            help=f"{self.help} ({self.default_text or shown})",
        )  # fmt: skip


_LIMIT_OPTIONS = (
    _LimitOption("--grace", "grace_s", _seconds, "how long a session outlives its client's connection"),
    _LimitOption(
        "--named-grace", "named_grace_s", _seconds, "the same of a session with a name, for a process to take it up"
    ),
    _LimitOption(
        "--step-timeout", "step_s", _seconds, "how long a step may run, unless its plan or its client says longer"
    ),
    _LimitOption(
        "--step-wait",
        "argument_wait_s",
        _seconds,
        "how long steps and new programs wait for nodes that were lost, and steps for their arguments",
    ),
    _LimitOption("--stall", "stall_s", _seconds, "how long a step runs before it is named to all who wait for it"),
    _LimitOption("--silence", "silence_s", _silence, "how long a process may give no sign of life; 5 or more"),
    _LimitOption(
        "--cancel-grace",
        "cancel_grace_s",
        _seconds,
        "how long a cancelled step may still run before its executors are replaced",
    ),
    _LimitOption(
        "--drain-timeout",
        "drain_s",
        _seconds,
        "how long SIGTERM or a preemption notice lets what runs go on, and clients save",
    ),
    _LimitOption("--sessions", "sessions", _count, "how many sessions there may be"),
    _LimitOption(
        "--person-sessions",
        "person_sessions",
        _count,
        "how many of them one person may have: a token's name, or a host where many share a token",
        default_text="three quarters",
    ),
    _LimitOption(
        "--session-memory", "session_array_bytes", _bytes, "what a session's arrays may take, on all devices together"
    ),
    _LimitOption(
        "--person-memory",
        "person_array_bytes",
        _bytes,
        "the same of all sessions of one person",
        default_text="with a tokens_file three quarters of the devices' memory, else no limit",
    ),
    _LimitOption(
        "--session-programs", "session_program_bytes", _bytes, "what a session's programs may take, compressed"
    ),
    _LimitOption(
        "--snapshot-memory",
        "snapshot_bytes",
        _bytes,
        "host memory of this node for snapshots of all sessions",
        default_text="half of the machine's",
    ),
    _LimitOption(
        "--rejoin-grace",
        "rejoin_grace_s",
        _seconds,
        "how long the others wait for a node, where the cluster file says min_nodes",
    ),
    _LimitOption("--node-failures", "node_failures", _count, "failures of a node in a row, until it is left out"),
    _LimitOption("--node-cooldown", "node_cooldown_s", _seconds, "how long such a node is left out"),
    _LimitOption("--session-idle", "session_idle_s", _seconds, "how long a session may go without a call"),
)


def add_server_options(parser: argparse._ActionsContainer) -> None:
    """Add all of them but those that say which server it is."""
    parser.add_argument(
        "--wait", type=_seconds, default=300.0, metavar="SECONDS", help="how long to wait for the other nodes (300)"
    )
    for option in _LIMIT_OPTIONS:
        option.add_to(parser)
    parser.add_argument(
        "--preemption-notice", type=_notice, metavar="PATH|URL",
        help='a file that appears, or a URL that answers 200 and not "false", before this machine goes away',
    )  # fmt: skip
    parser.add_argument(
        "--state-dir", metavar="DIR",
        help="the master keeps its sessions in this local directory, and is started again without their loss",
    )  # fmt: skip
    parser.add_argument(
        "--discover", metavar="PROGRAM",
        help="prints the cluster file as it is now; the master of an elastic cluster asks it every 5 seconds (it reads "
        "the file itself)",
    )  # fmt: skip
    parser.add_argument(
        "--dataset-modules", type=_module_names, default="", metavar="NAMES",
        help="Python modules and packages, with commas between them, whose functions sessions may read batches from, "
        "besides those of the cluster file (none)",
    )  # fmt: skip
    parser.add_argument("--log-level", choices=LOG_LEVELS, default="info", help="of the log (info)")
    parser.add_argument(
        "--log-format", type=_log_format, default=os.environ.get(LOG_FORMAT_VARIABLE, "text"), metavar="text|json",
        help=f"lines for people, or an object each (${LOG_FORMAT_VARIABLE}, else text)",
    )  # fmt: skip
    parser.add_argument(
        "--health-port", type=_listening, metavar="[HOST:]PORT",
        help="answer gRPC health here too, without TLS, on every node (off; HOST: 127.0.0.1)",
    )  # fmt: skip
    parser.add_argument(
        "--metrics-port", type=_listening, metavar="[HOST:]PORT",
        help="serve Prometheus' metrics of the whole cluster here, on the master alone (off; HOST: 127.0.0.1)",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ports:
    """What a server opens beside its own port, `host:port` each; None: not. metrics: of the master alone."""

    metrics: str | None = None
    health: str | None = None


NO_PORTS = Ports()


def ports_of(options: argparse.Namespace) -> Ports:
    """The ports that parsed options ask for."""
    return Ports(metrics=options.metrics_port, health=options.health_port)


def limits_of(options: argparse.Namespace) -> Limits:
    """The limits that parsed options set."""
    return Limits(**{option.limit: getattr(options, option.limit) for option in _LIMIT_OPTIONS})


def to_arguments(options: argparse.Namespace) -> list[str]:
    """The command line that sets parsed options again."""
    parser = CommandParser(add_help=False)
    add_server_options(parser)
    defaults = parser.parse_args([])
    flags = {name: f"--{name.replace('_', '-')}" for name in vars(defaults)}
    flags |= {option.limit: option.flag for option in _LIMIT_OPTIONS}
    values = {
        name: getattr(options, name) for name, default in vars(defaults).items() if getattr(options, name) != default
    }
    return [word for name, value in values.items() for word in (flags[name], str(value))]


def check_server_options(words: Sequence[str], prog: str) -> Limits:
    """The limits of options that are handed on to servers; ends the program where they are wrong. prog: who asks."""
    parser = CommandParser(prog=prog, add_help=False)
    add_server_options(parser)
    return limits_of(parser.parse_args(words))
