"""Why a node does not answer: the master knows more than a broken connection says."""

from __future__ import annotations

import time

from shardwright.client.connection import MasterConnection, NodeInfo
from shardwright.errors import ServerUnavailableError, ShardwrightError, WorkerLostError

#: The master has heard of a process that died after so long.
_NOTICE_S = 3.0
_PAUSE_S = 0.1


def explain_node_failure(master: MasterConnection, node: NodeInfo, error: ShardwrightError) -> ShardwrightError:
    """The error of a call to a node's data port that broke with `error`: what the master says became of the node.

    WorkerLostError where its executor is gone, the master's own error where that does not answer either, and else
    ServerUnavailableError that names the connection between this client and the node.
    """
    until_s = time.monotonic() + _NOTICE_S
    while time.monotonic() < until_s:
        try:
            status = next(each for each in master.status().nodes if each.node.index == node.index)
        except ShardwrightError as unreachable:
            return unreachable
        if status.state != "ready":
            return WorkerLostError(
                f"node {node.index} was lost while arrays went to it or came from it"
                + (f": {status.detail}" if status.detail else ""),
                where=node.data_address,
                remedy="run init again, or restore a checkpoint, once the cluster is ready: arrays of before are gone",
            )
        time.sleep(_PAUSE_S)
    return ServerUnavailableError(
        f"the data port of node {node.index} does not answer, and the master takes the node for ready: {error.message}",
        where=node.data_address,
        remedy="check that this machine reaches it; data_port in the cluster file fixes the port for a firewall",
    )
