"""Causes of a node's silence: the master knows more about it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from shardwright.client.connection import MasterConnection, NodeInfo
from shardwright.client.limits import NOTICE_PAUSE_S, NOTICE_S
from shardwright.client.retries import OutageError
from shardwright.errors import ShardwrightError, WorkerLostError
from shardwright.proto.v1 import master_pb2


def explain_node_failure(master: MasterConnection, node: NodeInfo, error: ShardwrightError) -> ShardwrightError:
    """The error of a broken call to a node's data port, given `error` and the master's view of the node.

    WorkerLostError: its executor is gone, maybe because another node was lost, which is named then. SessionError: the
    master does not have the session any more. The master's own error: it does not answer either. Otherwise OutageError,
    naming the connection between this client and the node.
    """
    until_s = time.monotonic() + NOTICE_S
    while time.monotonic() < until_s:
        try:
            reply = master.status()
            master.require_session(reply)
        except ShardwrightError as unreachable:
            return unreachable
        own = next((each for each in reply.nodes if each.node.index == node.index), None)
        if own is None or own.state != "ready":
            return _describe_loss(node, own, [each for each in reply.nodes if each.state == "lost"])
        time.sleep(NOTICE_PAUSE_S)
    outage = OutageError(
        f"the data port of node {node.index} does not answer, and the master takes the node for ready: {error.message}",
        where=node.data_address,
        remedy="check that this machine reaches it; data_port in the cluster file fixes the port for a firewall",
    )
    outage.is_explained = True
    return outage


def _describe_loss(
    node: NodeInfo, own: master_pb2.NodeStatus | None, lost: Sequence[master_pb2.NodeStatus]
) -> WorkerLostError:
    """own: the status of the node, if it is still in the cluster; without executors it waits where another is lost."""
    culprit = own if own is None or own in lost or not lost else lost[0]
    index, place = (node.index, "it") if culprit is own else (lost[0].node.index, f"node {node.index}")
    reason = f": {culprit.detail}" if culprit is not None and culprit.detail else ""
    return WorkerLostError(
        f"node {index} was lost while arrays went to {place} or came from it{reason}",
        where=node.data_address,
        remedy="run init again, or restore a checkpoint, once the cluster is ready: arrays of before are gone",
    )
