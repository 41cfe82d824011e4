"""Nodes as the formation knows them: who they are, what connects them, and how long they have been silent."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A node that contributes devices."""

    index: int
    address: str
    device_count: int
    data_port: int = 0  # 0: any


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What every node must agree on."""

    cluster_hash: str
    shardwright_version: str
    jax_version: str


@dataclass(slots=True)
class Pulse:
    """Since when a peer has been silent, in seconds of the awake clock; looked at once a tick."""

    is_heard: bool = True
    silent_s: float = 0.0
    _heard_s: float = 0.0

    def look(self, awake_s: float) -> float:
        if self.is_heard:
            self.is_heard, self._heard_s = False, awake_s
        self.silent_s = awake_s - self._heard_s
        return self.silent_s


@dataclass(slots=True)
class NodeRecord:
    """daemon: its connection, or None. executor: whether one may be running, as far as is known.

    executor_connection: its Execute stream, or None until it joined. pid, machine_code: of the executor. transfers:
    calls at its data port that move contents. farewell: why its daemon is about to leave.
    """

    member: Member
    daemon: int | None = None
    coordinator_address: str = ""
    executor: bool = False
    executor_connection: int | None = None
    data_address: str = ""
    transfer_address: str = ""
    snapshot_address: str = ""
    snapshot_key: str = field(default="", repr=False)
    data_port: int = 0
    detail: str = ""
    pid: int = 0
    machine_code: str = ""
    received: int = 0  # sequence number of the executor's last command, when it joined
    transfers: int = 0
    farewell: str = ""
    busy: tuple[int, str] = (0, "")  # sequence number of what the executor has been busy with, and where in it
    daemon_pulse: Pulse = field(default_factory=Pulse)
    executor_pulse: Pulse = field(default_factory=Pulse)
    is_daemon_silent: bool = False
