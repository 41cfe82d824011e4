"""Two nodes of two devices for all tests that need two healthy nodes and no limits of their own.

A start costs more than ten CPU seconds, so a process of pytest has one such pair. A test may freeze, kill and terminate
what it likes: `heal` comes before the next one. Numbers that grow (generations, executors' exits, lines of the log)
go on from one test to the next: a test counts differences.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

import shardwright as sw
from shardwright.cli.servers import call_master
from shardwright.proto.v1 import master_pb2
from tests.client.clusters import write_file
from tests.datasets.training import MODULE
from tests.server.raw_client import Server, all_gone, wait_until

#: Servers, and a session with them.
Running = tuple[list[Server], sw.Session]

DEVICES = (2, 2)

#: Frozen processes are found out soon; datasets may be read.
OPTIONS = ("--silence", "5", "--dataset-modules", MODULE)

#: Until the cluster that is there is given up: executors that start again take seconds, on a busy machine many.
HEAL_S = 60.0
#: Of a new one.
START_S = 120.0


class UnhealedClusterError(Exception):
    """A cluster that is not as new in time: which node is missing, or what is in the way."""


class TwoNodes:
    """The cluster; started when it is first healed."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._starts = folder, 0
        self.servers: list[Server] = []
        self.address = ""

    def heal(self) -> None:
        """As new: nothing is frozen, daemons and executors run, no session is open.

        Raises UnhealedClusterError where a cluster that was started for it is not ready in time.
        """
        if self.servers:
            try:
                self._mend(HEAL_S)
            except UnhealedClusterError as error:
                warnings.warn(f"another cluster is started: {error}", stacklevel=2)
                self.stop()
            else:
                return
        self._start()
        self._mend(START_S)

    def connect(self) -> sw.Session:
        return sw.connect(self.address)

    def status(self) -> master_pb2.StatusReply:
        """Without a session."""
        reply: master_pb2.StatusReply = call_master(self.address, "Status", master_pb2.StatusRequest())
        return reply

    def start_server(self, task: int) -> Server:
        """What it says goes into a file: a pipe that nobody reads would fill over many tests."""
        with (self._file.parent / f"task{task}.log").open("ab") as log:
            return Server(
                str(self._file), str(task), *OPTIONS, stderr=log,
                environment={"SHARDWRIGHT_CACHE": str(self._folder / "plans")},  # equal programs are planned once
            )  # fmt: skip

    def restart_worker(self) -> None:
        """The daemon of node 1 is killed, its executor ends with it, and it is started again."""
        family = self.servers[1].family()
        self.servers[1].process.kill()
        self.servers[1].end()
        wait_until(lambda: all_gone(family))
        self.servers[1] = self.start_server(1)

    def stop(self) -> None:
        self._resume()
        for server in self.servers:
            server.stop()
        self.servers.clear()

    def _start(self) -> None:
        self._starts += 1
        folder = self._folder / str(self._starts)
        folder.mkdir()
        self._file, self.address = write_file(folder, DEVICES)
        self.servers = [self.start_server(task) for task in range(len(DEVICES))]

    def _mend(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        self._resume()
        while ailments := list(self._find_ailments()):
            if time.monotonic() > deadline_s:
                raise UnhealedClusterError(
                    f"not as new within {timeout_s:g} s: {'; '.join(ailments)} (logs: {self._file.parent})"
                )
            time.sleep(0.05)

    def _resume(self) -> None:
        for server in self.servers:
            with suppress(psutil.NoSuchProcess):  # it ended meanwhile
                for process in server.family() if server.process.poll() is None else ():
                    process.resume()

    def _find_ailments(self) -> Iterator[str]:
        """What is not as new; what ended is started again, sessions are ended."""
        for task, server in enumerate(self.servers):
            code = server.process.poll()
            if code is not None:
                yield f"the daemon of node {task} ended with {code}"
                self.servers[task] = self.start_server(task)
        try:
            status = self.status()
        except sw.ShardwrightError as error:
            yield str(error)
            return
        for session in status.sessions:
            yield f"session {session.session_id} is open"
            with suppress(sw.ShardwrightError):  # it has ended meanwhile
                call_master(self.address, "EndSession", master_pb2.EndSessionRequest(session=session.session_id))
        if status.state != "ready":
            yield f"the cluster is {status.state} {status.waiting_for}".rstrip()
        for task, (node, server) in enumerate(zip(status.nodes, self.servers, strict=True)):
            if node.state != "ready":
                yield f"node {task} is {node.state} {node.detail}".rstrip()
            elif [each.pid for each in server.executors()] != [node.executor_pid]:  # one that was killed just now
                yield f"node {task} has another executor than its master has heard of"
