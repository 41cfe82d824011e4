"""The launcher's decisions, a pure state machine: events in, actions out; `launcher.py` does the actions.

A job starts once every host answers: a mistyped host costs nothing. The first failing process ends the others. Signals
of the user are forwarded; processes still alive after the grace period are killed.

A job's processes are fixed here; `elastic_supervision.py` replaces lost ranks, `server_supervision.py` starts lost
servers again.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.launch.tuning import FAILURE_GRACE_S, KILL_GRACE_S
from shardwright.membership import TimePassed

#: Forwarded signals that do not end the job.
FORWARDED_SIGNALS = frozenset({signal.SIGUSR1, signal.SIGUSR2})


# ---- events ----
@dataclass(frozen=True, slots=True)
class NodeReady:
    """A host answers."""

    host: str


@dataclass(frozen=True, slots=True)
class NodeLost:
    """A host does not answer (any longer); reason: ssh's message or ours."""

    host: str
    reason: str


@dataclass(frozen=True, slots=True)
class ProcessEnded:
    """A process ended. code: the exit code, or minus the signal's number. reason: of a failed start, else ""."""

    number: int
    code: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SignalReceived:
    """The launcher got a signal."""

    number: int


Event = NodeReady | NodeLost | ProcessEnded | SignalReceived | TimePassed


# ---- actions ----
@dataclass(frozen=True, slots=True)
class StartProcesses:
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SendSignal:
    """Signal these processes; an ending signal also their process groups."""

    signal: int
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OpenNode:
    """Reach a host, by name."""

    host: str


@dataclass(frozen=True, slots=True)
class CloseNode:
    """Let go of a host that was lost."""

    host: str


@dataclass(frozen=True, slots=True)
class Say:
    """A line for the user."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The job is over.

    exit_code: the launcher's. failure: the first failing event; None for success or a signal.
    after_s: from the start to the failure. ended_others: number of processes ended because of it. reason: why a job
    that outlives failures did not outlive this one.
    """

    exit_code: int
    failure: ProcessEnded | NodeLost | None = None
    after_s: float = 0.0
    ended_others: int = 0
    reason: str = ""


Action = StartProcesses | SendSignal | OpenNode | CloseNode | Say | Finish


def shell_exit_code(code: int) -> int:
    """A shell's exit code: 128 + n for signal n."""
    return 128 - code if code < 0 else code


class Supervisor:
    """One job from its start to its end.

    hosts: the host of each process, by number. start_timeout_s: for all hosts to answer. grace_s: from a forwarded
    signal to SIGKILL. Times are seconds of any one clock.
    """

    def __init__(
        self,
        hosts: Mapping[int, str],
        *,
        start_timeout_s: float,
        grace_s: float,
        fail_fast: bool = True,
        now_s: float = 0.0,
    ) -> None:
        self._hosts = dict(hosts)
        self._grace_s = grace_s
        self._start_timeout_s = start_timeout_s
        self._fail_fast = fail_fast
        self._started_s = now_s
        self._silent = list(dict.fromkeys(hosts.values()))
        self._running: set[int] = set(hosts)
        self._phase = "starting"  # starting → running → ending → killing → finished
        self._outcome: Finish | None = None
        self.deadline_s: float | None = now_s + start_timeout_s

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Handle an event: the actions it requires. None follow `Finish`."""
        if self._phase == "finished":
            return []
        match event:
            case NodeReady():
                return self._on_node_ready(event)
            case NodeLost():
                return self._on_node_lost(event, now_s)
            case ProcessEnded():
                return self._on_process_ended(event, now_s)
            case SignalReceived():
                return self._on_signal(event, now_s)
            case TimePassed():
                return self._on_tick(now_s)

    # ---- hosts and processes ----
    def _on_node_ready(self, event: NodeReady) -> list[Action]:
        if event.host in self._silent:
            self._silent.remove(event.host)
        return self._start_if_ready()

    def _start_if_ready(self) -> list[Action]:
        if self._phase != "starting" or self._silent:
            return []
        if not self._running:
            return self._finish()
        self._phase = "running"
        self.deadline_s = None
        return [StartProcesses(tuple(sorted(self._running)))]

    def _on_node_lost(self, event: NodeLost, now_s: float) -> list[Action]:
        lost = {number for number in self._running if self._hosts[number] == event.host}
        if not lost:
            return []
        self._running -= lost
        if event.host in self._silent:
            self._silent.remove(event.host)
        return self._on_failure(event, 1, now_s)

    def _on_process_ended(self, event: ProcessEnded, now_s: float) -> list[Action]:
        self._running.discard(event.number)
        if event.code:
            return self._on_failure(event, shell_exit_code(event.code), now_s)
        return self._finish_if_over()

    def _on_failure(self, event: ProcessEnded | NodeLost, exit_code: int, now_s: float) -> list[Action]:
        """Handle a lost process or host: keep the first one's code, and end the others."""
        starting = self._phase == "starting"
        if self._outcome is None:
            others = len(self._running) if self._fail_fast and not starting else 0
            self._outcome = Finish(
                exit_code=exit_code, failure=event, after_s=now_s - self._started_s, ended_others=others
            )
        if starting:
            return self._finish() if self._fail_fast else self._start_if_ready()
        if self._phase == "running" and self._fail_fast and self._running:
            return self._end(signal.SIGTERM, FAILURE_GRACE_S, now_s)
        return self._finish_if_over()

    # ---- signals and deadlines ----
    def _on_signal(self, event: SignalReceived, now_s: float) -> list[Action]:
        if event.number in FORWARDED_SIGNALS:
            return self._signal_all(event.number) if self._phase == "running" else []
        self._outcome = self._outcome or Finish(exit_code=128 + event.number)
        if self._phase == "starting":
            return self._finish()
        if self._phase == "running":
            if event.number == signal.SIGPIPE:  # nobody reads the output: no signal for those who write it
                return self._end(signal.SIGTERM, FAILURE_GRACE_S, now_s)
            return self._end(event.number, self._grace_s, now_s)
        return self._kill(now_s) if self._phase == "ending" else []

    def _on_tick(self, now_s: float) -> list[Action]:
        if self.deadline_s is None or now_s < self.deadline_s:
            return []
        if self._phase == "starting":
            reason = f"no answer within {self._start_timeout_s:g} s"
            return [action for host in tuple(self._silent) for action in self.handle(NodeLost(host, reason), now_s)]
        return self._kill(now_s) if self._phase == "ending" else self._finish()

    def _end(self, number: int, grace_s: float, now_s: float) -> list[Action]:
        self._phase = "ending"
        self.deadline_s = now_s + grace_s
        return self._signal_all(number)

    def _kill(self, now_s: float) -> list[Action]:
        self._phase = "killing"
        self.deadline_s = now_s + KILL_GRACE_S
        return self._signal_all(signal.SIGKILL)

    def _signal_all(self, number: int) -> list[Action]:
        return [SendSignal(number, tuple(sorted(self._running)))]

    # ---- the end ----
    def _finish_if_over(self) -> list[Action]:
        return self._finish() if not self._running else []

    def _finish(self) -> list[Action]:
        self._phase = "finished"
        self.deadline_s = None
        return [self._outcome or Finish(exit_code=0)]
