"""Reads the description of an elastic cluster again and again: nodes are added and taken away there.

It is the cluster file, or the output of a program (`--discover`). SIGHUP has it read at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from shardwright.clusters.cluster import Cluster
from shardwright.clusters.cluster_file import read_text
from shardwright.errors import AuthenticationError, ClusterConfigError
from shardwright.program_output import ProgramFailure, read_output
from shardwright.server.tuning import FILE_EVERY_S, PROGRAM_EVERY_S, PROGRAM_TIMEOUT_S

_log = logging.getLogger("shardwright.server")


@dataclass(frozen=True, slots=True)
class ClusterSource:
    """Where descriptions come from.

    name: in errors. read: the text as it is now. parse: the cluster of a text. every_s: seconds between two looks.
    Both functions raise ClusterConfigError, `parse` also AuthenticationError.
    """

    name: str
    read: Callable[[], str]
    parse: Callable[[str], Cluster]
    every_s: float


def file_source(path: Path) -> ClusterSource:
    """The cluster file itself."""
    return ClusterSource(str(path), lambda: read_text(path), lambda text: Cluster.load(path), FILE_EVERY_S)


def program_source(program: str, path: Path) -> ClusterSource:
    """A program's output, JSON of the cluster file's form; paths in it are relative to the file at `path`."""
    where = f"--discover {program}"
    command = os.path.abspath(program)

    def read() -> str:
        try:
            return read_output(command, PROGRAM_TIMEOUT_S)
        except ProgramFailure as failure:
            remedy = "name a program that may be run (chmod +x)"
            if failure.is_started:
                remedy = "it has to print the cluster file as it is now, and end with 0"
            raise ClusterConfigError(f"it {failure}", where=where, remedy=remedy) from None

    def parse(text: str) -> Cluster:
        return Cluster.from_json(text, source=where, directory=path.parent)

    return ClusterSource(where, read, parse, PROGRAM_EVERY_S)


async def watch_cluster(source: ClusterSource, cluster: Cluster, changed: Callable[[Cluster], object]) -> None:
    """Calls `changed` with each description of other nodes; never returns. cluster: the first description.

    A description that cannot be read, or changes more than the nodes, is named in the log, once, and the nodes stay as
    they are.
    """
    asked = asyncio.Event()
    with contextlib.suppress(NotImplementedError):
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, asked.set)
    current, text, problem = cluster, "", ""
    while True:
        try:
            seen, text = text, await asyncio.to_thread(source.read)
            if text != seen or asked.is_set():
                described = await asyncio.to_thread(_parse, source, text, cluster)
                problem = ""
                if described.nodes != current.nodes:
                    current = described
                    changed(described)
        except (AuthenticationError, ClusterConfigError) as error:
            if problem != str(error) or asked.is_set():
                _log.warning("%s: %s; the nodes stay as they are", error.where, error.message)
            problem = str(error)
        asked.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asked.wait(), source.every_s)


def _parse(source: ClusterSource, text: str, cluster: Cluster) -> Cluster:
    """A description, with what the server's options and user add to it. Raises as `source.parse`."""
    described = replace(source.parse(text).with_local_token(), dataset_modules=cluster.dataset_modules)
    is_same = described.is_elastic and described.content_hash == cluster.content_hash
    is_same = is_same and described.master == cluster.master
    if not is_same or (described.min_nodes, described.max_nodes) != (cluster.min_nodes, cluster.max_nodes):
        raise ClusterConfigError(
            "more than the workers was edited, which takes a restart of the master", where=source.name
        )
    return described
