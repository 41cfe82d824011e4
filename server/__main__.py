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
import os
import sys

from shardwright.clusters.cluster import Cluster
from shardwright.errors import ClusterConfigError, ShardwrightError
from shardwright.server.limits import Limits
from shardwright.server.logs import log_to_standard_error
from shardwright.server.options import add_server_options, limits_of

_EPILOG = """examples:
  ./launch_worker.sh cluster_configs/two_workers_cpu.json 0    on the master's machine
  ./launch_worker.sh cluster_configs/two_workers_cpu.json 1    on the next, in any order

exit codes: 0 ended as asked, 1 an error that a person has to mend (one line says which), 2 wrong arguments,
75 it gave up on others and may be started again, 130 Ctrl-C
"""


#: Seconds that the last lines of the log may take.
_LAST_WORDS_S = 1.0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="launch_worker.sh",
        description="Start one task of a cluster: task 0 is the master and a worker, the others are workers.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("cluster", nargs="?", metavar="CLUSTER_JSON", help="cluster file, the same on all nodes")
    parser.add_argument("task", nargs="?", type=int, metavar="TASK_INDEX", help="which node of the file this is")
    add_server_options(parser)
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
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    log = log_to_standard_error(options.log_level)
    limits = limits_of(options)
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
