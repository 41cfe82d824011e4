"""`python -m shardwright.server CLUSTER_JSON TASK_INDEX` or `… --embedded N`: starts one server process.

SIGTERM and a preemption notice end it when what runs has ended; a second SIGTERM, and
Ctrl-C, at once.

Exit codes: 0 ended as asked (SIGTERM, a notice, the master's end, or the client's of an
embedded server); 1 an error that a person has to mend, printed as one line; 2 wrong
arguments; 75 it gave up (nodes that did not come, executors that did not start, a master
that was not there or gave up): start it again; 130 Ctrl-C. In systemd:
`Restart=always` and `RestartPreventExitStatus=1 2`.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.clusters.cluster import Cluster
from shardwright.clusters.module_names import read_module_names
from shardwright.command_line import CommandParser
from shardwright.errors import ClusterConfigError, ShardwrightError
from shardwright.processes import imports_for_good
from shardwright.server.limits import Limits
from shardwright.server.logs import LogWriter, log_to_standard_error
from shardwright.server.options import Ports, add_server_options, limits_of, ports_of
from shardwright.server.tuning import LAST_WORDS_S

if TYPE_CHECKING:
    from shardwright.server.master.cluster_watch import ClusterSource

_EPILOG = """examples:
  ./launch_worker.sh cluster_configs/two_workers_cpu.json 0    on the master's machine
  ./launch_worker.sh cluster_configs/two_workers_cpu.json 1    on the next, in any order

exit codes: 0 ended as asked, 1 an error that a person has to mend (one line says which), 2 wrong arguments,
75 it gave up on others and may be started again, 130 Ctrl-C
"""


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="launch_worker.sh",
        description="Start one task of a cluster: task 0 is the master and a worker, the others are workers.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("cluster", nargs="?", metavar="CLUSTER_JSON", help="cluster file, the same on all nodes")
    parser.add_argument("task", nargs="?", type=int, metavar="TASK_INDEX", help="which node of the file this is")
    add_server_options(parser)
    parser.add_argument("--own-node", action="store_true", help=argparse.SUPPRESS)  # a master's, started by it
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
    os.environ.pop("SHARDWRIGHT_TOKEN", None)  # a client's: no child of this process shall have it
    if options.embedded is not None and options.state_dir is not None:
        parser.error("--embedded takes no --state-dir: it ends with its client")
    node = options.task or 0
    process = "daemon" if node or options.own_node else "master"
    log = log_to_standard_error(options.log_level, options.log_format, process=process, node=node)
    limits = limits_of(options)
    modules = read_module_names(options.dataset_modules)
    try:
        if options.embedded is not None:
            return _start_embedded(options.embedded, limits, log, ports_of(options), modules)
        given = sys.argv[1:] if arguments is None else arguments
        node_command = [sys.executable, "-m", "shardwright.server", *given, "--own-node"]
        return _start(Path(options.cluster), options, limits, log, modules, node_command)
    except ShardwrightError as error:
        from shardwright.server.run_node import one_line

        print(one_line(error), file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before the server runs, which handles the signal itself
        return 130
    finally:
        log.wait_until_written(LAST_WORDS_S)


def _start_embedded(devices: int, limits: Limits, log: LogWriter, ports: Ports, modules: tuple[str, ...]) -> int:
    with imports_for_good():
        from shardwright.server import run
        from shardwright.server.run_node import run_to_end

    return run_to_end(run.run_embedded(devices, limits, modules, log=log, ports=ports))


def _start(
    path: Path,
    options: argparse.Namespace,
    limits: Limits,
    log: LogWriter,
    modules: tuple[str, ...],
    node_command: list[str],
) -> int:
    """node_command: starts the daemon of the master's own node, where it is a process of its own."""
    cluster = Cluster.load(path).with_local_token()
    cluster = replace(cluster, dataset_modules=(*cluster.dataset_modules, *modules))
    task, wait_s, notice = options.task, options.wait, options.preemption_notice
    if not 0 <= task < len(cluster.nodes):
        raise ClusterConfigError(
            f"there is no task {task}", where=cluster.name, remedy=f"the file has tasks 0 to {len(cluster.nodes) - 1}"
        )
    with imports_for_good():
        from shardwright.server import run_node  # without the master's part, which the other nodes do not use

    ports = ports_of(options)
    if task:
        worker = run_node.run_worker(cluster, task, limits, wait_s=wait_s, notice=notice, log=log, ports=ports)
        return run_node.run_to_end(worker)
    if options.own_node:
        return run_node.run_to_end(run_node.run_own_node(cluster, limits, options.state_dir, log=log))
    with imports_for_good():
        from shardwright.server import run

    kept = None if options.state_dir is None else run.KeptState(Path(options.state_dir), node_command)
    source = _source(path, cluster, options.discover)
    return run_node.run_to_end(
        run.run_master(
            cluster, limits, wait_s=wait_s, notice=notice, log=log, ports=ports, source=source, kept_state=kept
        )
    )


def _source(path: Path, cluster: Cluster, program: str | None) -> ClusterSource | None:
    """Where the nodes of an elastic cluster are read again: the cluster file, or what a program prints."""
    from shardwright.server.master import cluster_watch

    if program is None:
        return cluster_watch.file_source(path) if cluster.is_elastic else None
    if not cluster.is_elastic:
        raise ClusterConfigError(
            "the nodes of this cluster do not come and go",
            where="--discover",
            remedy='write "min_nodes" into the cluster file',
        )
    return cluster_watch.program_source(program, path)


if __name__ == "__main__":
    sys.exit(main())
