"""What a session sees of its cluster: the nodes as they run now."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardwright.client.connection import MasterConnection, NodeInfo, SessionInfo, team_of
from shardwright.client.limits import NODES_PAUSE_S, WORKER_RESTART_TIMEOUT_S, WORKERS_POLL_S
from shardwright.client.stream import StepStream
from shardwright.client.transfer import ArrayTransfer
from shardwright.errors import ServerUnavailableError, SessionError
from shardwright.plans.layouts import Layout
from shardwright.xla.cudnn_checks import lowering_for

if TYPE_CHECKING:
    from shardwright.client.frontends.program import FrontEnd, Program

_log = logging.getLogger("shardwright")


class ClusterView:
    """Of one session. Does not keep it open.

    info: the reply to opening it, with the nodes of now. name: by which another program can take it up; "": none.
    epoch: number of clusters, of other nodes, that it has had before.
    """

    def __init__(self, master: MasterConnection, stream: StepStream, transfer: ArrayTransfer, name: str) -> None:
        self.master = master
        self.info: SessionInfo = master.info
        self.name = name
        self.epoch = 0
        self.is_closed = False
        self._stream = stream
        self._transfer = transfer

    def require_open(self) -> None:
        if self.is_closed:
            raise SessionError("the session is closed", remedy="open a new one with connect()")

    def lower(self, function: FrontEnd, signature: Any) -> Program:
        """The program of a function's signature for the cluster's devices."""
        with lowering_for(self.info.attention_device):
            return function.lower(signature, platform=self.info.platform)

    def part_of_cluster(self, layout: Layout) -> range | None:
        """The devices of a layout, or None: the whole cluster."""
        return None if len(layout.devices) == self.info.device_count else layout.devices

    def take_nodes(self, nodes: tuple[NodeInfo, ...]) -> None:
        """The nodes of the cluster as it runs now; where they are others, what was planned for those before is void."""
        if nodes == self.info.nodes:
            return
        with self._stream.changed:
            is_other = [(n.index, n.devices) for n in nodes] != [(n.index, n.devices) for n in self.info.nodes]
            self.info = self.master.info = replace(self.info, nodes=nodes)
            self._transfer.change_nodes(self.info)
            if is_other:
                self.epoch += 1
                self._stream.journal.epoch = self.epoch
                _log.warning(
                    "the cluster has %d devices now, of node %s",
                    self.info.device_count, ", ".join(str(node.index) for node in nodes),
                )  # fmt: skip

    def await_workers(self) -> None:
        """Waits for restarting workers."""
        deadline_s = time.monotonic() + WORKER_RESTART_TIMEOUT_S
        while time.monotonic() < deadline_s:
            if all(node.state == "ready" for node in team_of(self.master.status())):
                return
            time.sleep(WORKERS_POLL_S)

    def ask_first_node(self, method: str, request: Any) -> Any:
        """The reply to a call of the Checkpoints service; waits for workers that are restarting."""
        first = self.info.nodes[0].index
        return self.ask_nodes("Checkpoints", method, {first: request})[first]

    def ask_nodes(self, service: str, method: str, requests: Mapping[int, Any]) -> dict[int, Any]:
        """The replies to calls of a service at data ports, by node; waits for workers that are restarting."""
        self.require_open()
        deadline_s = time.monotonic() + WORKER_RESTART_TIMEOUT_S
        while True:
            try:
                return self._transfer.ask_nodes(service, method, requests)
            except (ServerUnavailableError, SessionError):
                self.master.require_session(self.master.status())  # raises where the master is gone as well
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(NODES_PAUSE_S)
