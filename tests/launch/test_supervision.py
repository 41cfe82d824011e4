"""The launcher's decisions, event by event: four ranks on two hosts, start timeout 30 s, grace 10 s."""

from __future__ import annotations

from signal import SIGINT, SIGKILL, SIGPIPE, SIGTERM, SIGUSR1

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
)
from shardwright.membership import TimePassed


def ended(at_s: float, number: int, code: int) -> tuple[float, ProcessEnded]:
    return at_s, ProcessEnded(number, code)


def term(*numbers: int) -> SendSignal:
    return SendSignal(SIGTERM, numbers)


def kill(*numbers: int) -> SendSignal:
    return SendSignal(SIGKILL, numbers)


def lost(exit_code: int, failure: ProcessEnded | NodeLost, after_s: float, others: int = 0) -> Finish:
    return Finish(exit_code=exit_code, failure=failure, after_s=after_s, ended_others=others)


HOSTS = {0: "a", 1: "a", 2: "b", 3: "b"}
READY = [(0.0, NodeReady("a")), (1.0, NodeReady("b"))]
START = StartProcesses((0, 1, 2, 3))

CASES: dict[str, tuple[list[tuple[float, Event]], list[object]]] = {
    "all well": (
        [*READY, *(ended(5.0, number, 0) for number in (2, 0, 3, 1))],
        [START, Finish(exit_code=0)],
    ),
    "nothing starts before every host answers": ([(0.0, NodeReady("a"))], []),
    "the first failure ends the others, with its code": (
        [*READY, ended(5.0, 1, 3), ended(5.1, 0, -15), ended(5.1, 2, 1), ended(5.2, 3, 0)],
        [START, term(0, 2, 3), lost(3, ProcessEnded(1, 3), 5.0, 3)],
    ),
    "a signal's end is 128 + n": (
        [*READY, ended(5.0, 0, -9), *(ended(5.1, number, -15) for number in (1, 2, 3))],
        [START, term(1, 2, 3), lost(137, ProcessEnded(0, -9), 5.0, 3)],
    ),
    "after a failure who does not end is killed in a second": (
        [
            *READY,
            ended(5.0, 0, 2),
            ended(5.5, 1, -15),
            (5.9, TimePassed()),
            (6.0, TimePassed()),
            ended(6.1, 2, -9),
            ended(6.1, 3, -9),
        ],
        [START, term(1, 2, 3), kill(2, 3), lost(2, ProcessEnded(0, 2), 5.0, 3)],
    ),
    "who does not even report its kill is not waited for": (
        [*READY, ended(5.0, 0, 2), (6.0, TimePassed()), (8.0, TimePassed())],
        [START, term(1, 2, 3), kill(1, 2, 3), lost(2, ProcessEnded(0, 2), 5.0, 3)],
    ),
    "a failure after others ended well": (
        [*READY, *(ended(4.0, number, 0) for number in (0, 1, 2)), ended(5.0, 3, 7)],
        [START, lost(7, ProcessEnded(3, 7), 5.0)],
    ),
    "a lost host ends the others": (
        [*READY, (5.0, NodeLost("b", "gone")), ended(5.1, 0, -15), ended(5.1, 1, -15)],
        [START, term(0, 1), lost(1, NodeLost("b", "gone"), 5.0, 2)],
    ),
    "a host that is lost after its ranks ended is no loss": (
        [*READY, ended(4.0, 2, 0), ended(4.0, 3, 0), (5.0, NodeLost("b", "gone"))],
        [START],
    ),
    "a host that cannot be reached starts nothing": (
        [(0.5, NodeReady("a")), (1.0, NodeLost("b", "refused"))],
        [lost(1, NodeLost("b", "refused"), 1.0)],
    ),
    "a host that does not answer in time": (
        [(0.5, NodeReady("a")), (29.9, TimePassed()), (30.0, TimePassed())],
        [lost(1, NodeLost("b", "no answer within 30 s"), 30.0)],
    ),
    "a signal is handed on": (
        [*READY, (5.0, SignalReceived(SIGINT)), *(ended(6.0, number, 0) for number in range(4))],
        [START, SendSignal(SIGINT, (0, 1, 2, 3)), Finish(exit_code=130)],
    ),
    "after a signal there is grace, then a kill": (
        [
            *READY,
            (5.0, SignalReceived(SIGTERM)),
            (14.9, TimePassed()),
            (15.0, TimePassed()),
            *(ended(15.1, number, -9) for number in range(4)),
        ],
        [START, term(0, 1, 2, 3), kill(0, 1, 2, 3), Finish(exit_code=143)],
    ),
    "the second signal kills": (
        [
            *READY,
            (5.0, SignalReceived(SIGINT)),
            ended(5.5, 0, 1),
            (6.0, SignalReceived(SIGINT)),
            *(ended(6.1, number, -9) for number in (1, 2, 3)),
        ],
        [START, SendSignal(SIGINT, (0, 1, 2, 3)), kill(1, 2, 3), Finish(exit_code=130)],
    ),
    "a signal before the start": ([(0.0, NodeReady("a")), (1.0, SignalReceived(SIGTERM))], [Finish(exit_code=143)]),
    "SIGUSR1 is handed on and ends nothing": (
        [(0.0, SignalReceived(SIGUSR1)), *READY, (5.0, SignalReceived(SIGUSR1)), (90.0, TimePassed())],
        [START, SendSignal(SIGUSR1, (0, 1, 2, 3))],
    ),
    "nobody reads the output": (
        [*READY, (5.0, SignalReceived(SIGPIPE)), *(ended(5.1, number, -15) for number in range(4))],
        [START, term(0, 1, 2, 3), Finish(exit_code=141)],
    ),
}


def actions_of(supervisor: Supervisor, events: list[tuple[float, Event]]) -> list[object]:
    return [action for now_s, event in events for action in supervisor.handle(event, now_s)]


@pytest.mark.parametrize("case", CASES)
def test_actions(case: str) -> None:
    events, expected = CASES[case]
    assert actions_of(Supervisor(HOSTS, start_timeout_s=30.0, grace_s=10.0), events) == expected


def test_without_fail_fast_each_runs_to_its_end() -> None:
    supervisor = Supervisor(HOSTS, start_timeout_s=30.0, grace_s=10.0, fail_fast=False)
    events: list[tuple[float, Event]] = [
        (0.5, NodeReady("a")), (1.0, NodeLost("b", "refused")), ended(5.0, 0, 3), ended(9.0, 1, 0),
    ]  # fmt: skip
    expected = [
        StartProcesses((0, 1)), lost(1, NodeLost("b", "refused"), 1.0),
    ]  # fmt: skip
    assert actions_of(supervisor, events) == expected


def test_the_next_deadline_is_known() -> None:
    supervisor = Supervisor(HOSTS, start_timeout_s=30.0, grace_s=10.0, now_s=100.0)
    deadlines = [supervisor.deadline_s]
    for now_s, event in [(101.0, NodeReady("a")), (102.0, NodeReady("b")), (110.0, SignalReceived(SIGTERM))]:
        supervisor.handle(event, now_s)
        deadlines.append(supervisor.deadline_s)
    assert deadlines == [130.0, 130.0, None, 120.0]


def test_after_the_end_nothing_follows() -> None:
    supervisor = Supervisor({0: "a"}, start_timeout_s=30.0, grace_s=10.0)
    actions_of(supervisor, [(0.0, NodeReady("a")), ended(1.0, 0, 0)])
    assert (
        actions_of(supervisor, [(2.0, SignalReceived(SIGINT)), (3.0, NodeLost("a", "gone")), (99.0, TimePassed())])
        == []
    )
