"""What the launcher of an elastic job decides, as a pure state machine on top of `supervision.py` and `membership.py`.

Workers are processes, numbered as members. Those that train together form a generation; each has its own ranks and its
own coordination service, and no process ever joins one that it has left. A generation is formed once every survivor of
the one before has asked for it, with all others who have asked by then:

- a worker is lost: the others of its generation are told to leave; nobody waits for a replacement, unless fewer than
  the least are left;
- a worker is new, or is to leave: the generation is told, and comes at its next commit;
- a worker ends with 0: the training is over, nobody is started any more, and the others come to their end.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from shardwright import membership
from shardwright.launch.hosts import Host, Placement, place_ranks
from shardwright.launch.supervision import (
    Action,
    CloseNode,
    Event,
    Finish,
    NodeLost,
    NodeReady,
    OpenNode,
    ProcessEnded,
    Say,
    SendSignal,
    SignalReceived,
    StartProcesses,
    Supervisor,
    shell_exit_code,
)
from shardwright.membership import Limits, Membership, TimePassed
from shardwright.processes import describe_exit


# ---- events ----
@dataclass(frozen=True, slots=True)
class HostsDiscovered:
    """Hosts that may be used now, each by its name: all of them."""

    hosts: tuple[Host, ...]


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A worker asks for the next generation. lost: because its own broke. commits: what its state has seen."""

    worker: int
    lost: bool = False
    commits: int = 0


@dataclass(frozen=True, slots=True)
class WorkerSilent:
    """A worker has not been heard for too long."""

    worker: int
    seconds: float


@dataclass(frozen=True, slots=True)
class RanksStalled:
    """Ranks of a generation that others have waited for too long. call: what the others called."""

    generation: int
    ranks: tuple[int, ...]
    call: str
    seconds: float


ElasticEvent = Event | HostsDiscovered | WorkerReady | WorkerSilent | RanksStalled


# ---- actions ----
@dataclass(frozen=True, slots=True)
class FormGeneration:
    """Start a coordination service, and tell the workers, in the order of their ranks, where they stand."""

    generation: int
    workers: tuple[int, ...]
    places: tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class TellLost:
    """Tell workers that a rank of their generation is gone."""

    generation: int
    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TellChanged:
    """Tell workers to come at their next commit."""

    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Dismiss:
    """Tell workers that asked for a generation that there is no place for them: they end with 0."""

    workers: tuple[int, ...]


ElasticAction = Action | FormGeneration | TellLost | TellChanged | Dismiss


class ElasticSupervisor(Supervisor):
    """One elastic job from its start to its end.

    limits: how many workers, and what happens to hosts that fail. start_timeout_s: for a host to answer, and for the
    first workers to come. elastic_timeout_s: how long workers wait while they are too few. reset_limit: the most
    generations after the first; None for any number. grace_s: from a signal that was handed on to SIGKILL.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        start_timeout_s: float,
        elastic_timeout_s: float,
        grace_s: float,
        reset_limit: int | None = None,
        now_s: float = 0.0,
    ) -> None:
        super().__init__({}, start_timeout_s=start_timeout_s, grace_s=grace_s, now_s=now_s)
        self._phase = "running"
        self._limits = limits
        self._members = Membership(limits)
        self._elastic_timeout_s = elastic_timeout_s
        self._reset_limit = reset_limit
        self._found: dict[str, Host] = {}
        self._open: set[str] = set()
        self._opening: dict[str, float] = {}
        self._unstarted: set[int] = set()
        self._ready: dict[int, int] = {}  # the commits of each worker that waits
        self._commits = 0  # the most that a generation began with
        self._leaving: set[int] = set()
        self._dismissed: set[int] = set()
        self._generation = -1
        self._current: tuple[int, ...] = ()
        self._told_changed = False
        self._finishing = False
        self._few_since_s: float | None = now_s
        self._waiting_since_s: float | None = None  # workers of a generation wait for the next one
        self._failure: ProcessEnded | NodeLost | None = None
        self._set_deadline()

    @property
    def generation(self) -> int:
        """The latest generation's number; -1 before the first."""
        return self._generation

    @property
    def running(self) -> frozenset[int]:
        """Workers whose processes run."""
        return frozenset(self._running)

    def host_of(self, worker: int) -> Host:
        """The host that a worker runs on, or ran."""
        return self._found[self._hosts[worker]]

    def host_named(self, name: str) -> Host:
        """A host that was discovered."""
        return self._found[name]

    def handle(self, event: ElasticEvent, now_s: float) -> list[ElasticAction]:  # type: ignore[override]
        """What to do about an event. After `Finish` nothing follows."""
        if self._phase == "finished":
            return []
        actions: list[ElasticAction]
        match event:
            case HostsDiscovered(hosts):
                actions = self._on_hosts(hosts, now_s)
            case WorkerReady():
                actions = self._on_worker_ready(event, now_s)
            case WorkerSilent(worker, seconds):
                actions = self._on_hung((worker,), f"has not been heard for {seconds:.0f} s")
            case RanksStalled(generation, ranks, call, seconds):
                workers = [self._current[rank] for rank in ranks] if generation == self._generation else []
                actions = self._on_hung(workers, f"has not called {call}, which others wait in for {seconds:.0f} s")
            case NodeReady() | NodeLost() | ProcessEnded() | SignalReceived() | TimePassed():
                actions = list(super().handle(event, now_s))
        if self._phase == "running":
            self._set_deadline()
        return actions

    # ---- hosts ----
    def _on_hosts(self, hosts: Sequence[Host], now_s: float) -> list[ElasticAction]:
        self._found.update({host.name: host for host in hosts})
        if self._phase != "running" or self._finishing:
            return []
        slots = {host.name: host.slots for host in hosts}
        actions = self._follow(self._members.handle(membership.HostsFound(slots), now_s), now_s)
        return actions + self._form(now_s)

    def _on_node_ready(self, event: NodeReady) -> list[Action]:
        self._opening.pop(event.host, None)
        if self._phase != "running":
            return []
        self._open.add(event.host)
        workers = sorted(worker for worker in self._unstarted if self._hosts[worker] == event.host)
        self._unstarted.difference_update(workers)
        self._running.update(workers)
        return [StartProcesses(tuple(workers))] if workers else []

    def _on_node_lost(self, event: NodeLost, now_s: float) -> list[Action]:
        self._opening.pop(event.host, None)
        self._open.discard(event.host)
        gone = {worker for worker in self._running | self._unstarted if self._hosts[worker] == event.host}
        self._drop(gone)
        self._failure = event
        if self._phase != "running":
            return self._finish_if_over()
        actions: list[ElasticAction] = [CloseNode(event.host), Say(f"{event.host} is lost: {event.reason}")]
        return self._after_loss(gone, membership.HostFailed(event.host), actions, now_s)

    # ---- workers ----
    def _on_worker_ready(self, event: WorkerReady, now_s: float) -> list[ElasticAction]:
        worker = event.worker
        if self._phase != "running" or worker not in self._running:
            return []
        if worker in self._leaving or (self._finishing and worker not in self._current):
            return [*self._dismiss({worker}), *self._form(now_s)]
        self._ready[worker] = event.commits
        actions = self._tell_lost() if event.lost and worker in self._current else []
        return actions + self._form(now_s)

    def _on_process_ended(self, event: ProcessEnded, now_s: float) -> list[Action]:
        worker, was_leaving = event.number, event.number in self._leaving
        if worker not in self._running:
            return []
        rank = self._name(worker)
        self._drop({worker})
        if self._phase != "running":
            return self._finish_if_over()
        if event.code == 0 and worker not in self._dismissed:
            return [*self._begin_to_finish(), *self._form(now_s), *self._end_if_over()]  # type: ignore[list-item]
        if was_leaving or event.code == 0:
            return self._after_loss({worker} if event.code else set(), membership.MemberLeft(worker), [], now_s)
        if not self._finishing or worker in self._current:
            self._failure = event
        how = event.reason or f"ended with {describe_exit(event.code)}"
        return self._after_loss({worker}, membership.MemberFailed(worker), [Say(f"{rank} {how}")], now_s)

    def _begin_to_finish(self) -> list[ElasticAction]:
        """The training is over. Who has never been in a generation has nothing to lose."""
        if self._finishing or self._generation < 0:
            self._finishing = True
            return []
        self._finishing = True
        late = self._running - set(self._current)
        self._drop_ready(late)
        return [SendSignal(signal.SIGKILL, tuple(sorted(late)))] if late else []

    def _on_hung(self, workers: Sequence[int], how: str) -> list[ElasticAction]:
        """Workers that do not answer are ended: what follows is as if they had failed."""
        hung = [worker for worker in workers if worker in self._running]
        if not hung or self._phase != "running":
            return []
        lines: list[ElasticAction] = [Say(f"{self._name(worker)} {how}: it is ended") for worker in hung]
        return [*lines, SendSignal(signal.SIGKILL, tuple(hung))]

    def _name(self, worker: int) -> str:
        place = f"on {self._hosts[worker]}"
        if worker in self._current:
            return f"rank {self._current.index(worker)} of generation {self._generation} {place}"
        return f"worker {worker} {place}"

    def _drop(self, workers: set[int]) -> None:
        for group in (self._running, self._unstarted, self._leaving):
            group.difference_update(workers)
        self._drop_ready(workers)

    def _dismiss(self, workers: Collection[int]) -> list[ElasticAction]:
        self._drop_ready(workers)
        self._dismissed.update(workers)
        return [Dismiss(tuple(sorted(workers)))] if workers else []

    def _drop_ready(self, workers: Iterable[int]) -> None:
        for worker in workers:
            self._ready.pop(worker, None)

    def _after_loss(
        self, departures: set[int], event: membership.Event, actions: list[ElasticAction], now_s: float
    ) -> list[Action]:
        """Tell the others of a generation, start who is admitted instead, and go on."""
        if departures & set(self._current):
            actions = [*actions, *self._tell_lost()]
        if self._finishing:
            if departures & set(self._current):
                self._outcome = self._outcome or self._failed("a rank was lost after others had finished", now_s)
        else:
            actions = [*actions, *self._follow(self._members.handle(event, now_s), now_s)]
        return [*actions, *self._form(now_s), *self._end_if_over()]  # type: ignore[list-item]

    def _tell_lost(self) -> list[ElasticAction]:
        others = tuple(worker for worker in self._current if worker in self._running and worker not in self._ready)
        return [TellLost(self._generation, others)] if others else []

    # ---- what the membership decides ----
    def _follow(self, decisions: Sequence[membership.Decision], now_s: float) -> list[ElasticAction]:
        actions: list[ElasticAction] = []
        for decision in decisions:
            match decision:
                case membership.Admit(worker, host):
                    actions += self._admit(worker, host, now_s)
                case membership.Retire(worker):
                    actions += self._retire(worker, now_s)
                case membership.Wait(host, seconds, failures):
                    times = "once" if failures == 1 else f"{failures} times in a row"
                    actions.append(Say(f"{host} has failed {times}: it is not used for {seconds:g} s"))
                case membership.LeaveOut(host, seconds, failures):
                    until = "from now on" if seconds is None else f"for {seconds:g} s"
                    actions.append(Say(f"{host} has failed {failures} times in a row: it is left out {until}"))
                case membership.TooFew(size, least, hopeless):
                    self._few_since_s = now_s if self._few_since_s is None else self._few_since_s
                    if hopeless:
                        return actions + self._give_up("every host is left out", now_s)
                    actions.append(Say(f"{size} workers are fewer than --min-np {least}: waiting for hosts"))
                case membership.Enough():
                    self._few_since_s = None
        if len(self._members.members) >= self._limits.min_size:
            self._few_since_s = None
        return actions

    def _admit(self, worker: int, host: str, now_s: float) -> list[ElasticAction]:
        self._hosts[worker] = host
        if host in self._open:
            self._running.add(worker)
            return [StartProcesses((worker,))]
        self._unstarted.add(worker)
        if host in self._opening:
            return []
        self._opening[host] = now_s + self._start_timeout_s
        return [OpenNode(host)]

    def _retire(self, worker: int, now_s: float) -> list[ElasticAction]:
        if worker in self._unstarted:
            self._unstarted.discard(worker)
            return self._follow(self._members.handle(membership.MemberLeft(worker), now_s), now_s)
        self._leaving.add(worker)
        if worker in self._ready:
            return self._dismiss({worker})
        return self._tell_changed() if worker in self._current else []

    def _tell_changed(self) -> list[ElasticAction]:
        self._told_changed = True
        return [TellChanged(tuple(worker for worker in self._current if worker in self._running))]

    # ---- generations ----
    def _form(self, now_s: float) -> list[ElasticAction]:
        """Form the next generation, once all survivors have asked for it; tell them where others wait for them."""
        if self._phase != "running" or not self._ready:
            return []
        if self._waiting_since_s is None and (self._generation < 0 or self._ready.keys() & set(self._current)):
            self._waiting_since_s = now_s
        survivors = [worker for worker in self._current if worker in self._running]
        newcomers = self._ready.keys() - set(self._current)
        if any(worker not in self._ready for worker in survivors):
            tell = newcomers and not self._told_changed and not self._ready.keys() & set(self._current)
            return self._tell_changed() if tell and not self._finishing else []
        if self._generation >= 0 and (not survivors or max(self._ready.values()) < self._commits):
            return self._give_up("all ranks that had the state are lost: start from a checkpoint", now_s)
        if not self._finishing and not self._is_enough(now_s):
            return []
        if self._reset_limit is not None and self._generation >= self._reset_limit:
            return self._give_up(f"a rank was lost after --reset-limit {self._reset_limit} generations", now_s)
        return [self._next_generation()]

    def _is_enough(self, now_s: float) -> bool:
        if len(self._ready) < self._limits.min_size:
            return False
        # Survivors wait for nobody; the first generation does, for all that were started, within the timeout.
        all_came = len(self._ready) == len(self._members.members)
        return self._generation >= 0 or all_came or now_s >= self._started_s + self._start_timeout_s

    def _next_generation(self) -> FormGeneration:
        """Ranks host by host, the host of the oldest worker first, on each the oldest first."""
        by_host: dict[str, list[int]] = {}
        for worker in sorted(self._ready):
            by_host.setdefault(self._hosts[worker], []).append(worker)
        workers = tuple(worker for group in by_host.values() for worker in group)
        hosts = [Host(name=name, slots=len(group), user=self._found[name].user) for name, group in by_host.items()]
        self._generation += 1
        self._commits = max(self._commits, *self._ready.values())
        self._current = workers
        self._ready.clear()
        self._waiting_since_s = None
        self._told_changed = False
        return FormGeneration(self._generation, workers, place_ranks(hosts, len(workers)))

    # ---- deadlines and the end ----
    def _on_tick(self, now_s: float) -> list[Action]:
        if self._phase != "running":
            return super()._on_tick(now_s)
        late = [host for host, deadline_s in self._opening.items() if now_s >= deadline_s]
        actions: list[ElasticAction] = []
        for host in late:
            actions += self.handle(NodeLost(host, f"no answer within {self._start_timeout_s:g} s"), now_s)
        if self._phase == "running" and not self._finishing:
            actions += self._follow(self._members.handle(TimePassed(), now_s), now_s)
        if self._few_since_s is not None and now_s >= self._few_since_s + self._elastic_timeout_s:
            actions += self._give_up(
                f"fewer than --min-np {self._limits.min_size} workers for {self._elastic_timeout_s:g} s", now_s
            )
        if self._waiting_since_s is not None and now_s >= self._waiting_since_s + self._elastic_timeout_s:
            actions += self._end_waiting(now_s)
        return [*actions, *self._form(now_s)]  # type: ignore[list-item]

    def _end_waiting(self, now_s: float) -> list[ElasticAction]:
        """Workers have waited for too long: for some that do not leave their generation, or for new ones."""
        waited = f"{self._elastic_timeout_s:g} s"
        late = [worker for worker in self._current if worker in self._running and worker not in self._ready]
        if not late:
            return self._give_up(f"no --min-np {self._limits.min_size} workers came within {waited}", now_s)
        self._waiting_since_s = now_s
        return self._on_hung(late, f"has not come to the next generation, for which others have waited {waited}")

    def _set_deadline(self) -> None:
        times = [*self._opening.values()]
        if not self._finishing and (wait_s := self._members.deadline_s) is not None:
            times.append(wait_s)
        if self._few_since_s is not None and not self._finishing:
            times.append(self._few_since_s + self._elastic_timeout_s)
        if self._waiting_since_s is not None:
            times.append(self._waiting_since_s + self._elastic_timeout_s)
        if self._generation < 0 and len(self._ready) >= self._limits.min_size:
            times.append(self._started_s + self._start_timeout_s)
        self.deadline_s = min(times, default=None)

    def _give_up(self, reason: str, now_s: float) -> list[ElasticAction]:
        """The job cannot go on: end who still runs."""
        if self._phase != "running":
            return []
        self._outcome = self._outcome or self._failed(reason, now_s)
        return list(self._end(signal.SIGTERM, 1.0, now_s))

    def _failed(self, reason: str, now_s: float) -> Finish:
        code = shell_exit_code(self._failure.code) if isinstance(self._failure, ProcessEnded) else 1
        return Finish(
            exit_code=code or 1, failure=self._failure, after_s=now_s - self._started_s,
            ended_others=len(self._running), reason=reason,
        )  # fmt: skip

    def _end(self, number: int, grace_s: float, now_s: float) -> list[Action]:
        self._unstarted.clear()
        return super()._end(number, grace_s, now_s) if self._running else self._finish()

    def _end_if_over(self) -> list[Action]:
        """Finish once the training is over and nobody runs any more."""
        if self._phase == "running" and self._finishing and not self._running:
            return self._finish()
        return []
