"""Causes of a node's silence: the master knows more about it."""

from __future__ import annotations

import time

from shardwright.client.connection import MasterConnection, NodeInfo
from shardwright.client.retries import OutageError
from shardwright.errors import ShardwrightError, WorkerLostError

#: The master has heard of a process that died after so long.
_NOTICE_S = 3.0
_PAUSE_S = 0.1


def explain_node_failure(master: MasterConnection, node: NodeInfo, error: ShardwrightError) -> ShardwrightError:
    """The error of a broken call to a node's data port, given `error` and the master's view of the node.

    WorkerLostError: its executor is gone, maybe because another node was lost, which is named then. The master's own
    error: the master does not answer either. Otherwise OutageError, naming the connection between this client and the
    node.
    """
    until_s = time.monotonic() + _NOTICE_S
    while time.monotonic() < until_s:
        try:
            nodes = master.status().nodes
        except ShardwrightError as unreachable:
            return unreachable
        own = next((each for each in nodes if each.node.index == node.index), None)
        if own is None or own.state != "ready":
            lost = own if own is None or own.state == "lost" else next((n for n in nodes if n.state == "lost"), own)
            index, place = node.index, "it"
            if lost is not None and lost is not own:
                index, place = lost.node.index, f"node {node.index}"
            return WorkerLostError(
                f"node {index} was lost while arrays went to {place} or came from it"
                + (f": {lost.detail}" if lost is not None and lost.detail else ""),
                where=node.data_address,
                remedy="run init again, or restore a checkpoint, once the cluster is ready: arrays of before are gone",
            )
        time.sleep(_PAUSE_S)
    outage = OutageError(
        f"the data port of node {node.index} does not answer, and the master takes the node for ready: {error.message}",
        where=node.data_address,
        remedy="check that this machine reaches it; data_port in the cluster file fixes the port for a firewall",
    )
    outage.is_explained = True
    return outage
