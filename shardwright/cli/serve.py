"""`shardwright serve`: one node's server, in this process's place."""

from __future__ import annotations

import argparse
import json
import os
import sys

from shardwright.cli.output import add_command
from shardwright.clusters.cluster import Cluster
from shardwright.server.options import add_server_options, to_arguments

_DEFAULT_PORT = 2222


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser) -> None:
    parser = add_command(
        commands,
        common,
        "serve",
        summary="start this node's server",
        description="Start the server of one node of a cluster file, or of this machine alone. Ctrl-C stops it.",
        examples=(
            "shardwright serve cluster.json 0          # on the master's machine",
            "shardwright serve cluster.json 1          # on the next machine; any order",
            "shardwright serve --devices 8 --port 2222 # this machine alone, CPU devices on loopback",
            "shardwright serve cluster.json 1 --drain-timeout 120 --preemption-notice /run/preempted",
        ),
    )
    parser.add_argument("cluster", metavar="CLUSTER", nargs="?", help="cluster file, the same on every node")
    parser.add_argument("index", metavar="INDEX", nargs="?", help="this node's task: 0 is the master")
    parser.add_argument("--devices", metavar="N", type=int, help="CPU devices of a server without a cluster file")
    parser.add_argument("--port", metavar="PORT", type=int, help=f"its port (default: {_DEFAULT_PORT})")
    add_server_options(parser.add_argument_group("the server"))
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Become `python -m shardwright.server`: signals and the exit code are then its own."""
    by_file = arguments.cluster is not None
    if by_file == (arguments.devices is not None):
        arguments.parser.error("give CLUSTER and INDEX, or --devices N")
    if by_file and arguments.index is None:
        arguments.parser.error("give INDEX too: this node's task number, 0 for the master")
    if by_file and arguments.port is not None:
        arguments.parser.error("--port belongs to --devices; a cluster file names its ports")
    task = (
        [arguments.cluster, arguments.index]
        if by_file
        else [_one_node(arguments.devices, _DEFAULT_PORT if arguments.port is None else arguments.port), "0"]
    )
    command = [sys.executable, "-m", "shardwright.server", *task, *to_arguments(arguments)]
    os.execv(command[0], command)


def _one_node(devices: int, port: int) -> str:
    """Path that gives the next program in this process a cluster of one loopback node, once."""
    text = json.dumps({"name": "local", "master": {"ip": "127.0.0.1", "port": port, "devices": devices}})
    Cluster.from_json(text, source="--devices, --port")
    reader, writer = os.pipe()
    os.write(writer, text.encode())
    os.close(writer)
    os.set_inheritable(reader, True)
    return f"/dev/fd/{reader}"
