"""Whatever hosts, processes and users do, in whatever order: a job ends, in time, with the right code."""

from __future__ import annotations

import heapq
import itertools
import random
import signal

import pytest

from shardwright.launch.supervision import (
    Event,
    Finish,
    NodeLost,
    NodeReady,
    ProcessEnded,
    SendSignal,
    SignalReceived,
    StartProcesses,
    Supervisor,
    shell_exit_code,
)
from shardwright.launch.tuning import FAILURE_GRACE_S, KILL_GRACE_S
from shardwright.membership import TimePassed

START_TIMEOUT_S, GRACE_S = 30.0, 10.0
LATEST_END_S = 60.0


class World:
    """Hosts that answer, hang or break; processes that end, fail, obey signals or not; a user with Ctrl-C."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        hosts = [f"host{index}" for index in range(self.random.randint(1, 3))]
        self.placement = {number: self.random.choice(hosts) for number in range(self.random.randint(1, 6))}
        self.supervisor = Supervisor(
            self.placement, start_timeout_s=START_TIMEOUT_S, grace_s=GRACE_S, fail_fast=self.random.random() < 0.8
        )
        self.queue: list[tuple[float, int, Event]] = []
        self.order = itertools.count()
        self.now_s = 0.0
        self.alive: set[int] = set()
        self.starts = 0
        self.first_bad: int | None = None
        for host in set(self.placement.values()):
            self._plan_host(host)
        if self.random.random() < 0.3:
            for _ in range(self.random.randint(1, 3)):
                number = self.random.choice([signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGPIPE])
                self.after(self.random.uniform(0, LATEST_END_S), SignalReceived(number))

    def after(self, wait_s: float, event: Event) -> None:
        heapq.heappush(self.queue, (self.now_s + wait_s, next(self.order), event))

    def _plan_host(self, host: str) -> None:
        kind = self.random.random()
        if kind > 0.1:
            self.after(self.random.uniform(0, 5), NodeReady(host))
        if kind < 0.05 or kind > 0.95:
            self.after(self.random.uniform(0, LATEST_END_S), NodeLost(host, "gone"))

    def run(self) -> Finish:
        while True:
            event = self._next_event()
            self._note(event)
            for action in self.supervisor.handle(event, self.now_s):
                match action:
                    case StartProcesses(numbers):
                        self.starts += 1
                        self.alive |= set(numbers)
                        for number in numbers:
                            code = self.random.choice([0, 0, 0, 0, 3, -11])
                            self.after(self.random.uniform(0, LATEST_END_S), ProcessEnded(number, code))
                    case SendSignal(sent, numbers):
                        self._deliver(sent, numbers)
                    case Finish():
                        return action

    def _next_event(self) -> Event:
        deadline_s = self.supervisor.deadline_s
        while self.queue and (deadline_s is None or self.queue[0][0] < deadline_s):
            self.now_s, _, event = heapq.heappop(self.queue)
            if not isinstance(event, ProcessEnded) or event.number in self.alive:
                return event
        assert deadline_s is not None, "nothing will ever happen"
        self.now_s = max(self.now_s, deadline_s)
        return TimePassed()

    def _note(self, event: Event) -> None:
        """Follow the world, and keep what should decide the exit code."""
        code = 0
        match event:
            case ProcessEnded(number, ended):
                self.alive.discard(number)
                code = shell_exit_code(ended)
            case NodeLost(host, _):
                lost = {number for number in self.placement if self.placement[number] == host}
                code = 1 if not self.starts or lost & self.alive else 0
                self.alive -= lost
            case SignalReceived(number) if number != signal.SIGUSR1:
                code = 128 + number
            case TimePassed() if not self.starts:
                code = 1
        if self.first_bad is None and code:
            self.first_bad = code

    def _deliver(self, sent: int, numbers: tuple[int, ...]) -> None:
        for number in numbers:
            obeys = sent == signal.SIGKILL or (sent != signal.SIGUSR1 and self.random.random() < 0.6)
            if obeys and (sent != signal.SIGKILL or self.random.random() < 0.95):
                self.after(self.random.uniform(0, 1.5), ProcessEnded(number, -sent))


@pytest.mark.parametrize("start", range(0, 3000, 500))
def test_every_job_ends_in_time_with_the_first_bad_code(start: int) -> None:
    for seed in range(start, start + 500):
        world = World(seed)
        outcome = world.run()
        assert outcome.exit_code == (world.first_bad or 0), seed
        assert world.starts <= 1, seed
        latest_s = max(START_TIMEOUT_S, LATEST_END_S + max(GRACE_S, FAILURE_GRACE_S) + KILL_GRACE_S) + START_TIMEOUT_S
        assert world.now_s <= latest_s, seed
        if world.starts and outcome.exit_code == 0:
            assert not world.alive, seed
        assert world.supervisor.deadline_s is None, seed
        assert world.supervisor.handle(TimePassed(), world.now_s + 1e6) == [], seed
