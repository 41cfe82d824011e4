"""A master of an elastic cluster that is started again: which executors it takes up, and when others take part."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.errors import AuthenticationError
from shardwright.server.limits import Limits
from shardwright.server.master import commands as do
from shardwright.server.master import events as ev
from shardwright.server.master import machine, recovered
from shardwright.server.master.nodes import Member
from shardwright.server.master.roster import Elasticity, Roster
from shardwright.server.master.state import MasterState
from shardwright.server.master.store import SessionRow, StoredState
from tests.server.simulation import IDENTITY, TICK_S, WAIT_S

GENERATION = 5
LIMITS = Limits(rejoin_grace_s=4.0, adopt_s=10.0)
ROW = SessionRow(session_id="s", name="run-7", salt="x", executables=("plan",), last_number=3, highest_id=7)


class Restarted:
    """The master after its restart. nodes: of the cluster file; team: nodes of the executors that ran."""

    def __init__(self, nodes: Sequence[int], team: tuple[int, ...]) -> None:
        members = tuple(Member(index=node, address=f"host:{node}", device_count=2) for node in nodes)
        elasticity = Elasticity(min_nodes=1, rejoin_grace_s=4.0, first_grace_s=30.0)
        self.now_s = 100.0
        self.state = MasterState.create(
            members, IDENTITY, LIMITS, wait_s=WAIT_S, now_s=self.now_s, roster=Roster(nodes, elasticity, self.now_s)
        )
        stored = StoredState(generation=GENERATION, team=team, sessions=(ROW,))
        self.commands = recovered.restore(self.state, stored, self.now_s)

    def send(self, event: ev.Event) -> None:
        self.commands += machine.handle(self.state, event, self.now_s)
        machine.check_invariants(self.state)

    def daemon_joins(self, node: int, generation: int = GENERATION) -> None:
        self.send(
            ev.DaemonJoined(
                connection=10 + node, node=node, cluster_hash="h", shardwright_version="1", jax_version="2",
                coordinator_address=f"host:{node}", executor_generation=generation,
            )
        )  # fmt: skip

    def executor_joins(self, node: int, generation: int = GENERATION) -> None:
        self.send(
            ev.ExecutorJoined(
                connection=100 + node, node=node, generation=generation, data_address=f"host:{9000 + node}",
                device_count=2, received=4,
            )
        )  # fmt: skip

    def report(self, node: int) -> None:
        (order,) = [each for each in self.commands if isinstance(each, do.ReportOnWorkers)]
        array = ev.UploadedArray(array_id=7, size_bytes=8, devices=range(4))
        report = ev.SessionReport(session_id="s", arrays=(array,), executables=("plan",))
        self.send(ev.ReportReceived(connection=100 + node, sequence=order.sequence, sessions=(report,)))

    def passes(self, seconds: float) -> None:
        """Time in ticks, with signs of life of all who are here."""
        for _ in range(round(seconds / TICK_S)):
            self.now_s += TICK_S
            for connection in self.state.formation.connections:
                self.send(ev.ExecutorHeard(connection=connection))
            for record in self.state.formation.nodes.values():
                if record.daemon is not None:
                    self.send(ev.DaemonHeard(connection=record.daemon))
            self.send(ev.SessionTouched(session_id="s"))
            self.send(ev.Tick())

    def started(self) -> list[int]:
        """Connections of the daemons that were told to start an executor."""
        return [each.connection for each in self.commands if isinstance(each, do.StartExecutor)]

    def texts(self) -> str:
        return "\n".join(each.text for each in self.commands if isinstance(each, do.Log))


def adopted() -> Restarted:
    """Nodes 0 and 2 of three ran, and are taken up; node 1 has come meanwhile."""
    world = Restarted(range(3), team=(0, 2))
    world.daemon_joins(1, generation=0)
    for node in (0, 2):
        world.executor_joins(node)
        world.daemon_joins(node)
    return world


def test_the_nodes_that_ran_are_taken_up_whoever_else_is_there() -> None:
    world = adopted()
    formation = world.state.formation
    assert (formation.phase, formation.generation, formation.team) == ("ready", GENERATION, (0, 2))
    world.passes(2)
    assert formation.phase == "ready", "before all have reported nobody knows what a change would cost"
    for node in (0, 2):
        world.report(node)
    session = world.state.sessions["s"]
    assert world.state.has_adopted
    assert session.is_open
    assert session.arrays == {7: 8}
    assert not world.started()
    world.passes(60)
    assert formation.generation == GENERATION, "its arrays are in no snapshot: the node waits"
    session.drop_array(7)
    world.passes(10)
    assert formation.phase == "stopping"
    assert "node 1 joins" in world.texts()


def test_where_one_is_missing_the_others_form_anew_without_waiting_for_those_of_before() -> None:
    world = Restarted(range(3), team=(0, 2))
    world.daemon_joins(0)
    world.executor_joins(0)
    world.passes(9)
    assert world.state.formation.phase == "adopting"
    world.passes(2)
    assert "did not come back within 10 s" in world.texts()
    exited = ev.ExecutorExited(
        connection=10, generation=GENERATION, exit_code=-9, last_lines="", coordinator_address="host:0"
    )
    world.send(exited)
    world.passes(6)
    assert world.started() == [10], "node 2 had its grace, node 1 was waited for by the master before"
    assert world.state.formation.generation == GENERATION + 1
    assert world.state.adoption is None
    assert world.state.sessions["s"].loss is not None
    assert "plan" in world.state.sessions["s"].retired, "it was planned for two nodes"


def test_a_node_whose_executor_has_ended_ends_the_others_at_once() -> None:
    world = Restarted(range(2), team=(0, 1))
    world.daemon_joins(0)
    world.executor_joins(0)
    world.daemon_joins(1, generation=0)
    assert "its executor has ended" in world.texts()
    assert world.state.formation.phase == "stopping"
    assert 1 in world.state.formation.roster.candidates, "that is no fault of its own"  # type: ignore[union-attr]


def test_executors_of_nodes_that_left_the_file_are_not_waited_for() -> None:
    world = Restarted(range(2), team=(0, 2))
    assert "not all in the cluster file" in world.texts()
    assert not world.state.sessions["s"].executables
    world.daemon_joins(0)
    world.daemon_joins(1, generation=0)
    assert world.started() == [10, 11]
    assert world.state.formation.generation == GENERATION + 1
    assert world.state.sessions["s"].loss is not None


def test_a_name_is_given_to_who_knows_the_session() -> None:
    world = adopted()
    world.send(ev.SessionRequested(call=1, session_id="other", name="run-7", salt="x"))
    (refused,) = [each for each in world.commands if isinstance(each, do.Fail)]
    assert isinstance(refused.error, AuthenticationError)
    world.send(ev.SessionRequested(call=2, session_id="s", name="run-7", salt="x"))
    for node in (0, 2):
        world.report(node)
    (answer,) = [each for each in world.commands if isinstance(each, do.Answer)]
    assert answer.call == 2
