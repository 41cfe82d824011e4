"""What sessions hold outlives crowds of others, and one person cannot take all that there is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import pytest

import shardwright as sw
from shardwright.errors import ResourceLimitError, ShardwrightError
from shardwright.proto.v1 import master_pb2
from shardwright.server.access import Access
from shardwright.server.limits import Limits
from shardwright.server.master import commands as do
from shardwright.server.master import events as ev
from shardwright.server.master.content_store import ContentStore
from shardwright.server.security import Protection
from tests.recovery.training import batches, initial, train
from tests.security.people import TOKENS, running
from tests.server.crowds import Schedule
from tests.server.raw_client import RawClient, wait_until
from tests.server.simulation import PROGRAM, World


# ---- what is kept ----------------------------------------------------------------
@pytest.mark.parametrize("seed", [2, 3, 5])
def test_nothing_kept_is_lost_in_a_crowd(seed: int) -> None:
    assert not Schedule(seed).run()


@pytest.mark.dear
@pytest.mark.parametrize("first", range(0, 100, 20))
def test_nothing_kept_is_lost_in_a_hundred_crowds(first: int) -> None:
    assert not {seed: lost for seed in range(first, first + 20) if (lost := Schedule(seed).run())}


def open_session(world: World, session_id: str, person: str = "", name: str = "") -> ShardwrightError | None:
    """The error that it fails with, or None."""
    call = len(world.state.sessions) + 1000
    asked = ev.SessionRequested(call=call, session_id=session_id, owner=person, person=person, name=name)
    failures = [each for each in world.send(asked) if isinstance(each, do.Fail) and each.call == call]
    world.all_done()
    return failures[0].error if failures else None


def full_world(**limits: int) -> World:
    """Room for two sessions; alice has one."""
    world = World(limits=Limits(sessions=2, person_sessions=2, **limits))
    world.form()
    assert open_session(world, "hers", "alice", name="run-7") is None
    assert open_session(world, "his", "bob") is None
    world.send(ev.ProgramsSent(session_id="his"))
    return world


def put(world: World, session_id: str, array_id: int, size_bytes: int) -> None:
    array = ev.UploadedArray(array_id=array_id, size_bytes=size_bytes, devices=range(1 << 20))
    for node in range(world.node_count):
        connection = world.executor_connection(node)
        world.send(ev.ArraysUploaded(connection=connection, session_id=session_id, arrays=(array,)))


@pytest.mark.parametrize("holds", ["arrays", "a program that it sent", "a loaded program", "lost arrays"])
def test_a_session_that_holds_something_waits_for_as_long_as_promised(holds: str) -> None:
    world = full_world()
    if holds.endswith("arrays"):
        put(world, "hers", 1, 8)
    if holds == "lost arrays":
        world.executor_dies(0)
    elif holds == "a program that it sent":
        world.send(ev.ProgramsSent(session_id="hers"))
    elif holds == "a loaded program":
        world.send(ev.LoadRequested(call=7, session_id="hers", plan_id="plan"))
        world.send(ev.CompileFinished(plan_id="plan", program=PROGRAM))
        world.all_done()
    world.later(30)
    world.send(ev.SessionTouched(session_id="his"))
    for _ in range(59):
        world.later(60)
        world.send(ev.SessionTouched(session_id="his"))
        assert isinstance(open_session(world, "new", "carol"), ResourceLimitError)
    assert "hers" in world.state.sessions, "59.5 minutes are less than an hour"
    world.later(60)
    assert open_session(world, "new", "carol") is None


def test_an_empty_session_gives_way_the_first_of_who_has_most() -> None:
    world = World(limits=Limits(sessions=3, person_sessions=3))
    world.form()
    for session_id, person in (("hers", "alice"), ("his", "bob"), ("another of his", "bob")):
        open_session(world, session_id, person)
    world.later(11)
    world.send(ev.SessionTouched(session_id="his"))
    world.send(ev.SessionTouched(session_id="another of his"))
    world.later(11)
    assert open_session(world, "new", "carol") is None
    assert "hers" in world.state.sessions, "it was idle for longest, but bob has more"


# ---- shares ----------------------------------------------------------------------
def test_a_person_has_three_quarters_of_the_sessions_at_most() -> None:
    world = World(limits=Limits(sessions=8))
    world.form()
    for number in range(6):
        assert open_session(world, f"s{number}", "bob") is None
    refused = open_session(world, "s6", "bob")
    assert isinstance(refused, ResourceLimitError)
    assert "bob has 6 sessions, the limit is 6 of the server's 8 for one person" in refused.message
    assert "--person-sessions" in refused.remedy
    assert open_session(world, "hers", "alice") is None
    world.later(11)
    assert open_session(world, "s6", "bob") is None, "an empty one of bob's gives way"
    assert {"hers", "s6"} <= world.state.sessions.keys()
    assert "s0" not in world.state.sessions


def test_a_person_has_so_much_memory_in_all_sessions_together() -> None:
    world = World(limits=Limits(person_array_bytes=100))
    world.form()
    for session_id, person in (("one", "bob"), ("two", "bob"), ("hers", "alice")):
        open_session(world, session_id, person)
    put(world, "one", 1, 60)
    put(world, "hers", 1, 60)
    put(world, "two", 1, 41)
    order = next(each for each in world.orders if isinstance(each, do.ReleaseOnWorkers))
    assert isinstance(order.error, ResourceLimitError)
    assert "the arrays of bob would take 101 B in 2 sessions, the limit is 100 B for one person" in order.error.message
    world.send(ev.SessionClosed(call=1, session_id="one"))
    put(world, "two", 2, 41)
    assert world.state.sessions["two"].arrays == {2: 41}
    assert world.state.sessions["hers"].arrays == {1: 60}


@pytest.mark.parametrize(
    ("token", "peer", "person"),
    [
        (TOKENS["alice"], "ipv4:10.0.0.7:4321", "alice"),
        ("n" * 40, "ipv4:10.0.0.7:4321", "default at 10.0.0.7"),
        ("n" * 40, "ipv6:%5Bfd00::7%5D:4321", "default at [fd00::7]"),
        ("n" * 40, "unix:", "default at this host"),
    ],
)
def test_a_person_is_a_name_or_a_host(tmp_path: Path, token: str, peer: str, person: str) -> None:
    (tmp_path / "tokens").write_text(f"alice user {TOKENS['alice']}\n")
    (tmp_path / "tokens").chmod(0o600)
    access = Access(Protection(token="n" * 40, tokens_file=str(tmp_path / "tokens")))
    assert access.person_of(Call(peer, (("authorization", f"Bearer {token}"),))) == person


@dataclass(frozen=True)
class Call:
    """What gRPC knows of a call."""

    host: str
    pairs: tuple[tuple[str, str], ...]

    def peer(self) -> str:
        return self.host

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self.pairs


def test_who_needs_no_token_is_a_host() -> None:
    assert Access(Protection()).person_of(Call("ipv4:10.0.0.7:4321", ())) == "anybody at 10.0.0.7"


def test_memory_is_shared_where_people_have_tokens_of_their_own() -> None:
    world = World(limits=Limits())
    world.form()
    open_session(world, "s", "bob")
    put(world, "s", 1, 1 << 40)
    assert world.state.sessions["s"].arrays, "nobody to share with is known"
    world.state.people.memory_bytes = 1000
    put(world, "s", 2, 8)
    assert list(world.state.sessions["s"].arrays) == [1]


def test_who_calls_from_where_is_known_again_after_a_restart() -> None:
    """Of a shared token: the store has the owner alone."""
    world = World(limits=Limits(sessions=4))
    world.form()
    open_session(world, "s", "default")
    put(world, "s", 1, 8)
    world.send(ev.StepsOpened(stream=1, session_id="s", person="default at 10.0.0.7"))
    (person,) = world.state.people.all()
    assert (person.name, person.sessions, person.array_bytes) == ("default at 10.0.0.7", 1, 8)


def test_programs_have_shares_too_and_those_that_come_in_count() -> None:
    people = {"one": "bob", "two": "bob", "hers": "alice"}
    shelf: ContentStore[str] = ContentStore(
        "program", 8, session_bytes=60, person_bytes=100, total_bytes=150, person_of=people.__getitem__
    )
    shelf.put("one", "p", "text", 50)
    shelf.put("two", "p", "text", 50)  # once for all
    with shelf.arrival("two") as came:
        came(10)
        with pytest.raises(ResourceLimitError, match="the session's programs would take 61 B, its limit is 60 B"):
            came(1)
        with shelf.arrival("one") as also_came, pytest.raises(ResourceLimitError, match="the session's"):
            also_came(11)
    people |= {"three": "bob", "four": "alice", "five": "alice"}
    with shelf.arrival("three") as came:
        came(50)
        with shelf.arrival("two") as also_came, pytest.raises(ResourceLimitError, match="of all sessions of bob would"):
            also_came(1)
        with shelf.arrival("hers") as hers_came:
            hers_came(50)
            with pytest.raises(ResourceLimitError, match="the server's limit is 150 B"), shelf.arrival("four") as more:
                more(1)
    shelf.put("three", "q", "text", 50)


# ---- real servers -----------------------------------------------------------------
@pytest.mark.cluster
def test_a_stranger_costs_nobody_what_they_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """alice leaves a session with a name, updates and a snapshot; bob asks for as many sessions as there are."""
    with running(tmp_path, options=("--grace", "4")) as cluster:
        cluster.client("olga").close()
        monkeypatch.setenv("SHARDWRIGHT_TOKEN", TOKENS["alice"])
        session = sw.connect(cluster.address, name="run-7", snapshot_every=2)
        step = session.parallelize(train, donate_argnums=0)
        state = step.init(initial, jax.random.key(0))
        session.keep(state)
        for batch in batches(6):
            state, _ = step(state, batch)
        wait_until(lambda: any(each.snapshot for each in session.status().sessions))
        session.leave()
        client = RawClient(cluster.address, TOKENS["bob"])
        for _ in range(3):  # past the grace
            opened, error = 0, None
            for _ in range(64):
                try:
                    client.open()
                    opened += 1
                except ResourceLimitError as refused:
                    error = refused
                    break
            assert error is not None
            assert "bob has 48 sessions" in error.message
            wait_until(lambda: not client.call("Status", master_pb2.StatusRequest()).sessions, 20)
        with sw.connect(cluster.address, name="run-7", snapshot_every=2) as successor:
            resumed = successor.resume()
            assert resumed is not None
            assert (resumed.updates, resumed.is_live) == (6, True)
            assert np.isfinite(np.asarray(resumed.state[0])).all()
        status = client.call("Status", master_pb2.StatusRequest())
        assert not status.people, "bob has none left, and others are not bob's business"
