"""Nodes in words: their state, why one is absent, what its executor is busy with."""

from __future__ import annotations

from shardwright.errors import DeadlineError
from shardwright.server.master.formation import Formation


def node_state(formation: Formation, index: int) -> str:
    """Of a node of the team one of "waiting", "starting", "ready", "lost", for people.

    Of another one: "joining", "away", or "left out".
    """
    record = formation.nodes[index]
    if index not in formation.team:
        assert formation.roster is not None
        if index in formation.roster.left_out:
            return "left out"
        return "joining" if index in formation.roster.candidates else "away"
    if record.daemon is None and record.executor_connection is None:
        return "lost" if formation.was_ready else "waiting"
    return "ready" if formation.phase == "ready" else "starting"


def detail_of(formation: Formation, index: int) -> str:
    """A node's known details beyond its state, for people: the reason of its absence."""
    record = formation.nodes[index]
    if index not in formation.team:
        return f"{record.member.address}: {record.detail}" if record.detail else record.member.address
    if formation.is_suspect(record):
        return f"its executor, process {record.pid}, has been silent for {record.executor_pulse.silent_s:.0f} s"
    if record.is_daemon_silent:
        return f"its daemon has been silent for {record.daemon_pulse.silent_s:.0f} s; its executor goes on"
    if record.daemon is not None or record.executor_connection is not None:
        return record.detail
    return f"{record.member.address}: {record.detail or 'it has not come yet'}"


def not_ready(formation: Formation, what: str, waited_s: float) -> DeadlineError:
    """The error of what has waited in vain for the executors."""
    absent = [
        record.member.index
        for record in formation.team_records
        if record.daemon is None and record.executor_connection is None
    ]
    text = f"{what}: the workers were not ready within {waited_s:g} s"
    if absent:
        numbers = ", ".join(map(str, absent))
        start = f"start launch_worker.sh with the same cluster file and task number {numbers}"
        causes = [f"node {index} is missing ({detail_of(formation, index)})" for index in absent]
    else:
        start = "start the nodes that the master's log misses"
        causes = [] if formation.last_loss is None else [formation.last_loss.message]
    return DeadlineError(
        ": ".join((text, *filter(None, ["; ".join(causes)]))),
        remedy=f"{start}, then run init again or restore a checkpoint",
    )


def describe_executor(formation: Formation, index: int, sequence: int) -> str:
    """A node's executor, for people: its process, and where it is in the command of this number."""
    record = formation.nodes[index]
    at, doing = record.busy
    place = f"node {index} ({record.member.address}), process {record.pid}"
    return f"{place}, {doing}" if at == sequence and doing else place
