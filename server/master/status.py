"""The reply to Status: nodes, sessions, queues, and what everybody waits for."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from shardwright.clusters.access_tokens import Caller
from shardwright.log_lines import SESSION_DIGITS
from shardwright.proto.v1 import master_pb2
from shardwright.server.master import events as ev
from shardwright.server.master import node_reports, watchdog
from shardwright.server.versions import jax_version, shardwright_version

if TYPE_CHECKING:
    from shardwright.server.master.people import Person
    from shardwright.server.master.sessions import Session
    from shardwright.server.master.shell import Master


def report(master: Master, nodes: Iterable[master_pb2.Node], caller: Caller) -> master_pb2.StatusReply:
    """nodes: all of the cluster, as clients know them. caller: a user sees their own sessions, an operator all."""
    state, now_s = master.state, asyncio.get_running_loop().time()
    planners, compilers = master.planners, master.compile_queue
    return master_pb2.StatusReply(
        server_version=shardwright_version(),
        jax_version=jax_version(),
        cluster_name=master.cluster.name,
        platform=master.cluster.platform,
        state=watchdog.summarize(state),
        waiting_for=watchdog.waiting_for(state),
        nodes=[_node(master, node) for node in nodes],
        sessions=[
            _session(master, session, now_s)
            for session in state.sessions.values()
            if caller.is_operator or session.owner == caller.name
        ],
        recovered_sessions=state.recovered_sessions,
        has_adopted=state.has_adopted,
        uptime_s=now_s - master.started_s,
        planning=master_pb2.QueueStatus(running=planners.running, waiting=planners.waiting),
        compiling=master_pb2.QueueStatus(running=compilers.running, waiting=compilers.waiting),
        people=[
            _person(master, person) for person in state.people.all() if caller.is_operator or person.name == caller.name
        ],
    )


def _person(master: Master, person: Person) -> master_pb2.PersonStatus:
    limits, limit_bytes = master.limits, person.most_array_bytes
    return master_pb2.PersonStatus(
        name=person.name,
        sessions=person.sessions,
        session_limit=limits.most_person_sessions,
        array_bytes=person.array_bytes,
        array_limit_bytes=0 if math.isinf(limit_bytes) else int(limit_bytes),
        program_bytes=master.programs.person_bytes(person.name),
        program_limit_bytes=limits.person_program_bytes,
    )


def _node(master: Master, node: master_pb2.Node) -> master_pb2.NodeStatus:
    formation, figures = master.state.formation, master.figures.of(node.index)
    record = formation.nodes[node.index]
    has_executor = record.executor_connection is not None
    return master_pb2.NodeStatus(
        node=node,
        state=node_reports.node_state(formation, node.index),
        generation=formation.generation,
        detail=node_reports.detail_of(formation, node.index),
        host=figures.host,
        executor=figures.executor if has_executor else None,
        executor_pid=record.pid if has_executor else 0,
        executor_exits=master.state.statistics.executor_exits[node.index],
        daemon_silent_s=record.daemon_pulse.silent_s if record.daemon is not None else 0.0,
        executor_silent_s=record.executor_pulse.silent_s if has_executor else 0.0,
    )


def _session(master: Master, session: Session, now_s: float) -> master_pb2.SessionStatus:
    snapshots = session.snapshots
    return master_pb2.SessionStatus(
        session_id=session.session_id[:SESSION_DIGITS],
        last_step=session.last_number,
        array_count=len(session.arrays),
        array_bytes=session.array_bytes,
        executable_count=len(session.executables),
        snapshot=snapshots.complete,
        snapshot_bytes=snapshots.kept_bytes,
        snapshot_age_s=now_s - snapshots.completed_s if snapshots.complete else 0.0,
        running_steps=len(session.running),
        queued_steps=sum(isinstance(item.request, ev.StepRequested) for item in session.queue),
        steps_per_s=master.state.statistics.steps_per_s(session.session_id),
        idle_s=now_s - session.last_seen_s,
        is_connected=session.stream is not None,
        owner=session.owner,
        name=session.name,
        protection=_protection(snapshots.protection),
    )


def _protection(protection: ev.Protection | None) -> master_pb2.Protection | None:
    """None: the session's client takes no snapshots, or is not back."""
    if protection is None or not protection.is_wanted:
        return None
    return master_pb2.Protection(is_wanted=True, is_ready=protection.is_ready, snapshot=protection.snapshot)
