"""Membership by cases, by all short schedules and by random long ones, held against a model of its own."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

import shardwright as sw
from shardwright.membership import (
    Admit,
    Decision,
    Enough,
    Event,
    HostFailed,
    HostsFound,
    LeaveOut,
    Limits,
    MemberFailed,
    MemberLeft,
    Membership,
    Retire,
    TimePassed,
    TooFew,
    Wait,
)

A2 = HostsFound({"a": 2})
BOTH = HostsFound({"a": 2, "b": 2})

CASES: dict[str, tuple[Limits, list[tuple[float, Event]], list[Decision]]] = {
    "slots are filled in order, up to the most": (
        Limits(min_size=2, max_size=3),
        [(0, BOTH)],
        [Admit(0, "a"), Admit(1, "a"), Admit(2, "b")],
    ),
    "too few is said once, and enough": (
        Limits(min_size=2),
        [(0, HostsFound({})), (1, HostsFound({"a": 1})), (2, A2)],
        [TooFew(0, 2, hopeless=False), Admit(0, "a"), Admit(1, "a"), Enough(2)],
    ),
    "a failed host waits, others go on": (
        Limits(first_wait_s=5),
        [(0, BOTH), (1, MemberFailed(1)), (5.9, TimePassed()), (6, TimePassed())],
        [*(Admit(n, host) for n, host in enumerate("aabb")), Wait("a", 5, 1), Admit(4, "a")],
    ),
    "waits double, then the host is left out by name": (
        Limits(first_wait_s=1, max_failures=3),
        [
            (0, HostsFound({"a": 1})),
            (0, MemberFailed(0)),
            (1, TimePassed()),
            (1, MemberFailed(1)),
            (3, TimePassed()),
            (3, MemberFailed(2)),
            (1e9, TimePassed()),
        ],
        [
            Admit(0, "a"), Wait("a", 1, 1), TooFew(0, 1, hopeless=False), Admit(1, "a"), Enough(1), Wait("a", 2, 2),
            TooFew(0, 1, hopeless=False), Admit(2, "a"), Enough(1), LeaveOut("a", None, 3), TooFew(0, 1, hopeless=True),
        ],
    ),
    "after a cool-down a host gets one more try": (
        Limits(max_failures=1, cooldown_s=10),
        [(0, HostsFound({"a": 1})), (0, MemberFailed(0)), (10, TimePassed()), (11, MemberFailed(1))],
        [
            Admit(0, "a"), LeaveOut("a", 10, 1), TooFew(0, 1, hopeless=False), Admit(1, "a"), Enough(1),
            LeaveOut("a", 10, 2), TooFew(0, 1, hopeless=False),
        ],
    ),
    "failures far apart are not in a row": (
        Limits(max_failures=2, first_wait_s=1, steady_s=100),
        [(0, HostsFound({"a": 1})), (0, MemberFailed(0)), (1, TimePassed()), (200, MemberFailed(1))],
        [
            Admit(0, "a"), Wait("a", 1, 1), TooFew(0, 1, hopeless=False), Admit(1, "a"), Enough(1), Wait("a", 1, 1),
            TooFew(0, 1, hopeless=False),
        ],
    ),
    "a host that is gone has its members retired, and their slots filled once they left": (
        Limits(max_size=2),
        [(0, A2), (1, HostsFound({"b": 2})), (2, MemberLeft(0)), (3, MemberFailed(1))],
        [
            Admit(0, "a"), Admit(1, "a"), Retire(0), Retire(1), TooFew(0, 1, hopeless=False), Admit(2, "b"), Enough(1),
            Admit(3, "b"),
        ],
    ),
    "fewer slots retire the youngest": (
        Limits(),
        [(0, A2), (1, HostsFound({"a": 1})), (2, A2), (3, MemberLeft(1))],
        [Admit(0, "a"), Admit(1, "a"), Retire(1), Admit(2, "a")],
    ),
    "a lost host is one failure of all its members": (
        Limits(max_failures=2, first_wait_s=1),
        [(0, BOTH), (1, HostFailed("a"))],
        [*(Admit(n, host) for n, host in enumerate("aabb")), Wait("a", 1, 1)],
    ),
    "what is unknown changes nothing": (Limits(), [(0, A2), (1, MemberFailed(7)), (2, MemberLeft(9))], [
        Admit(0, "a"), Admit(1, "a"),
    ]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_cases(case: str) -> None:
    limits, events, expected = CASES[case]
    membership = Membership(limits)
    assert [decision for at_s, event in events for decision in membership.handle(event, at_s)] == expected


def test_nothing_waits_for_a_host_that_is_left_out_for_good() -> None:
    membership = Membership(Limits(max_failures=1))
    membership.handle(A2, 0)
    membership.handle(MemberFailed(0), 1)
    assert membership.deadline_s is None
    assert membership.left_out == ("a",)


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"min_size": 0}, "min_size"),
        ({"min_size": 3, "max_size": 2}, "max_size"),
        ({"max_failures": 0}, "max_failures"),
        ({"first_wait_s": -1.0}, "first_wait_s"),
    ],
)
def test_limits_that_make_no_sense_are_named(options, where: str) -> None:
    with pytest.raises(sw.OptionError) as caught:
        Limits(**options)
    assert caught.value.where == where


class Model:
    """What the decisions say, followed apart from the membership: who is there, which host may be used."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.membership = Membership(limits)
        self.slots: dict[str, int] = {}
        self.there: dict[int, str] = {}
        self.leaving: set[int] = set()
        self.closed_until_s: dict[str, float] = {}
        self.said_too_few = False
        self.used: set[int] = set()

    def send(self, event: Event, now_s: float) -> None:
        match event:
            case HostsFound(slots):
                self.slots = dict(slots)
            case MemberFailed(member) | MemberLeft(member):
                self.there.pop(member, None)
                self.leaving.discard(member)
            case HostFailed(host):
                for member in [member for member, other in self.there.items() if other == host]:
                    del self.there[member]
                    self.leaving.discard(member)
        for decision in self.membership.handle(event, now_s):
            self.follow(decision, now_s)
        self.check(now_s)

    def follow(self, decision: Decision, now_s: float) -> None:
        match decision:
            case Admit(member, host):
                assert member not in self.used, "a number is used twice"
                assert now_s >= self.closed_until_s.get(host, 0.0), "a host that waits is used"
                self.used.add(member)
                self.there[member] = host
                assert list(self.there.values()).count(host) <= self.slots.get(host, 0), "more members than slots"
            case Retire(member):
                assert member in self.there
                assert member not in self.leaving
                self.leaving.add(member)
            case Wait(host, seconds, failures):
                assert failures < self.limits.max_failures
                assert seconds == min(self.limits.first_wait_s * 2 ** (failures - 1), self.limits.longest_wait_s)
                self.closed_until_s[host] = max(self.closed_until_s.get(host, 0.0), now_s + seconds)
            case LeaveOut(host, seconds, _):
                self.closed_until_s[host] = float("inf") if seconds is None else now_s + seconds
            case TooFew(size):
                assert size == len(self.there) - len(self.leaving)
                self.said_too_few = True
            case Enough():
                self.said_too_few = False

    def check(self, now_s: float) -> None:
        staying = {member: host for member, host in self.there.items() if member not in self.leaving}
        assert self.membership.members == staying
        assert self.limits.max_size is None or len(self.there) <= self.limits.max_size
        assert (len(staying) < self.limits.min_size) == self.said_too_few, "below the least without a word"
        for host, count in self.slots.items():
            full = self.limits.max_size is not None and len(self.there) >= self.limits.max_size
            taken = list(self.there.values()).count(host)
            assert taken >= count or full or not self.membership.is_open(host), "a free slot is left empty"
        if (deadline_s := self.membership.deadline_s) is not None:
            assert deadline_s >= now_s


def _events(model: Model) -> Sequence[Event]:
    members = sorted(model.there)[:3]
    return [
        *(MemberFailed(member) for member in members),
        *(MemberLeft(member) for member in members[:1]),
        HostFailed("a"),
        HostsFound({"a": 1, "b": 2}),
        HostsFound({"b": 1}),
        HostsFound({}),
        TimePassed(),
    ]


def test_all_schedules_of_four_events() -> None:
    limits = Limits(min_size=2, max_size=3, max_failures=2, first_wait_s=1.0, cooldown_s=2.0)
    for choices in itertools.product(range(9), repeat=4):
        model, now_s = Model(limits), 0.0
        model.send(HostsFound({"a": 2, "b": 1}), now_s)
        for choice in choices:
            now_s += 0.7
            events = _events(model)
            model.send(events[choice % len(events)], now_s)


def test_random_schedules() -> None:
    for seed in range(400):
        chooser = random.Random(seed)
        least = chooser.randint(1, 4)
        limits = Limits(
            min_size=least,
            max_size=chooser.choice([None, least, least + 3]),
            max_failures=chooser.randint(1, 4),
            first_wait_s=chooser.choice([0.0, 1.0, 7.0]),
            longest_wait_s=20.0,
            cooldown_s=chooser.choice([None, 5.0, 50.0]),
            steady_s=30.0,
        )
        model, now_s = Model(limits), 0.0
        for _ in range(60):
            now_s += chooser.choice([0.0, 0.3, 2.0, 25.0])
            kind = chooser.random()
            if kind < 0.3:
                names = [name for name in "abcd" if chooser.random() < 0.7]
                model.send(HostsFound({name: chooser.randint(1, 3) for name in names}), now_s)
            elif kind < 0.7 and model.there:
                member = chooser.choice(sorted(model.there))
                model.send(chooser.choice([MemberFailed, MemberFailed, MemberLeft])(member), now_s)
            elif kind < 0.8:
                model.send(HostFailed(chooser.choice("abcd")), now_s)
            elif model.membership.deadline_s is not None:
                now_s = max(now_s, model.membership.deadline_s)
                model.send(TimePassed(), now_s)
