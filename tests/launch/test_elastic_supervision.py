"""The decisions of an elastic job: by cases, and by random worlds in which workers fail, hang, leave and come."""

from __future__ import annotations

import random
from signal import SIGKILL, SIGTERM

import pytest

from shardwright.launch.elastic_supervision import (
    CloseNode,
    Dismiss,
    ElasticAction,
    ElasticEvent,
    ElasticSupervisor,
    FormGeneration,
    HostsDiscovered,
    OpenNode,
    RanksStalled,
    Say,
    TellChanged,
    TellLost,
    WorkerReady,
    WorkerSilent,
)
from shardwright.launch.hosts import Host
from shardwright.launch.supervision import (
    Finish,
    NodeLost,
    NodeReady,
    ProcessEnded,
    SendSignal,
    SignalReceived,
    StartProcesses,
)
from shardwright.membership import Limits, TimePassed


def hosts(**slots: int) -> HostsDiscovered:
    return HostsDiscovered(tuple(Host(name=name, slots=count) for name, count in slots.items()))


class Job:
    """A supervisor, what it did apart from lines for the user, and the clock."""

    def __init__(self, limits: Limits | None = None, **options: float | int) -> None:
        times = {"start_timeout_s": 30.0, "elastic_timeout_s": 100.0, "grace_s": 10.0, **options}
        self.supervisor = ElasticSupervisor(limits or Limits(min_size=2, max_size=3), **times)
        self.said: list[str] = []

    def send(self, *events: ElasticEvent, at_s: float = 1.0) -> list[ElasticAction]:
        actions = [action for event in events for action in self.supervisor.handle(event, at_s)]
        self.said += [action.text for action in actions if isinstance(action, Say)]
        return [action for action in actions if not isinstance(action, Say)]

    def start(self, **slots: int) -> None:
        """A first generation of all slots."""
        self.send(hosts(**slots), *(NodeReady(name) for name in slots))
        workers = sorted(self.supervisor.running)
        (formed,) = self.send(*(WorkerReady(worker) for worker in workers))
        assert isinstance(formed, FormGeneration)
        assert formed.workers == tuple(workers)


def formed(actions: list[ElasticAction]) -> tuple[int, tuple[int, ...]]:
    (action,) = [action for action in actions if isinstance(action, FormGeneration)]
    assert [place.rank for place in action.places] == list(range(len(action.workers)))
    return action.generation, action.workers


def test_the_first_generation_waits_for_all_that_were_started() -> None:
    job = Job()
    assert job.send(hosts(a=3)) == [OpenNode("a")]
    assert job.send(NodeReady("a")) == [StartProcesses((0, 1, 2))]
    assert job.send(WorkerReady(0), WorkerReady(2)) == []
    assert formed(job.send(WorkerReady(1))) == (0, (0, 1, 2))


def test_the_first_generation_does_not_wait_longer_than_the_start_timeout() -> None:
    job = Job()
    job.send(hosts(a=3), NodeReady("a"), WorkerReady(0), WorkerReady(2))
    assert job.supervisor.deadline_s == 30.0
    assert formed(job.send(TimePassed(), at_s=30.0)) == (0, (0, 2))


def test_survivors_form_the_next_generation_without_a_replacement() -> None:
    job = Job()
    job.start(a=3)
    assert job.send(ProcessEnded(1, -9)) == [TellLost(0, (0, 2))]
    assert job.send(WorkerReady(0, lost=True, commits=4)) == [TellLost(0, (2,))]
    assert formed(job.send(WorkerReady(2, lost=True, commits=4))) == (1, (0, 2))
    assert job.said[0] == "rank 1 of generation 0 on a ended with SIGKILL"
    assert job.send(TimePassed(), at_s=2.0) == [StartProcesses((3,))]  # once the host has waited
    assert job.send(WorkerReady(3)) == [TellChanged((0, 2))]
    assert job.send(WorkerReady(0, commits=6)) == []
    assert formed(job.send(WorkerReady(2, commits=6))) == (2, (0, 2, 3))


def test_fewer_than_the_least_wait_for_a_replacement() -> None:
    job = Job(Limits(min_size=3, max_size=3))
    job.start(a=3)
    job.send(ProcessEnded(1, 1))
    assert job.send(WorkerReady(0, lost=True), WorkerReady(2, lost=True))[1:] == []
    assert job.said[-1] == "2 workers are fewer than --min-np 3: waiting for hosts"
    assert job.send(TimePassed(), at_s=2.0) == [StartProcesses((3,))]
    assert formed(job.send(WorkerReady(3))) == (1, (0, 2, 3))


def test_too_few_for_too_long_ends_the_job_with_the_failure() -> None:
    job = Job(Limits(min_size=3, max_size=3, first_wait_s=1000, longest_wait_s=1000))
    job.start(a=3)
    job.send(ProcessEnded(1, 7), WorkerReady(0, lost=True), WorkerReady(2, lost=True))
    assert job.supervisor.deadline_s == 101.0
    assert job.send(TimePassed(), at_s=101.0) == [SendSignal(SIGTERM, (0, 2))]
    (finish,) = job.send(ProcessEnded(0, -15), ProcessEnded(2, -15), at_s=102.0)
    assert isinstance(finish, Finish)
    assert (finish.exit_code, finish.reason) == (7, "fewer than --min-np 3 workers for 100 s")


def test_a_hung_worker_is_ended_and_a_stalled_rank_too() -> None:
    job = Job(Limits(min_size=1, max_size=3))
    job.start(a=3)
    assert job.send(WorkerSilent(1, 61.0)) == [SendSignal(SIGKILL, (1,))]
    assert job.send(RanksStalled(0, (2,), "allreduce sum", 70.0)) == [SendSignal(SIGKILL, (2,))]
    assert job.send(RanksStalled(7, (0,), "of another generation", 70.0)) == []
    assert job.said == [
        "rank 1 of generation 0 on a has not been heard for 61 s: it is ended",
        "rank 2 of generation 0 on a has not called allreduce sum, which others wait in for 70 s: it is ended",
    ]


def test_who_does_not_leave_a_broken_generation_is_ended_in_the_end() -> None:
    job = Job(Limits(min_size=1, max_size=3))
    job.start(a=3)
    job.send(ProcessEnded(1, -9), WorkerReady(0, lost=True))
    assert [action for action in job.send(TimePassed(), at_s=101.0) if isinstance(action, SendSignal)] == [
        SendSignal(SIGKILL, (2,))
    ]
    assert formed(job.send(ProcessEnded(2, -9), at_s=101.1)) == (1, (0,))


def test_new_workers_that_never_come_are_not_waited_for_without_end() -> None:
    job = Job(Limits(min_size=3, max_size=3))
    job.start(a=3)
    job.send(ProcessEnded(1, 7), WorkerReady(0, lost=True), WorkerReady(2, lost=True))
    assert job.send(TimePassed(), at_s=2.0) == [StartProcesses((3,))]
    assert job.send(TimePassed(), at_s=101.0) == [SendSignal(SIGTERM, (0, 2, 3))]


def test_a_lost_host_is_let_go_and_its_ranks_with_it() -> None:
    job = Job(Limits(min_size=1))
    job.start(a=1, b=2)
    assert job.send(NodeLost("b", "ssh ended")) == [CloseNode("b"), TellLost(0, (0,))]
    assert formed(job.send(WorkerReady(0, lost=True))) == (1, (0,))
    assert job.send(TimePassed(), at_s=2.0) == [OpenNode("b")]


def test_ranks_of_a_host_that_is_gone_leave_at_a_commit() -> None:
    job = Job(Limits(min_size=1))
    job.start(a=1, b=1)
    assert job.send(hosts(a=1)) == [TellChanged((0, 1))]
    assert job.send(WorkerReady(0, commits=3)) == []
    assert job.send(WorkerReady(1, commits=3)) == [Dismiss((1,))]
    assert formed(job.send(ProcessEnded(1, 0))) == (1, (0,))


def test_state_that_nobody_has_any_more_ends_the_job() -> None:
    job = Job(Limits(min_size=1, max_size=2))
    job.start(a=2)
    job.send(ProcessEnded(1, -9), WorkerReady(0, lost=True, commits=5))
    job.send(TimePassed(), at_s=2.0)
    job.send(WorkerReady(2), WorkerReady(0, commits=9), at_s=3.0)  # generation 2: the old one and a new one
    job.send(ProcessEnded(0, -9), at_s=3.1)  # before the new one has the state
    assert job.send(WorkerReady(2, lost=True, commits=0), at_s=3.2) == [SendSignal(SIGTERM, (2,))]


def test_once_one_has_finished_nobody_is_started_and_the_others_may_finish() -> None:
    job = Job(Limits(min_size=2, max_size=3))
    job.start(a=3)
    assert job.send(ProcessEnded(0, 0)) == []
    assert job.send(WorkerReady(1, lost=True, commits=9), ProcessEnded(2, 0))[0] == TellLost(0, (2,))
    assert job.supervisor.generation == 1
    (finish,) = job.send(ProcessEnded(1, 0))
    assert finish == Finish(exit_code=0)


def test_who_comes_after_the_end_is_no_failure() -> None:
    job = Job(Limits(min_size=1, max_size=3))
    job.start(a=2)
    job.send(hosts(a=3))
    assert job.send(ProcessEnded(0, 0)) == [SendSignal(SIGKILL, (2,))]
    assert job.send(ProcessEnded(1, 0), ProcessEnded(2, -9)) == [Finish(exit_code=0)]


def test_a_signal_ends_all_and_starts_nobody() -> None:
    job = Job()
    job.start(a=3)
    assert job.send(SignalReceived(2)) == [SendSignal(2, (0, 1, 2))]
    assert job.send(hosts(a=3, b=3), ProcessEnded(0, -2), ProcessEnded(1, -2)) == []
    assert job.send(ProcessEnded(2, -2)) == [Finish(exit_code=130)]


def test_the_reset_limit_ends_the_job() -> None:
    job = Job(Limits(min_size=1, max_size=2), reset_limit=0)
    job.start(a=2)
    job.send(ProcessEnded(1, 1))
    assert job.send(WorkerReady(0, lost=True)) == [SendSignal(SIGTERM, (0,))]


class World:
    """Workers that take time to come, fail, hang, leave and finish; hosts that come and go. Followed apart."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.least = self.random.randint(1, 3)
        self.most = self.least + self.random.randint(0, 2)
        self.supervisor = ElasticSupervisor(
            Limits(min_size=self.least, max_size=self.most, max_failures=20, longest_wait_s=4.0),
            start_timeout_s=10.0,
            elastic_timeout_s=200.0,
            grace_s=5.0,
        )
        self.now_s = 0.0
        self.slots: dict[str, int] = {}
        self.alive: dict[int, str] = {}  # starting, waiting, training or leaving
        self.commits: dict[int, int] = {}
        self.lost: set[int] = set()
        self.told: set[int] = set()
        self.current: tuple[int, ...] = ()
        self.generation = -1
        self.finished = False

    def send(self, event: ElasticEvent) -> Finish | None:
        for action in self.supervisor.handle(event, self.now_s):
            if (finish := self.follow(action)) is not None:
                return finish
        return None

    def follow(self, action: ElasticAction) -> Finish | None:
        match action:
            case OpenNode(host):
                return self.send(NodeReady(host))
            case StartProcesses(workers):
                assert not self.finished, "a worker is started after the training was over"
                self.alive.update(dict.fromkeys(workers, "starting"))
                self.commits.update(dict.fromkeys(workers, 0))
                assert len(self.alive) <= self.most
            case FormGeneration(generation, workers, _):
                assert generation == self.generation + 1
                assert all(self.alive.get(worker) == "waiting" for worker in workers), "who has not asked is counted in"
                assert not any(self.alive.get(worker) == "training" for worker in self.current)
                assert self.finished or self.least <= len(workers) <= self.most
                self.generation, self.current = generation, workers
                newest = max(self.commits[worker] for worker in workers)
                self.commits.update(dict.fromkeys(workers, newest))
                self.alive.update(dict.fromkeys(workers, "training"))
                self.lost.clear()
                self.told.clear()
            case TellLost(generation, workers):
                assert generation == self.generation
                self.lost.update(workers)
            case TellChanged(workers):
                self.told.update(workers)
            case Dismiss(workers):
                self.alive.update(dict.fromkeys(workers, "leaving"))
            case SendSignal(_, workers):
                for worker in workers:
                    if worker in self.alive and (finish := self.end(worker, -9)) is not None:
                        return finish
            case Finish():
                return action
        return None

    def end(self, worker: int, code: int) -> Finish | None:
        if code == 0 and self.alive[worker] == "training":
            self.finished = True
        del self.alive[worker]
        return self.send(ProcessEnded(worker, code))

    def step(self) -> Finish | None:
        """One thing that may happen."""
        self.now_s += self.random.choice([0.1, 0.5, 2.0])
        kind = self.random.random()
        if kind < 0.05:
            names = [name for name in "abc" if self.random.random() < 0.7] or ["a"]
            return self.send(hosts(**{name: self.random.randint(1, 3) for name in names}))
        if kind < 0.12 and len([w for w in self.current if self.alive.get(w) == "training"]) > 1:
            worker = self.random.choice([w for w in self.current if self.alive.get(w) == "training"])
            return self.end(worker, self.random.choice([-9, 1]))
        if kind < 0.15 and self.alive:
            worker = self.random.choice(sorted(self.alive))
            if self.alive[worker] == "starting":
                return self.end(worker, 1)
        if kind < 0.6 and self.alive:
            return self.progress(self.random.choice(sorted(self.alive)))
        return self.send(TimePassed())

    def progress(self, worker: int) -> Finish | None:
        match self.alive[worker]:
            case "starting":
                self.alive[worker] = "waiting"
                return self.send(WorkerReady(worker))
            case "leaving":
                return self.end(worker, 0)
            case "training" if worker in self.lost or worker in self.told:
                self.alive[worker] = "waiting"
                return self.send(WorkerReady(worker, lost=worker in self.lost, commits=self.commits[worker]))
            case "training":
                if not self.told and not self.lost:
                    for other in self.current:
                        self.commits[other] += 1
        return None

    def calm(self) -> Finish | None:
        """Nothing fails any more: everybody comes, then one after the other finishes."""
        for _ in range(4000):
            self.now_s += 0.5
            for worker in sorted(self.alive):
                if worker in self.alive and (finish := self.progress(worker)) is not None:
                    return finish
            if (finish := self.send(TimePassed())) is not None:
                return finish
            training = [worker for worker in self.current if self.alive.get(worker) == "training"]
            if self.generation >= 0 and training and not self.lost and not self.told:
                return self.finish_all()
        raise AssertionError("nobody trains")

    def finish_all(self) -> Finish | None:
        for _ in range(1000):
            for worker in sorted(self.alive):
                if worker not in self.alive:
                    continue
                finish = self.end(worker, 0) if self.alive[worker] == "training" else self.progress(worker)
                if finish is not None:
                    return finish
            self.now_s += 1.0
        raise AssertionError("the job does not end")


@pytest.mark.parametrize("start", range(0, 300, 100))
def test_random_worlds_keep_training_and_end(start: int) -> None:
    for seed in range(start, start + 100):
        world = World(seed)
        finish = world.send(hosts(a=3, b=2))
        for _ in range(120):
            if finish is not None:
                break
            finish = world.step()
        if finish is None:
            finish = world.calm()
        assert finish is not None
        if finish.exit_code:
            assert finish.reason, seed
        else:
            assert not world.alive, seed
        assert world.supervisor.handle(TimePassed(), world.now_s + 1e6) == []
