"""Which workers are there, and which generation of executors runs: a pure state machine.

All executors are started together and die together, because one dead process
takes the others of its `jax.distributed` job with it:

| phase    | event                                    | next     | commands                     |
|----------|------------------------------------------|----------|------------------------------|
| waiting  | the last daemon joins                    | starting | StartExecutor to every node  |
| waiting  | `wait_s` is over, first time only        | waiting  | Halt                         |
| starting | the last executor joins                  | ready    | Log                          |
| starting | an executor exits, or too much time      | stopping | StopExecutor to the others   |
| ready    | an executor exits or leaves              | stopping | StopExecutor to the others   |
| adopting | the last daemon and executor of before   | ready    | Log                          |
| adopting | one has no executor, or too much time    | stopping | StopExecutor to the others   |
| any      | a daemon leaves, its executor never came | stopping | StopExecutor to the others   |
| ready    | a daemon leaves, its executor goes on    | ready    | Log                          |
| ready    | an executor is silent for `silence_s`    | stopping | StopExecutor to all          |
| stopping | the last executor has exited             | waiting  | (then as above)              |

Daemons and executors have a connection each, and send signs of life. A daemon that freezes or loses its connection
costs nothing while its executor is heard: it is taken up again when it is back. An executor dies with its daemon's
process, and by itself when its own connection breaks.
Ends that another end may explain come here after it (`causes.py`).

A start that failed is tried again after a pause, which grows. Halt after `start_attempts` of them in a row, or one
where the executor says that it cannot start (`CANNOT_START`); where the cluster was ready before, after
`restart_patience_s`.

The nodes of a generation are its *team*: all there are, or of an elastic cluster those that the roster (`roster.py`)
chooses when it starts. A node outside of the team may come and go.
"""

from __future__ import annotations

import signal
from typing import Literal

from shardwright.errors import (
    ClusterConfigError,
    ServerUnavailableError,
    ShardwrightError,
    WorkerLostError,
)
from shardwright.server.limits import Limits
from shardwright.server.master.commands import Command, Disconnect, Halt, Log, Refuse, StartExecutor, StopExecutor
from shardwright.server.master.events import (
    DaemonHeard,
    DaemonJoined,
    DaemonLeft,
    ExecutorExited,
    ExecutorHeard,
    ExecutorJoined,
    ExecutorLeft,
    MembersChanged,
)
from shardwright.server.master.nodes import Identity, Member, NodeRecord, Pulse
from shardwright.server.master.roster import Roster
from shardwright.server.worker.exit_codes import CANNOT_START

_DAEMON_LOST = "its daemon ended, or its connection to the master broke"
_STREAM_LOST = "its connection was lost"

Phase = Literal["adopting", "waiting", "starting", "ready", "stopping"]


class Formation:
    """Mutable; `transitions.py` feeds it and looks at `phase` before and after.

    roster: of an elastic cluster. team: nodes of the generation that runs, or ran last; at first all.
    devices: node index → positions of its devices in the team's order.
    """

    def __init__(
        self,
        members: tuple[Member, ...],
        identity: Identity,
        limits: Limits,
        *,
        wait_s: float,
        now_s: float,
        roster: Roster | None = None,
    ):
        self.nodes = {member.index: NodeRecord(member=member, data_port=member.data_port) for member in members}
        self._members = {member.index: member for member in members}
        self.roster = roster
        self.team = tuple(self.nodes)
        self.devices = _positions(members)
        self.leaving: set[int] = set()  # nodes of an elastic cluster whose daemons have asked to end
        self.identity = identity
        self.phase: Phase = "waiting"
        self.generation = 0
        self.last_loss: ShardwrightError | None = None
        self.lost_generation = 0
        self.last_lost: int | None = None  # the node whose fault it was, where there is one
        self.silent_node: int | None = None  # the same, where its executor gave no sign of life
        self._limits = limits
        self._wait_s = wait_s
        self._since_s = now_s
        self._failed_starts = 0  # in a row
        self._failing_since_s = now_s
        self._retry_s = now_s  # no start before
        self.was_ready = False
        self._is_halted = False

    def begin_adoption(self, generation: int, team: tuple[int, ...], now_s: float) -> bool:
        """Executors of a master before may still run; those of a later generation are started only without them.

        False, where nodes of their team belong to the cluster no more: then others are started at once.
        """
        self.generation, self.was_ready, self._since_s = generation, True, now_s
        if not team or not self.nodes.keys() >= set(team):
            return False
        self.phase, self.team = "adopting", team
        self.devices = _positions(tuple(record.member for record in self.team_records))
        if self.roster is not None:
            self.roster.expect_only(team, now_s)
        return True

    # ---- looking -----------------------------------------------------------
    @property
    def connections(self) -> dict[int, int]:
        """Execute connection → node index, of the running generation."""
        return {
            record.executor_connection: index
            for index, record in self.nodes.items()
            if record.executor_connection is not None
        }

    def nodes_of(self, devices: range) -> frozenset[int]:
        """The nodes that own some of these devices."""
        return frozenset(
            node for node, own in self.devices.items() if own.start < devices.stop and devices.start < own.stop
        )

    @property
    def missing(self) -> list[Member]:
        return [record.member for record in self.nodes.values() if record.daemon is None]

    @property
    def team_records(self) -> list[NodeRecord]:
        return [self.nodes[index] for index in self.team]

    @property
    def _not_back(self) -> list[NodeRecord]:
        """Nodes of the team whose executors have yet to be taken up."""
        return [node for node in self.team_records if node.daemon is None or node.executor_connection is None]

    @property
    def wants_other_team(self) -> bool:
        """Whether other nodes than those that run could take part."""
        if self.phase != "ready" or self.roster is None:
            return False
        candidates = self.roster.candidates
        return candidates != frozenset(self.team) and len(candidates) >= self.roster.min_nodes

    @property
    def has_suspects(self) -> bool:
        """Whether an executor has been silent for longer than it should."""
        return any(self.is_suspect(record) for record in self.nodes.values())

    @property
    def lacks_daemons(self) -> bool:
        """Whether a daemon is gone or silent, whatever its executor does."""
        is_smaller = len(self.team) < len(self.nodes)
        return is_smaller or any(record.daemon is None or record.is_daemon_silent for record in self.nodes.values())

    def is_suspect(self, record: NodeRecord) -> bool:
        """Whether its executor has been silent for longer than it should."""
        is_silent = record.executor_pulse.silent_s > self._limits.silence_s / 3
        return record.executor_connection is not None and is_silent

    # ---- daemons -----------------------------------------------------------
    def daemon_joined(self, event: DaemonJoined, now_s: float) -> list[Command]:
        error = self._refusal(event)
        if error is not None:
            return [Refuse(connection=event.connection, error=error), Log(text=f"refused a worker: {error.message}")]
        record = self.nodes[event.node]
        commands = self._disconnect(record)  # a silent one
        record.daemon, record.daemon_pulse = event.connection, Pulse()
        record.coordinator_address = event.coordinator_address
        record.snapshot_address, record.snapshot_key = event.snapshot_address, event.snapshot_key
        record.detail = record.farewell = ""
        commands += self._look(now_s)
        if self.phase == "adopting":
            return [*commands, *self._adopt_daemon(record, event, now_s)]
        if record.executor_connection is not None:
            if event.executor_generation == self.generation:
                return [*commands, Log(text=f"the daemon of node {event.node} is back; its executor has gone on")]
            return [*commands, *self._let_go(record), *self._stop(record, "another daemon took its place", now_s)]
        missing = [str(member.index) for member in self.missing]
        is_waited_for = missing and self.phase == "waiting"
        text = f"node {event.node} joined" + (f"; waiting for workers {', '.join(missing)}" if is_waited_for else "")
        return [*commands, Log(text=text), *self._start_if_complete(now_s)]

    def _adopt_daemon(self, record: NodeRecord, event: DaemonJoined, now_s: float) -> list[Command]:
        """The daemon of a node whose executor may have outlived the master before."""
        if record.member.index not in self.team:
            return [Log(text=f"node {event.node} joined; the executors of before are taken up without it")]
        if event.executor_generation != self.generation:
            return [*self._let_go(record), *self._stop(record, "its executor has ended", now_s)]
        record.executor = True
        return self._finish_adoption()

    def _refusal(self, event: DaemonJoined) -> ShardwrightError | None:
        mine = self.identity
        if event.node not in self.nodes:
            return ClusterConfigError(
                f"task {event.node} is no worker of the master's cluster file", remedy="give all nodes the same file"
            )
        if event.cluster_hash != mine.cluster_hash:
            return ClusterConfigError(
                f"the cluster files of the master and of node {event.node} differ",
                remedy="give all nodes the same file",
            )
        for what, theirs, ours in (
            ("shardwright", event.shardwright_version, mine.shardwright_version),
            ("jax", event.jax_version, mine.jax_version),
        ):
            if theirs != ours:
                return ClusterConfigError(
                    f"node {event.node} runs {what} {theirs}, the master {ours}",
                    remedy="install the same versions on all nodes",
                )
        if self.nodes[event.node].daemon is not None and not self.nodes[event.node].is_daemon_silent:
            return ClusterConfigError(
                f"task {event.node} is running already", remedy="give each node its own task index, or stop the other"
            )
        return None

    def daemon_left(self, event: DaemonLeft, now_s: float) -> list[Command]:
        record = next((record for record in self.nodes.values() if record.daemon == event.connection), None)
        return [] if record is None else self._lose_daemon(record, _DAEMON_LOST, now_s)

    def daemon_heard(self, event: DaemonHeard, now_s: float) -> list[Command]:
        del now_s
        for record in self.nodes.values():
            if record.daemon == event.connection:
                record.daemon_pulse.is_heard = True
                if record.is_daemon_silent:
                    record.is_daemon_silent = False
                    return [Log(text=f"the daemon of node {record.member.index} is heard again")]
        return []

    def _lose_daemon(self, record: NodeRecord, why: str, now_s: float) -> list[Command]:
        """An executor that is connected goes on: it dies with its daemon's process, but not with its connection."""
        record.daemon, record.is_daemon_silent = None, False
        self.leaving.discard(record.member.index)
        record.detail = record.farewell or why
        if record.executor_connection is not None:
            return [Log(text=f"node {record.member.index}: {why}; its executor is still connected")]
        record.executor = False
        if record.member.index not in self.team:
            return [Log(text=f"node {record.member.index}: {why}; it took no part"), *self._look(now_s)]
        return self._stop(record, why, now_s)

    def _disconnect(self, record: NodeRecord) -> list[Command]:
        """Give up a daemon's connection, if there is one."""
        connection, record.daemon, record.is_daemon_silent = record.daemon, None, False
        return [] if connection is None else [Disconnect(connection=connection)]

    def _let_go(self, record: NodeRecord) -> list[Command]:
        """End an executor without its daemon: by its own connection, or it is gone already."""
        connection, record.executor_connection, record.executor = record.executor_connection, None, False
        over = WorkerLostError(f"generation {self.generation} is over")
        return [] if connection is None else [Refuse(connection=connection, error=over)]

    # ---- executors ---------------------------------------------------------
    def executor_joined(self, event: ExecutorJoined, now_s: float) -> list[Command]:
        record = self.nodes.get(event.node)
        if record is None or self.phase not in ("starting", "adopting") or event.generation != self.generation:
            error = WorkerLostError(f"generation {event.generation} of node {event.node} is over")
            return [Refuse(connection=event.connection, error=error)]
        if event.device_count != record.member.device_count:
            text = f"{event.device_count} devices instead of {record.member.device_count}"
            refusal = Refuse(connection=event.connection, error=ClusterConfigError(f"node {event.node} has {text}"))
            return [refusal, *self._stop(record, f"it has {text}", now_s)]
        record.executor_connection = event.connection
        record.data_address = event.data_address
        record.transfer_address = event.transfer_address
        record.data_port = int(event.data_address.rpartition(":")[2])
        record.pid, record.busy, record.executor_pulse = event.pid, (0, ""), Pulse()
        record.transfers, record.received, record.machine_code = 0, event.received, event.machine_code
        if self.phase == "adopting":
            record.executor = True
            return self._finish_adoption()
        if any(other.executor_connection is None for other in self.team_records):
            return []
        self.phase = "ready"
        self.was_ready = True
        self.silent_node = None
        self._failed_starts = 0
        for each in self.team_records:
            each.detail = ""  # of executors of before
        counts = [record.member.device_count for record in self.team_records]
        shape = f"{len(counts)} × {counts[0]}" if len(set(counts)) == 1 else " + ".join(map(str, counts))
        absent = ", ".join(str(index) for index in self.nodes if index not in self.team)
        without = f"; without node{'s' * (',' in absent)} {absent}" if absent else ""
        return [Log(text=f"cluster ready: {len(counts)} node{'s' * (len(counts) > 1)}, {shape} devices{without}")]

    def _finish_adoption(self) -> list[Command]:
        if self._not_back:
            return []
        self.phase = "ready"
        return [Log(text=f"all executors of generation {self.generation} are still there")]

    def executor_exited(self, event: ExecutorExited, now_s: float, doing: str = "") -> list[Command]:
        """doing: what it was busy with, in words."""
        record = next((record for record in self.nodes.values() if record.daemon == event.connection), None)
        if record is None or event.generation != self.generation:
            return []
        record.coordinator_address = event.coordinator_address
        record.executor = False
        never_joined = record.executor_connection is None
        record.executor_connection = None
        if self.phase == "starting" and never_joined:
            record.data_port = record.member.data_port  # the old port may have been the reason
        lines = event.last_lines.strip().splitlines()
        during = f", busy with {doing}" if doing else ""
        how = f"it ended with {_describe_exit(event.exit_code)}{during}" + (f": {lines[-1]}" if lines else "")
        is_first = self.roster is None and not self.was_ready
        is_final = self.phase == "starting" and event.exit_code == CANNOT_START and is_first
        commands = self._stop(record, how, now_s, is_final=is_final)
        if record.detail == _STREAM_LOST:  # now it is known why
            record.detail = how
            commands = [Log(text=f"the executor of node {record.member.index}: {how}", is_warning=True), *commands]
        return commands

    def executor_left(self, event: ExecutorLeft, now_s: float) -> list[Command]:
        for record in self.nodes.values():
            if record.executor_connection == event.connection:
                record.executor_connection = None
                if record.daemon is None:
                    record.executor = False  # nobody will tell of its end
                    return self._stop(record, record.detail, now_s)
                return self._stop(record, _STREAM_LOST, now_s)
        return []

    def restart(self, reason: str, now_s: float) -> list[Command]:
        """Start a new generation although all executors are there."""
        return self._stop(None, reason, now_s)

    def replace_executors(self, reason: str, now_s: float) -> list[Command]:
        """The same, because of what one of them is busy with."""
        return self._stop(None, reason, now_s, text=f"all executors were replaced: {reason}")

    def executor_heard(self, event: ExecutorHeard, now_s: float) -> list[Command]:
        del now_s
        index = self.connections.get(event.connection)
        if index is not None:
            self.nodes[index].busy = (event.sequence, event.doing)
            self.nodes[index].transfers = event.transfers
            self.nodes[index].executor_pulse.is_heard = True
        return []

    def regroup(self, now_s: float) -> list[Command]:
        """Start a new generation, of the nodes that could take part."""
        assert self.roster is not None
        came = sorted(self.roster.candidates - set(self.team))
        gone = sorted(set(self.team) - self.roster.candidates)
        changes = [f"node {node} joins" for node in came] + [f"node {node} leaves" for node in gone]
        text = f"the cluster changes: {', '.join(changes)}; all executors start anew"
        return self._stop(None, text, now_s, text=text)

    def change_members(self, event: MembersChanged, now_s: float) -> list[Command]:
        """Other nodes belong to the cluster from now on; those of the team that do not any more stay until it ends."""
        assert self.roster is not None
        new = {member.index: member for member in event.members}
        for index, member in new.items():
            if index not in self.nodes:
                self.nodes[index] = NodeRecord(member=member, data_port=member.data_port)
        self._members = new
        self.nodes = dict(sorted(self.nodes.items()))
        self.roster.change_nodes(new, now_s)
        return self._dismiss_strangers() + self._look(now_s)

    def _dismiss_strangers(self) -> list[Command]:
        """Forget nodes that do not belong to the cluster any more; their daemons end."""
        commands: list[Command] = []
        strangers = [] if self.roster is None else sorted(self.nodes.keys() - self.roster.nodes - set(self.team))
        for index in strangers:
            daemon = self.nodes.pop(index).daemon
            gone = ClusterConfigError(f"node {index} is no longer in the master's cluster file")
            commands += [] if daemon is None else [Refuse(connection=daemon, error=gone)]
        return commands

    # ---- time --------------------------------------------------------------
    def _look(self, now_s: float) -> list[Command]:
        """Tell the roster who is here."""
        if self.roster is None:
            return []
        here = [
            index
            for index, record in self.nodes.items()
            if index not in self.leaving and (record.daemon is not None or record.executor_connection is not None)
        ]
        if self.phase == "adopting":
            here += [index for index in self.team if index not in here]  # each is waited for
        return [Log(text=text, is_warning=True) for text in self.roster.look(here, now_s)]

    def _lacks_nodes(self) -> bool:
        """Whether too few nodes are here to start."""
        if self.roster is None:
            return bool(self.missing)
        return len(self.nodes) - len(self.missing) < self.roster.min_nodes

    def tick(self, now_s: float) -> list[Command]:
        return self._look(now_s) + self._tick(now_s)

    def _tick(self, now_s: float) -> list[Command]:
        waited_s = now_s - self._since_s
        if self.phase == "waiting" and not self.was_ready and self._lacks_nodes() and waited_s > self._wait_s:
            names = ", ".join(f"{member.index} ({member.address})" for member in self.missing)
            error = ServerUnavailableError(
                f"worker {names} did not come within {self._wait_s:g} s",
                remedy="start it with launch_worker.sh and the same cluster file, or wait longer with --wait",
            )
            return [Halt(error=error)]
        if self.phase == "starting" and waited_s > self._limits.start_timeout_s:
            late = next(record for record in self.team_records if record.executor_connection is None)
            return self._stop(late, f"it did not start within {self._limits.start_timeout_s:g} s", now_s)
        if self.phase == "adopting" and waited_s > self._limits.adopt_s:
            return self._stop(self._not_back[0], f"it did not come back within {self._limits.adopt_s:g} s", now_s)
        return self._start_if_complete(now_s)

    def watch(self, awake_s: float, now_s: float) -> list[Command]:
        """Look for signs of life; `awake_s` is the awake clock's time."""
        limit_s, commands = self._limits.silence_s, list[Command]()
        for record in self.nodes.values():
            daemon_s, executor_s = record.daemon_pulse.look(awake_s), record.executor_pulse.look(awake_s)
            if record.daemon is not None and daemon_s > limit_s:
                commands += self._notice_silent_daemon(record, now_s)
            if record.executor_connection is not None and executor_s > limit_s:
                why = f"process {record.pid} has been silent for {executor_s:.0f} s: it hangs, or its machine does"
                self.silent_node = record.member.index
                commands += self._stop(record, why, now_s)
        return commands

    def _notice_silent_daemon(self, record: NodeRecord, now_s: float) -> list[Command]:
        why = f"its daemon has been silent for {record.daemon_pulse.silent_s:.0f} s"
        if record.executor_connection is None or self.is_suspect(record):
            return [*self._disconnect(record), *self._lose_daemon(record, why, now_s)]
        if record.is_daemon_silent:
            return []
        record.is_daemon_silent = True
        text = f"node {record.member.index}: {why}; its executor goes on, but could not be replaced"
        return [Log(text=text, is_warning=True)]

    # ---- transitions -------------------------------------------------------
    def _stop(
        self, culprit: NodeRecord | None, reason: str, now_s: float, *, text: str = "", is_final: bool = False
    ) -> list[Command]:
        """End all executors that still run; a new generation follows when the last is gone.

        text: what clients are told, if not that the culprit was lost. is_final: another start will not help.
        """
        commands: list[Command] = []
        if self.phase in ("starting", "ready", "adopting"):
            who, is_fault = _describe_culprit(culprit), self.phase != "adopting"
            if culprit is not None:
                reason = culprit.farewell or reason
            self.last_lost, self.lost_generation = None if culprit is None else culprit.member.index, self.generation
            self.last_loss = WorkerLostError(text or f"{who} was lost: {reason}", remedy=_remedy(culprit))
            commands.append(Log(text=self.last_loss.message, is_warning=True))
            if self.phase == "starting":
                commands += self._record_failed_start(who, reason, now_s, is_final=is_final)
            if culprit is not None:
                culprit.detail = reason
            if culprit is not None and self.roster is not None and not culprit.farewell and is_fault:
                news = self.roster.fail(culprit.member.index, now_s)
                commands += [Log(text=f"{text} ({reason})", is_warning=True) for text in news]
            for record in self.nodes.values():
                if record.executor and record.daemon is not None and not record.is_daemon_silent:
                    commands.append(StopExecutor(connection=record.daemon, generation=self.generation))
                elif record.executor:
                    commands += [*self._let_go(record), *self._disconnect(record)]
                record.executor_connection = None
            self.phase = "stopping"
        if self.phase == "stopping" and not any(record.executor for record in self.nodes.values()):
            self.phase = "waiting"
            self._since_s = now_s
            commands += self._start_if_complete(now_s)
        return commands

    def _record_failed_start(self, who: str, reason: str, now_s: float, *, is_final: bool) -> list[Command]:
        """Pause before the next start, or give up."""
        limits = self._limits
        if self._failed_starts == 0:
            self._failing_since_s = now_s
        self._failed_starts += 1
        if self.was_ready:
            is_over = now_s - self._failing_since_s > limits.restart_patience_s
        else:
            is_over = self._failed_starts >= limits.start_attempts
        if not (is_over or is_final):
            pause_s = min(limits.first_retry_s * 2.0 ** min(self._failed_starts - 1, 30), limits.last_retry_s)
            self._retry_s = now_s + pause_s
            return [Log(text=f"start {self._failed_starts} failed; the next one in {pause_s:g} s", is_warning=True)]
        if self._is_halted:
            return []
        self._is_halted = True
        error = WorkerLostError(f"{who} does not start: {reason}", remedy="the log of that node says more")
        return [Halt(error=error, is_final=is_final)]

    def _start_if_complete(self, now_s: float) -> list[Command]:
        if self.phase != "waiting" or self._is_halted or now_s < self._retry_s:
            return []
        commands = self._look(now_s)
        team = self._choose_team(now_s)
        if team is None:
            return commands
        self.team = team
        commands += self._dismiss_strangers()
        self.phase = "starting"
        self.generation += 1
        self._since_s = now_s
        records = self.team_records
        for record in records:
            record.member = self._members[record.member.index]
        self.devices = _positions(tuple(record.member for record in records))
        for process_id, record in enumerate(records):
            assert record.daemon is not None
            record.executor = True
            commands.append(
                StartExecutor(
                    connection=record.daemon,
                    generation=self.generation,
                    coordinator_address=records[0].coordinator_address,
                    process_count=len(records),
                    process_id=process_id,
                    data_port=record.data_port,
                )
            )
        return commands

    def _choose_team(self, now_s: float) -> tuple[int, ...] | None:
        """The nodes of the next generation; None: not yet."""
        if self.roster is None:
            return None if self.missing else tuple(self.nodes)
        return self.roster.choose(now_s, self.leaving)

    def check_invariants(self) -> None:
        """What always holds between two events; AssertionError where it does not."""
        records = self.nodes.values()
        assert (self.phase == "ready") <= all(record.executor_connection is not None for record in self.team_records)
        assert all(record.member.index in self.team for record in records if record.executor)
        assert list(self.devices) == list(self.team), "positions are of the team"
        assert (self.phase in ("waiting", "stopping")) <= all(record.executor_connection is None for record in records)
        has_reason = bool(self.missing) or self._is_halted or self._failed_starts > 0 or self.roster is not None
        assert (self.phase == "waiting") <= has_reason, "a complete cluster waits after a failed start only"
        assert (self.phase == "waiting") <= (not any(record.executor for record in records))
        assert (self.phase == "stopping") <= any(record.executor for record in records)
        for record in records:
            assert (record.executor_connection is not None) <= record.executor, "no stream without an executor"
            has_connection = record.daemon is not None or record.executor_connection is not None
            assert record.executor <= has_connection, "what nobody can tell of is gone"
            assert record.is_daemon_silent <= (record.daemon is not None)
        daemons = [record.daemon for record in records if record.daemon is not None]
        assert len(set(daemons)) == len(daemons)


def _describe_culprit(culprit: NodeRecord | None) -> str:
    if culprit is None:
        return "the cluster"
    member = culprit.member
    return (
        f"node {member.index} ({member.address})" if culprit.daemon is None else f"the executor of node {member.index}"
    )


def _remedy(culprit: NodeRecord | None) -> str:
    if culprit is not None and culprit.daemon is None:
        return (
            f"start it again with launch_worker.sh, the same cluster file and task number {culprit.member.index}, "
            "unless its network comes back; then run init again, or restore a checkpoint"
        )
    return "arrays of before are gone: run init again, or restore a checkpoint; the server starts executors by itself"


def _describe_exit(exit_code: int) -> str:
    if exit_code == -signal.SIGKILL:
        return "SIGKILL: somebody killed it, or the kernel did for want of memory"
    return f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"


def _positions(members: tuple[Member, ...]) -> dict[int, range]:
    devices_of_node: dict[int, range] = {}
    first = 0
    for member in members:
        devices_of_node[member.index] = range(first, first + member.device_count)
        first += member.device_count
    return devices_of_node
