"""The launcher's decisions about servers: task 0 on host a, 1 and 2 on host b; start timeout 30 s, grace 10 s."""

from __future__ import annotations

import os
import random
from signal import SIGINT, SIGKILL, SIGTERM

import pytest

from shardwright.launch.server_supervision import ServerSupervisor
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
)
from shardwright.launch.tuning import LAST_PAUSE_S
from shardwright.membership import TimePassed

HOSTS = {0: "a", 1: "b", 2: "b"}
KILLED = -SIGKILL


class Servers:
    """A supervisor, the clock, and what users were told."""

    def __init__(self, *, may_shrink: bool = False) -> None:
        self.supervisor = ServerSupervisor(HOSTS, may_shrink=may_shrink, start_timeout_s=30.0, grace_s=10.0)
        self.said: list[str] = []

    def send(self, event: Event, at_s: float = 0.0) -> list[Action]:
        actions = self.supervisor.handle(event, at_s)
        self.said += [action.text for action in actions if isinstance(action, Say)]
        return [action for action in actions if not isinstance(action, Say)]


def running(*, may_shrink: bool = False) -> Servers:
    servers = Servers(may_shrink=may_shrink)
    assert servers.send(NodeReady("a")) == []
    assert servers.send(NodeReady("b")) == [StartProcesses((0, 1, 2))]
    return servers


@pytest.mark.parametrize("task", [0, 2])
@pytest.mark.parametrize("code", [KILLED, os.EX_TEMPFAIL])
def test_a_lost_server_is_started_again_after_a_pause(task: int, code: int) -> None:
    servers = running()
    assert servers.send(ProcessEnded(task, code), 5.0) == []
    assert servers.supervisor.deadline_s == 6.0
    assert servers.send(TimePassed(), 5.9) == []
    assert servers.send(TimePassed(), 6.0) == [StartProcesses((task,))]
    how = "SIGKILL" if code < 0 else "exit code 75"
    assert servers.said == [f"task {task} on {HOSTS[task]} ended with {how}; it is started again in 1 s"]


def test_pauses_grow_until_a_server_has_run_for_a_while() -> None:
    servers, now_s = running(), 0.0
    for pause_s in (1.0, 2.0, 4.0, 8.0, 16.0, LAST_PAUSE_S, LAST_PAUSE_S):
        servers.send(ProcessEnded(1, KILLED), now_s)
        assert servers.supervisor.deadline_s == now_s + pause_s
        now_s += pause_s
        assert servers.send(TimePassed(), now_s) == [StartProcesses((1,))]
    servers.send(ProcessEnded(1, KILLED), now_s + 90.0)
    assert servers.supervisor.deadline_s == now_s + 91.0


@pytest.mark.parametrize("code", [1, 2])
def test_a_server_that_a_person_must_mend_ends_the_others(code: int) -> None:
    servers, failure = running(), ProcessEnded(1, code)
    assert servers.send(failure, 5.0) == [SendSignal(SIGTERM, (0, 2))]
    assert servers.send(ProcessEnded(0, 0), 5.5) == []
    assert servers.send(ProcessEnded(2, 0), 5.5) == [
        Finish(exit_code=code, failure=failure, after_s=5.0, ended_others=2)
    ]


def test_a_cluster_that_may_shrink_goes_on_without_it() -> None:
    servers = running(may_shrink=True)
    assert servers.send(ProcessEnded(1, 1), 5.0) == []
    assert servers.said == ["task 1 on b ended with exit code 1: it is not started again"]
    assert servers.supervisor.deadline_s is None
    assert servers.send(ProcessEnded(0, 1), 6.0) == [SendSignal(SIGTERM, (2,))]  # the master's counts


def test_a_lost_host_is_reached_again_and_its_servers_started() -> None:
    servers = running()
    assert servers.send(NodeLost("b", "ssh ended"), 5.0) == [CloseNode("b")]
    assert servers.send(TimePassed(), 6.0) == [OpenNode("b")]
    assert servers.send(TimePassed(), 7.0) == []
    assert servers.send(TimePassed(), 36.0) == [CloseNode("b")]  # no answer
    assert servers.send(TimePassed(), 38.0) == [OpenNode("b")]
    assert servers.send(NodeReady("b"), 39.0) == [StartProcesses((1, 2))]
    assert servers.said == [
        "b is lost: ssh ended; it is started again in 1 s",
        "b is lost: no answer within 30 s; it is started again in 2 s",
    ]


def test_a_host_that_does_not_answer_at_first() -> None:
    failure = NodeLost("b", "no route")
    assert Servers().send(failure, 1.0) == [Finish(exit_code=1, failure=failure, after_s=1.0)]
    servers = Servers(may_shrink=True)
    assert servers.send(failure, 1.0) == [CloseNode("b")]
    assert servers.send(NodeReady("a"), 1.5) == [StartProcesses((0,))]
    assert servers.send(TimePassed(), 2.0) == [OpenNode("b")]
    assert servers.send(NodeReady("b"), 3.0) == [StartProcesses((1, 2))]


def test_nothing_is_started_after_the_master_has_ended_as_asked() -> None:
    servers = running()
    servers.send(ProcessEnded(1, KILLED), 5.0)
    assert servers.send(ProcessEnded(0, 0), 5.2) == []
    assert servers.send(TimePassed(), 9.0) == []
    assert servers.send(ProcessEnded(2, os.EX_TEMPFAIL), 9.0) == [Finish(exit_code=0)]


def test_a_server_that_left_as_asked_stays_away() -> None:
    servers = running()
    assert servers.send(ProcessEnded(2, 0), 5.0) == []
    assert servers.send(TimePassed(), 60.0) == []
    assert servers.send(SignalReceived(SIGINT), 61.0) == [SendSignal(SIGINT, (0, 1))]


def test_a_signal_while_all_wait_ends_the_job() -> None:
    servers = running()
    for task in HOSTS:
        servers.send(ProcessEnded(task, KILLED), 5.0)
    assert servers.send(SignalReceived(SIGTERM), 5.1) == [Finish(exit_code=143)]


@pytest.mark.parametrize("seed", range(200))
def test_whatever_happens_a_signal_ends_it_and_nothing_runs_twice(seed: int) -> None:
    """Servers end with any code, hosts go and come; then the user ends it all."""
    chance, servers = random.Random(seed), Servers(may_shrink=bool(seed % 2))
    alive: set[int] = set()
    reached, now_s = {"a", "b"}, 0.0
    finished: Finish | None = None

    def follow(actions: list[Action]) -> None:
        nonlocal finished
        for action in actions:
            assert finished is None
            match action:
                case StartProcesses(numbers):
                    assert not alive & set(numbers)
                    assert {HOSTS[number] for number in numbers} <= reached
                    alive.update(numbers)
                case OpenNode(host):
                    assert host not in reached
                    reached.add(host)
                    if chance.random() < 0.7:
                        follow(servers.send(NodeReady(host), now_s))
                case CloseNode(host):
                    reached.discard(host)
                case Finish():
                    finished = action

    follow(servers.send(NodeReady("a")))
    follow(servers.send(NodeReady("b")))
    for _ in range(60):
        now_s += chance.expovariate(0.5)
        kind = chance.random()
        if finished is not None:
            break
        if kind < 0.35 and alive:
            task = chance.choice(sorted(alive))
            alive.discard(task)
            code = chance.choice([KILLED, os.EX_TEMPFAIL, KILLED, 1 if task and seed % 2 else KILLED])
            follow(servers.send(ProcessEnded(task, code), now_s))
        elif kind < 0.5 and "b" in reached:
            reached.discard("b")
            alive -= {1, 2}
            follow(servers.send(NodeLost("b", "gone"), now_s))
        else:
            follow(servers.send(TimePassed(), now_s))
    assert finished is None
    follow(servers.send(SignalReceived(SIGTERM), now_s))
    for task in sorted(alive):
        follow(servers.send(ProcessEnded(task, 0), now_s + 1.0))
    assert finished == Finish(exit_code=143)
