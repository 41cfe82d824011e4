"""`python -m shardwright.server CLUSTER_JSON TASK_INDEX` or `… --embedded N`: starts one server process.

SIGTERM and a preemption notice end it when what runs has ended; a second SIGTERM, and
Ctrl-C, at once.

Exit codes: 0 ended as asked (SIGTERM, a notice, the master's end, or the client's of an
embedded server); 1 an error that a person has to mend, printed as one line; 2 wrong
arguments; 75 it gave up (nodes that did not come, executors that did not start, a master
that was not there or gave up): start it again; 130 Ctrl-C. In systemd:
`Restart=on-failure` and `RestartPreventExitStatus=1 2`.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardwright.clusters.cluster import Cluster
from shardwright.errors import ClusterConfigError, OptionError, ShardwrightError
from shardwright.options.user_options import parse_bytes
from shardwright.report.units import format_bytes
from shardwright.server.limits import Limits
from shardwright.server.logs import log_to_standard_error
from shardwright.server.signals import read_notice_option

_EPILOG = """examples:
  ./launch_worker.sh cluster_configs/two_workers_cpu.json 0    on the master's machine
  ./launch_worker.sh cluster_configs/two_workers_cpu.json 1    on the next, in any order

exit codes: 0 ended as asked, 1 an error that a person has to mend (one line says which), 2 wrong arguments,
75 it gave up on others and may be started again, 130 Ctrl-C
"""


#: Seconds that the last lines of the log may take.
_LAST_WORDS_S = 1.0


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


def _notice(text: str) -> str:
    """Argparse's type of a preemption notice."""
    try:
        return read_notice_option(text)
    except OptionError as error:
        raise argparse.ArgumentTypeError(f"{error.message}: {error.remedy}") from None


@dataclass(frozen=True, slots=True)
class _LimitOption:
    """An option that sets a limit. read: argparse's type."""

    flag: str
    limit: str
    read: Callable[[str], float]
    help: str

    @property
    def default(self) -> Any:
        return getattr(Limits(), self.limit)

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        metavar = "SECONDS" if self.read is _seconds else "SIZE" if self.read is _bytes else "N"
        shown = format_bytes(self.default) if self.read is _bytes else f"{self.default:g}".replace("inf", "no limit")
        parser.add_argument(
            self.flag, type=self.read, default=self.default, metavar=metavar, dest=self.limit,
            help=f"{self.help} ({shown})",
        )  # fmt: skip


_LIMIT_OPTIONS = (
    _LimitOption("--grace", "grace_s", _seconds, "how long a session outlives its client's connection"),
    _LimitOption(
        "--step-timeout", "step_s", _seconds, "how long a step may run, unless its plan or its client says longer"
    ),
    _LimitOption("--stall", "stall_s", _seconds, "how long a step runs before it is named to all who wait for it"),
    _LimitOption("--silence", "silence_s", _seconds, "how long a process may give no sign of life; 5 or more"),
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
        "--session-memory", "session_array_bytes", _bytes, "what a session's arrays may take, on all devices together"
    ),
    _LimitOption(
        "--session-programs", "session_program_bytes", _bytes, "what a session's programs may take, compressed"
    ),
    _LimitOption("--session-idle", "session_idle_s", _seconds, "how long a session may go without a call"),
)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="launch_worker.sh",
        description="Start one task of a cluster: task 0 is the master and a worker, the others are workers.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("cluster", nargs="?", metavar="CLUSTER_JSON", help="cluster file, the same on all nodes")
    parser.add_argument("task", nargs="?", type=int, metavar="TASK_INDEX", help="which node of the file this is")
    parser.add_argument(
        "--wait", type=float, default=300.0, metavar="SECONDS", help="how long to wait for the other nodes (300)"
    )
    for option in _LIMIT_OPTIONS:
        option.add_to(parser)
    parser.add_argument(
        "--preemption-notice", type=_notice, metavar="PATH|URL",
        help='a file that appears, or a URL that answers 200 and not "false", before this machine goes away',
    )  # fmt: skip
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    parser.add_argument(
        "--embedded", type=int, metavar="DEVICES", help="serve CPU devices to the process at stdin and stdout"
    )
    return parser


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.embedded is None and (options.cluster is None or options.task is None):
        parser.error("CLUSTER_JSON and TASK_INDEX are needed")
    if options.embedded is not None and options.cluster is not None:
        parser.error("--embedded takes no cluster file")
    if options.silence_s < 5:  # signs of life come every 2 seconds
        parser.error("--silence is 5 or more")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    log = log_to_standard_error(options.log_level)
    limits = Limits(**{option.limit: getattr(options, option.limit) for option in _LIMIT_OPTIONS})
    try:
        if options.embedded is not None:
            return _start_embedded(options.embedded, limits)
        return _start(Cluster.load(options.cluster), options.task, limits, options.wait, options.preemption_notice)
    except ShardwrightError as error:
        from shardwright.server.run import one_line

        print(one_line(error), file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before the server runs, which handles the signal itself
        return 130
    finally:
        log.wait_until_written(_LAST_WORDS_S)


def _start_embedded(devices: int, limits: Limits) -> int:
    from shardwright.server import run

    return run.run(run.run_embedded(devices, limits))


def _start(cluster: Cluster, task: int, limits: Limits, wait_s: float, notice: str | None) -> int:
    if not 0 <= task < len(cluster.nodes):
        raise ClusterConfigError(
            f"there is no task {task}", where=cluster.name, remedy=f"the file has tasks 0 to {len(cluster.nodes) - 1}"
        )
    from shardwright.server import run

    if task == 0:
        return run.run(run.run_master(cluster, limits, wait_s=wait_s, notice=notice))
    return run.run(run.run_worker(cluster, task, limits, wait_s=wait_s, notice=notice))


if __name__ == "__main__":
    sys.exit(main())
