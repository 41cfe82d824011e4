"""Limits and waiting times of a server. Seconds and bytes, in the names."""

from __future__ import annotations

import math
from dataclasses import dataclass

#: What one person may have of what there is, where no option says otherwise.
_SHARE = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one server; the defaults suit a trusted team, not the open internet.

    program_bytes: HLO text of one program, unpacked.
    session_program_bytes, all_program_bytes: of the compressed programs of a session, and of all; likewise of plans.
    session_array_bytes: logical bytes of all arrays of one session.
    person_sessions, person_array_bytes: of all sessions of one person; 0: three quarters of what there is.
    snapshot_bytes: host memory of one node for snapshots of all sessions; 0: half of what the machine has.
    pending_steps: step numbers a client may send ahead of its received replies; the same number of replies is kept
        until a client comes back.
    grace_s: lifetime of a session without an open RunSteps stream or a call.
    named_grace_s: the same of a session with a name, which another process may take up.
    evict_idle_s: time without a call after which a session gives way to a new one, where there is no room, if its
        client is not connected or it holds neither arrays nor executables.
    session_idle_s: longest time of a session without a call of its client, connected or not.
    argument_wait_s: a step's longest wait on arguments still on their way; also its own and a load's on executors that
        are not ready, unless the client restores snapshots.
    step_s: a step's time limit, at least: a plan that predicts more, or a step that took long before, has a longer one;
        the user's `step_timeout` takes its place. It counts from the end of the steps before.
    stall_s: age from which a step is a suspect, and named to all who wait.
    cancel_grace_s: time a cancelled step has to end by itself, at least; also one whose session was closed.
    load_s: longest time of a load.
    silence_s: time without a sign of life after which an executor is replaced, and a daemon counts as gone.
    divergence_s: time the other executors may go on with a step failed on one of them; then all are started anew (they
        may wait in a collective for ever).
    transfer_wait_s: a pipeline stage's longest wait on another stage's transfer, its computing included.
    save_s: longest time of a save until its checkpoint is complete.
    adopt_s: time that executors of a master before have to come back; then others are started.
    first_retry_s, last_retry_s: pause after a start that failed, doubled from the first to the last.
    drain_s: longest time from the wish to end (SIGTERM, a preemption notice) to the end.
    drain_notice_s: time, from then on, in which steps are still taken: of clients that have not heard of it yet.
    drain_idle_s: time without a word of the clients that have arrays after which they are taken to need nothing more.
    start_attempts: generations in a row that may fail to start before the server gives up, if none has ever started.
    restart_patience_s: the same in seconds, for a cluster that has been ready before.
    rejoin_grace_s: of an elastic cluster: time that a node has to come back, before the others start without it.
    node_failures, node_cooldown_s: so many failures in a row, until a node is left out; and for how long.
    """

    sessions: int = 64
    programs_per_session: int = 256
    program_bytes: int = 1 << 30
    session_program_bytes: int = 1 << 30
    all_program_bytes: int = 4 << 30
    arrays_per_session: int = 1_000_000
    session_array_bytes: int = 1 << 44
    person_sessions: int = 0
    person_array_bytes: int = 0
    snapshot_bytes: int = 0
    pending_steps: int = 64
    read_back_bytes: int = 64 << 10
    grace_s: float = 60.0
    named_grace_s: float = 3600.0
    evict_idle_s: float = 10.0
    session_idle_s: float = math.inf
    argument_wait_s: float = 60.0
    step_s: float = 600.0
    stall_s: float = 10.0
    cancel_grace_s: float = 10.0
    load_s: float = 3600.0
    silence_s: float = 15.0
    divergence_s: float = 15.0
    transfer_wait_s: float = 300.0
    save_s: float = 3600.0
    start_timeout_s: float = 300.0
    adopt_s: float = 10.0
    drain_s: float = 30.0
    drain_notice_s: float = 2.0
    drain_idle_s: float = 3.0
    first_retry_s: float = 1.0
    last_retry_s: float = 60.0
    start_attempts: int = 5
    restart_patience_s: float = 1800.0
    max_streams: int = 256
    rejoin_grace_s: float = 30.0
    node_failures: int = 3
    node_cooldown_s: float = 600.0

    @property
    def most_person_sessions(self) -> int:
        """What one person may open, so that others find room."""
        return self.person_sessions or math.ceil(_SHARE * self.sessions)

    @property
    def person_program_bytes(self) -> int:
        """Of the compressed programs of all sessions of one person, and of those that come in; likewise of plans."""
        return max(self.session_program_bytes, int(_SHARE * self.all_program_bytes))

    def most_person_array_bytes(self, memory_bytes: int) -> float:
        """Logical bytes. memory_bytes: of all devices, where people have tokens of their own, else 0."""
        return self.person_array_bytes or (_SHARE * memory_bytes if memory_bytes else math.inf)

    def person_upload_bytes(self, memory_bytes: int) -> int:
        """What unfinished uploads of one person may hold on a node with so much memory."""
        return min(self.person_array_bytes or memory_bytes, int(_SHARE * memory_bytes))
