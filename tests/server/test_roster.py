"""Which nodes of an elastic cluster take part: by cases, and by random schedules held against a model of its own."""

from __future__ import annotations

import random

import pytest

from shardwright.server.limits import Limits
from shardwright.server.master import commands as do
from shardwright.server.master import events as ev
from shardwright.server.master import machine, node_reports, watchdog
from shardwright.server.master.nodes import Identity, Member
from shardwright.server.master.roster import Elasticity, Roster
from shardwright.server.master.state import MasterState

GRACE_S = 10.0


def roster(**changes: object) -> Roster:
    elasticity = Elasticity(
        min_nodes=2, rejoin_grace_s=GRACE_S, first_grace_s=GRACE_S, max_failures=3, first_wait_s=4.0, cooldown_s=100.0
    )
    return Roster(range(4), Elasticity(**{**_fields(elasticity), **changes}), 0.0)  # type: ignore[arg-type]


def _fields(elasticity: Elasticity) -> dict[str, object]:
    return {name: getattr(elasticity, name) for name in Elasticity.__slots__}


def test_all_start_at_once_and_some_after_the_grace() -> None:
    nodes = roster()
    nodes.look({0, 1, 2}, 1.0)
    assert nodes.choose(1.0) is None
    assert nodes.choose(GRACE_S) == (0, 1, 2)
    nodes.look({0, 1, 2, 3}, 2.0)
    assert nodes.choose(2.0) == (0, 1, 2, 3)


def test_who_has_never_come_has_more_time() -> None:
    nodes = roster(rejoin_grace_s=2.0)
    nodes.look({0, 1, 2}, 1.0)
    assert nodes.choose(9.0) is None
    nodes.look({0, 1, 2, 3}, 9.0)
    nodes.look({0, 1, 2}, 20.0)
    assert nodes.choose(21.0) is None
    assert nodes.choose(22.0) == (0, 1, 2)


def test_too_few_never_start() -> None:
    nodes = roster()
    nodes.look({3}, 1.0)
    assert nodes.choose(1e9) is None
    nodes.look({2, 3}, 1e9)
    assert nodes.choose(1e9) == (2, 3)


def test_at_most_so_many_take_part_and_those_who_are_there_stay() -> None:
    nodes = roster(max_nodes=2)
    nodes.look({1, 3}, 1.0)
    assert nodes.choose(1.0) == (1, 3), "nobody is waited for"
    nodes.look({0, 1, 2, 3}, 2.0)
    assert nodes.choose(2.0) == (1, 3)
    nodes.look({0, 2, 3}, 3.0)
    assert nodes.choose(3.0) == (0, 3)


def test_a_node_that_fails_waits_longer_each_time_and_is_then_left_out_by_name() -> None:
    nodes = roster()
    nodes.look(range(4), 0.0)
    assert nodes.fail(2, 0.0) == ["node 2 has failed once: it takes no part for 4 s"]
    assert nodes.choose(3.0) is None, "it is back within the grace"
    nodes.look(range(4), 4.0)
    assert nodes.choose(4.0) == (0, 1, 2, 3)
    assert nodes.fail(2, 5.0) == ["node 2 has failed 2 times in a row: it takes no part for 8 s"]
    nodes.look(range(4), 13.0)
    (news,) = nodes.fail(2, 14.0)
    assert "node 2 has failed 3 times in a row: it is left out; it gets one more try in 100 s" in news
    assert nodes.left_out == {2}
    assert nodes.choose(14.0) == (0, 1, 3), "nobody waits for it"
    nodes.look(range(4), 114.0)
    assert nodes.candidates == {0, 1, 2, 3}


def test_other_nodes_belong_to_it() -> None:
    nodes = roster()
    nodes.look(range(4), 0.0)
    nodes.change_nodes({0, 1, 2, 7}, 1.0)
    nodes.look({0, 1, 2, 3}, 1.0)
    assert nodes.candidates == {0, 1, 2}, "what is no longer in the file takes no part"
    assert nodes.choose(2.0) is None, "the new one is waited for"
    nodes.look({0, 1, 2, 7}, 3.0)
    assert nodes.choose(3.0) == (0, 1, 2, 7)


class Model:
    """The rules once more, node by node, from the whole history."""

    def __init__(self, count: int, least: int, most: int | None) -> None:
        self.count, self.least, self.most = count, least, most
        self.here: set[int] = set()
        self.found: list[int] = []
        self.members: list[int] = []
        self.failures: dict[int, list[float]] = {node: [] for node in range(count)}
        self.away_since = dict.fromkeys(range(count), 0.0)

    def in_a_row(self, node: int) -> int:
        count, last = 0, None
        for at in self.failures[node]:
            count = count + 1 if last is None or at - last <= 300.0 else 1
            last = at
        return count

    def opens_at(self, node: int) -> float:
        opens = 0.0
        for number in range(1, len(self.failures[node]) + 1):
            model = self.failures[node][:number]
            count, last = 0, None
            for at in model:
                count = count + 1 if last is None or at - last <= 300.0 else 1
                last = at
            opens = model[-1] + (100.0 if count >= 3 else min(4.0 * 2 ** (count - 1), 60.0))
        return opens

    def is_left_out(self, node: int, now_s: float) -> bool:
        return self.in_a_row(node) >= 3 and now_s < self.opens_at(node)

    def look(self, now_s: float) -> None:
        self.found += [node for node in sorted(self.here) if node not in self.found]
        usable = [node for node in self.found if node in self.here and now_s >= self.opens_at(node)]
        self.members = [node for node in self.members if node in usable]
        for node in usable:
            if node not in self.members and (self.most is None or len(self.members) < self.most):
                self.members.append(node)
        for node in range(self.count):
            if node in self.members:
                self.away_since.pop(node, None)
            else:
                self.away_since.setdefault(node, now_s)

    def choose(self, now_s: float) -> tuple[int, ...] | None:
        if len(self.members) < self.least:
            return None
        awaited = [
            node
            for node, since in self.away_since.items()
            if now_s - since < GRACE_S and not self.is_left_out(node, now_s)
        ]
        has_room = self.most is None or len(self.members) < self.most
        return None if awaited and has_room else tuple(sorted(self.members))


@pytest.mark.parametrize("seed", range(60))
def test_random_schedules_agree_with_the_model(seed: int) -> None:
    chance = random.Random(seed)
    most = chance.choice([None, 2, 3])
    nodes, model, now_s = roster(max_nodes=most), Model(4, 2, most), 0.0
    for _ in range(80):
        now_s += chance.choice([0.0, 0.5, 3.0, 11.0, 90.0])
        kind = chance.random()
        if kind < 0.35:
            model.here ^= {chance.randrange(4)}
        nodes.look(model.here, now_s)
        model.look(now_s)
        if kind > 0.7 and nodes.candidates:
            culprit = chance.choice(sorted(nodes.candidates))
            nodes.fail(culprit, now_s)
            model.failures[culprit].append(now_s)
            model.look(now_s)
        assert nodes.candidates == set(model.members)
        assert nodes.left_out == {node for node in range(4) if model.is_left_out(node, now_s)}
        assert nodes.choose(now_s) == model.choose(now_s)


# ---- the whole master ----------------------------------------------------------------------
class ElasticWorld:
    """Daemons and executors that are numbers: connections 10 + node, and 100 · generation + node."""

    def __init__(self, count: int = 4, **limits: float) -> None:
        members = tuple(Member(index=index, address=f"host:{index}", device_count=2) for index in range(count))
        self.limits = Limits(rejoin_grace_s=GRACE_S, pending_steps=4, **limits)  # type: ignore[arg-type]
        elasticity = Elasticity(
            min_nodes=2,
            rejoin_grace_s=GRACE_S,
            first_grace_s=GRACE_S,
            max_failures=3,
            first_wait_s=1.0,
            cooldown_s=50.0,
        )
        self.state = MasterState.create(
            members,
            Identity(cluster_hash="h", shardwright_version="1", jax_version="2"),
            self.limits,
            wait_s=1e9,
            roster=Roster(range(count), elasticity, 0.0),
        )
        self.now_s = 0.0
        self.logs: list[str] = []
        self.drained: set[int] = set()  # nodes whose daemons may end
        self.daemons: set[int] = set()
        self.asked: dict[int, int] = {}  # node → generation that its executor was told to start
        self.running: dict[int, int] = {}  # node → generation of an executor that has joined
        self.stopping: set[int] = set()  # nodes whose executor was told to end

    def send(self, event: ev.Event) -> None:
        commands = machine.handle(self.state, event, self.now_s)
        machine.check_invariants(self.state)
        starts = [command for command in commands if isinstance(command, do.StartExecutor)]
        if starts:
            nodes = [start.connection - 10 for start in starts]
            assert nodes == sorted(nodes) == list(self.state.formation.team)
            assert self.daemons.issuperset(nodes)
            assert len(nodes) >= 2, "never fewer than the least"
            assert [start.process_id for start in starts] == list(range(len(nodes)))
            assert {start.process_count for start in starts} == {len(nodes)}
            assert not self.asked, "executors of a generation are gone before the next one starts"
            self.asked = dict.fromkeys(nodes, starts[0].generation)
        for command in commands:
            if isinstance(command, do.Drained) and command.nodes is not None:
                self.drained |= command.nodes
            if isinstance(command, do.Log):
                self.logs.append(command.text)
            if isinstance(command, do.StopExecutor) and command.connection - 10 in self.asked:
                self.stopping.add(command.connection - 10)

    def daemon_joins(self, node: int) -> None:
        self.daemons.add(node)
        self.send(
            ev.DaemonJoined(
                connection=10 + node, node=node, cluster_hash="h", shardwright_version="1", jax_version="2",
                coordinator_address=f"host:{node}",
            )
        )  # fmt: skip

    def node_dies(self, node: int) -> None:
        """Its daemon, and its executor."""
        self.daemons.discard(node)
        generation = self.running.pop(node, None)
        self.asked.pop(node, None)
        self.send(ev.DaemonLeft(connection=10 + node))
        if generation is not None:
            self.send(ev.ExecutorLeft(connection=100 * generation + node))

    def executor_joins(self, node: int) -> None:
        generation = self.asked[node]
        self.running[node] = generation
        self.send(
            ev.ExecutorJoined(
                connection=100 * generation + node, node=node, generation=generation,
                data_address=f"host:{9000 + node}", device_count=2,
            )
        )  # fmt: skip

    def executor_dies(self, node: int) -> None:
        generation = self.asked.pop(node)
        self.running.pop(node, None)
        self.send(
            ev.ExecutorExited(
                connection=10 + node, generation=generation, exit_code=-9, last_lines="",
                coordinator_address=f"host:{node}",
            )
        )  # fmt: skip

    def settle(self, seconds: float) -> None:
        """Executors do as they are told, for a while."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.obey()
            self.now_s += 0.5
            self.hear()
            self.send(ev.Tick())
        self.obey()

    def obey(self) -> None:
        while True:
            stopping = [node for node in self.asked if node in self.stopping]
            starting = [node for node in self.asked if node not in self.running and node not in self.stopping]
            if stopping:
                self.stopping.discard(stopping[0])
                self.executor_dies(stopping[0])
            elif starting:
                self.executor_joins(starting[0])
            else:
                return

    def hear(self) -> None:
        for node in self.daemons:
            self.send(ev.DaemonHeard(connection=10 + node))
        for node, generation in self.running.items():
            self.send(ev.ExecutorHeard(connection=100 * generation + node))

    @property
    def team(self) -> tuple[int, ...]:
        """The nodes that run; none where not all do."""
        formation = self.state.formation
        return formation.team if formation.phase == "ready" else ()


def formed(count: int = 4) -> ElasticWorld:
    world = ElasticWorld(count)
    for node in range(count):
        world.daemon_joins(node)
    world.settle(1.0)
    assert world.team == tuple(range(count))
    return world


def test_the_others_go_on_without_a_node_that_does_not_come_back_and_it_joins_again() -> None:
    world = formed()
    world.node_dies(2)
    world.settle(GRACE_S - 2)
    assert world.team == ()
    assert node_reports.node_state(world.state.formation, 2) == "lost"
    world.settle(4.0)
    assert world.team == (0, 1, 3)
    assert world.state.formation.devices == {0: range(2), 1: range(2, 4), 3: range(4, 6)}
    assert node_reports.node_state(world.state.formation, 2) == "away"
    assert watchdog.summarize(world.state) == "degraded"
    world.daemon_joins(2)
    world.settle(2.0)
    assert world.team == (0, 1, 2, 3)


def test_a_node_outside_may_come_and_go() -> None:
    world = formed()
    world.node_dies(3)
    world.settle(GRACE_S + 2)
    generation = world.state.formation.generation
    world.send(ev.SessionRequested(call=1, session_id="s"))
    world.state.sessions["s"].add_array(1, 8)  # it takes no snapshots: it would lose this one
    for _ in range(3):
        world.daemon_joins(3)
        world.settle(3.0)
        assert node_reports.node_state(world.state.formation, 3) == "joining"
        world.node_dies(3)
        world.settle(3.0)
    assert world.state.formation.generation == generation
    assert any("takes no snapshots" in text for text in world.logs)


def test_programs_of_other_nodes_are_dropped() -> None:
    world = formed()
    world.send(ev.SessionRequested(call=1, session_id="s"))
    session = world.state.sessions["s"]
    world.send(ev.LoadRequested(call=2, session_id="s", plan_id="plan"))
    world.node_dies(1)
    world.settle(GRACE_S + 2)
    assert world.team == (0, 2, 3)
    assert not session.executables
    assert "plan" in session.retired


def test_a_flapping_node_is_left_out_and_status_says_so() -> None:
    world = formed()
    for _ in range(3):
        world.executor_dies(1)
        world.settle(6.0)
    assert world.team == (0, 2, 3)
    assert node_reports.node_state(world.state.formation, 1) == "left out"
    assert any("node 1 has failed 3 times in a row: it is left out" in text for text in world.logs)
    world.settle(60.0)
    assert world.team == (0, 1, 2, 3), "it gets one more try"


def test_nodes_that_are_no_longer_in_the_file_leave() -> None:
    world = formed()
    members = [record.member for index, record in world.state.formation.nodes.items() if index != 3]
    world.send(ev.MembersChanged(members=tuple(members)))
    world.settle(2.0)
    assert world.team == (0, 1, 2)
    assert 3 not in world.state.formation.nodes
    world.send(
        ev.DaemonJoined(
            connection=99, node=3, cluster_hash="h", shardwright_version="1", jax_version="2", coordinator_address=""
        )
    )
    assert 3 not in world.state.formation.nodes


def test_a_node_that_can_be_spared_leaves_after_the_next_snapshot() -> None:
    world = formed()
    world.send(ev.SessionRequested(call=1, session_id="s"))
    session = world.state.sessions["s"]
    session.add_array(1, 8)
    session.snapshots.is_told = True
    session.last_step_s = 1e6  # it has just run a step, always
    world.send(ev.DrainRequested(connection=13, reason="SIGTERM", limit_s=30.0))
    assert world.state.drain is None, "no step is refused"
    world.settle(3.0)
    assert world.team == (0, 1, 2, 3)
    session.snapshots.completed_s = world.now_s
    world.settle(2.0)
    assert world.team == (0, 1, 2)
    assert world.drained == {3}
    world.node_dies(3)
    world.daemon_joins(3)
    session.snapshots.completed_s = world.now_s + 10
    world.settle(2.0)
    assert world.team == (0, 1, 2, 3), "it was no failure"


def test_a_node_that_cannot_be_spared_is_drained() -> None:
    world = formed()
    for node in (0, 1):
        world.node_dies(node)
    world.settle(GRACE_S + 2)
    assert world.team == (2, 3)
    world.send(ev.DrainRequested(connection=13, reason="SIGTERM", limit_s=30.0))
    assert world.state.drain is not None


@pytest.mark.dear
@pytest.mark.parametrize("seed", range(40))
def test_random_schedules_keep_the_invariants_and_end_complete(seed: int) -> None:
    chance = random.Random(seed)
    world = ElasticWorld(4)
    for _ in range(60):
        away = sorted(set(range(4)) - world.daemons)
        kind = chance.random()
        if kind < 0.3 and away:
            world.daemon_joins(chance.choice(away))
        elif kind < 0.4 and world.daemons:
            world.node_dies(chance.choice(sorted(world.daemons)))
        elif kind < 0.5 and world.asked:
            world.executor_dies(chance.choice(sorted(world.asked)))
        else:
            world.settle(chance.choice([0.5, 2.0, 12.0]))
    for node in sorted(set(range(4)) - world.daemons):
        world.daemon_joins(node)
    world.settle(400.0)
    assert world.team == (0, 1, 2, 3), "once nobody fails any more, all take part"
