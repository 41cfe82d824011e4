"""`python -m shardwright.server CLUSTER_JSON TASK_INDEX` or `… --embedded N`: starts one server process.

Exit codes: 0 ended as asked (SIGTERM, the master's end, or the client's of an
embedded server); 1 an error that a person has to mend, printed as one line; 2 wrong
arguments; 75 it gave up (nodes that did not come, executors that did not start, a master
that was not there or gave up): start it again; 130 Ctrl-C. In systemd:
`Restart=on-failure` and `RestartPreventExitStatus=1 2`.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import sys

from shardwright.clusters.cluster import Cluster
from shardwright.errors import ClusterConfigError, ShardwrightError
from shardwright.server.limits import Limits

_EPILOG = """examples:
  ./launch_worker.sh cluster_configs/two_workers_cpu.json 0    on the master's machine
  ./launch_worker.sh cluster_configs/two_workers_cpu.json 1    on the next, in any order

exit codes: 0 ended as asked, 1 an error that a person has to mend (one line says which), 2 wrong arguments,
75 it gave up on others and may be started again, 130 Ctrl-C
"""


#: Option → the limit that it sets, and its help.
_SECONDS = {
    "--grace": ("grace_s", "how long a session outlives its client's connection"),
    "--step-timeout": ("step_s", "how long a step may run, unless its plan or its client says longer"),
    "--stall": ("stall_s", "how long a step runs before it is named to all who wait for it"),
    "--silence": ("silence_s", "how long a process may give no sign of life; 5 or more"),
    "--cancel-grace": ("cancel_grace_s", "how long a cancelled step may still run before its executors are replaced"),
}


def _positive(text: str) -> float:
    """Argparse's type of a positive number."""
    value = float(text)
    if not 0 < value < math.inf:
        raise ValueError
    return value


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
    for option, (limit, text) in _SECONDS.items():
        default = getattr(Limits(), limit)
        parser.add_argument(
            option, type=_positive, default=default, metavar="SECONDS", dest=limit, help=f"{text} ({default:g})"
        )
    parser.add_argument(
        "--snapshot-memory",
        type=_positive,
        metavar="GIB",
        help="host memory of this node for snapshots of all sessions (half of the machine's)",
    )
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
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", level=logging.WARNING)
    logging.getLogger("shardwright").setLevel(options.log_level.upper())
    limits = Limits(
        snapshot_bytes=int((options.snapshot_memory or 0.0) * (1 << 30)),
        **{limit: getattr(options, limit) for limit, _ in _SECONDS.values()},
    )
    try:
        if options.embedded is not None:
            return _start_embedded(options.embedded, limits)
        return _start(Cluster.load(options.cluster), options.task, limits, options.wait)
    except ShardwrightError as error:
        from shardwright.server.run import one_line

        print(one_line(error), file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before the server runs, which handles the signal itself
        return 130


def _start_embedded(devices: int, limits: Limits) -> int:
    from shardwright.server import run

    return run.run(run.run_embedded(devices, limits))


def _start(cluster: Cluster, task: int, limits: Limits, wait_s: float) -> int:
    if not 0 <= task < len(cluster.nodes):
        raise ClusterConfigError(
            f"there is no task {task}", where=cluster.name, remedy=f"the file has tasks 0 to {len(cluster.nodes) - 1}"
        )
    from shardwright.server import run

    if task == 0:
        return run.run(run.run_master(cluster, limits, wait_s=wait_s))
    return run.run(run.run_worker(cluster, task, limits, wait_s=wait_s))


if __name__ == "__main__":
    sys.exit(main())
