"""Random histories with masters that die: what was acknowledged is there again, and no step runs twice.

A store that is as far behind as it may be; executors that got more or fewer of the last commands, and remember.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from shardwright.errors import ShardwrightError
from shardwright.server.master import commands as do
from shardwright.server.master import events as ev
from shardwright.server.master import recovered
from shardwright.server.master.state import MasterState
from shardwright.server.master.store import SessionRow, StoredState
from tests.server.simulation import IDENTITY, PROGRAM, WAIT_S
from tests.server.test_master_random import NODES, MasterHistory, ids, nodes


@dataclass
class Executor:
    """One node's: what it got, and what it has done of that."""

    log: list[do.ToWorkers] = field(default_factory=list)
    arrays: dict[int, int] = field(default_factory=dict)
    loaded: bool = False
    is_open: bool = False
    steps: dict[int, ev.StepRecord] = field(default_factory=dict)

    def carry_out(self, order: do.ToWorkers, error: ShardwrightError | None) -> None:
        match order:
            case do.OpenOnWorkers():
                self.is_open = True
            case do.CloseOnWorkers():
                self.is_open, self.loaded = False, False
                self.arrays.clear()
                self.steps.clear()
            case do.LoadOnWorkers():
                self.loaded = True
            case do.UnloadOnWorkers():
                self.loaded = False
            case do.ReleaseOnWorkers(array_ids=array_ids):
                for array_id in array_ids:
                    self.arrays.pop(array_id, None)
            case do.RunOnWorkers(step=step):
                self._run(step, error)

    def _run(self, step: ev.StepRequested, error: ShardwrightError | None) -> None:
        is_save = step.files is not None
        self.steps[step.number] = ev.StepRecord(number=step.number, error=error, is_save=is_save)
        if not is_save:
            for taken_over in step.arguments[:1]:
                self.arrays.pop(taken_over, None)
            output_bytes = PROGRAM.output_bytes if step.batch is None else step.batch.output_bytes
            if error is None:
                self.arrays |= dict(zip(step.outputs, output_bytes, strict=True))

    def report(self) -> tuple[ev.SessionReport, ...]:
        if not self.is_open:
            return ()
        arrays = tuple(
            ev.UploadedArray(array_id=array_id, size_bytes=size, devices=range(1 << 20))
            for array_id, size in self.arrays.items()
        )
        loaded = ("plan",) if self.loaded else ()
        steps = tuple(self.steps.values())
        return (ev.SessionReport(session_id="s", arrays=arrays, executables=loaded, steps=steps),)


class RestartHistory(MasterHistory):
    """Besides, the master may die at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.executors = {node: Executor() for node in range(NODES)}
        self.rows: dict[str, SessionRow] = {}
        self.stored_generation = 0
        self.stored_team: tuple[int, ...] = ()
        self.acknowledged: set[int] = set()  # numbers of steps with a reply
        self.restarts = 0

    # What breaks a cluster for good is left to the histories without restarts.
    daemon_goes = node_goes = daemon_comes_back = some_are_silent = node_drains = None  # type: ignore[assignment]
    time_passes = time_passes_in_ticks = stream_breaks = closes = None  # type: ignore[assignment]

    def executor_dies(self, node: int) -> None:  # no rule
        super().executor_dies(node)

    def deliver(self) -> None:
        formation = self.world.state.formation
        if formation.generation != self.generation:
            self.executors = {node: Executor() for node in range(NODES)}
            self.dispatched.clear()  # a step may run again on other executors
            self.acknowledged.clear()
        self.stored_generation, self.stored_team = formation.generation, formation.team  # before they are started
        orders = list(self.world.orders)
        if {each.call for each in self.world.commands if isinstance(each, do.Answer)} & {1, 2, 5}:
            self.rows = {key: recovered.row_of(session) for key, session in self.world.state.sessions.items()}
        self.rows = {key: row for key, row in self.rows.items() if key in self.world.state.sessions}
        self.acknowledged |= {reply.number for reply in self.world.commands if isinstance(reply, do.ReplyStep)}
        super().deliver()
        for executor in self.executors.values():
            executor.log += orders
        for redeliver in self.world.take(do.Redeliver):
            node = formation.connections[redeliver.connection]
            late = [each.payload for each in redeliver.commands]
            self.executors[node].log[-1:-1] = late if orders else []
            self.inbox[node].extendleft(reversed(late))

    @rule(node=nodes, fails=st.booleans(), writes_all=st.booleans())
    def executor_answers(self, node: int, fails: bool, writes_all: bool) -> None:
        if not self.inbox[node]:
            return
        order = self.inbox[node][0]
        if isinstance(order, do.ReportOnWorkers):
            self.inbox[node].popleft()
            connection = self.world.executor_connection(node)
            reports = self.executors[node].report()
            self.world.send(ev.ReportReceived(connection=connection, sequence=order.sequence, sessions=reports))
            self.deliver()
            return
        self.executors[node].carry_out(order, None)
        super().executor_answers(node, fails=False, writes_all=writes_all)

    @initialize()
    def forms(self) -> None:
        """A cluster with a session, a program and some arrays: few histories get as far by chance."""
        for node in range(NODES):
            self.daemon_comes(node)
        for node in range(NODES):
            self.executor_comes(node)
        self.opens()
        self.connects()
        self.all_is_carried_out()
        self.loads()
        self.deliver()
        self.all_is_carried_out()
        for node in range(NODES):
            for array_id in range(1, 9):
                self.puts(array_id, node)

    @rule(first=nodes)
    def all_executors_are_replaced(self, first: int) -> None:
        for node in (first, 1 - first):
            self.executor_dies(node)
        self.executors_come()

    @rule()
    def executors_come(self) -> None:
        for node in range(NODES):
            self.executor_comes(node)

    @rule()
    def all_is_carried_out(self) -> None:
        while any(self.inbox.values()):
            for node in range(NODES):
                self.executor_answers(node, fails=False, writes_all=True)

    @rule(first=ids, second=ids, count=st.integers(1, 3))
    def steps_on_arrays_that_are_there(self, first: int, second: int, count: int) -> None:
        session = self.world.state.sessions.get("s")
        if session is None:
            return
        there = sorted(session.arrays)
        for _ in range(count if len(there) > 1 else 0):
            self.steps((there[first % len(there)], there[second % len(there)]), back=0)

    @rule(array_id=st.integers(1, 12), node=nodes)
    def puts(self, array_id: int, node: int) -> None:
        executor = self.executors[node]
        if executor.is_open and array_id not in executor.arrays:
            executor.arrays[array_id] = 8
            super().puts(array_id, node)

    @rule(cut=st.lists(st.integers(0, 3), min_size=NODES, max_size=NODES), executors_live=st.booleans())
    def master_dies(self, cut: list[int], executors_live: bool) -> None:
        """cut: commands that were on their way to each node, and did not arrive."""
        world, old = self.world, self.world.state
        was_ready = old.formation.phase == "ready" and old.adoption is None
        for node, count in enumerate(cut):
            for _ in range(min(count, len(self.inbox[node]))):
                self.inbox[node].pop()
                self.executors[node].log.pop()
        longest = max((self.executors[node].log for node in range(NODES)), key=len)
        world.state = MasterState.create(
            tuple(record.member for record in old.formation.nodes.values()), IDENTITY, world.limits, wait_s=WAIT_S
        )
        sessions = tuple(self.rows.values())
        stored = StoredState(generation=self.stored_generation, team=self.stored_team, sessions=sessions)
        recovered.restore(world.state, stored, world.now_s)
        for session in world.state.sessions.values():
            for executable in session.executables.values():
                executable.program, executable.state = PROGRAM, "loading"
        world.commands.clear()
        world.orders.clear()
        self.waiting.clear()
        self.restarts += 1
        world.send(ev.Tick())
        if not (executors_live and was_ready):
            self._start_anew()
            return
        for node in range(NODES):
            world.daemon_joins(node, executor_generation=self.stored_generation)
            log = self.executors[node].log
            world.send(
                ev.ExecutorJoined(
                    connection=world.executor_connection(node), node=node, generation=self.stored_generation,
                    data_address=f"host:{9000 + node}", device_count=4, received=log[-1].sequence if log else 0,
                )
            )  # fmt: skip
        self.generation = self.stored_generation
        for ask in world.take(do.AskForRecent):
            late = tuple(
                ev.LoggedCommand(sequence=each.sequence, is_load=isinstance(each, do.LoadOnWorkers), payload=each)
                for each in longest
                if each.sequence > ask.after
            )
            world.send(ev.RecentReceived(connection=ask.connection, commands=late))
        assert world.state.formation.phase == "ready"
        self.deliver()

    @rule(
        first=ids,
        second=ids,
        answered=st.integers(0, 3),
        cut=st.lists(st.integers(0, 3), min_size=NODES, max_size=NODES),
    )
    def master_dies_in_steps(self, first: int, second: int, answered: int, cut: list[int]) -> None:
        """And comes back to executors that have carried out some of them."""
        self.executors_come()
        self.all_is_carried_out()
        self.connects()
        self.loads()
        self.deliver()
        self.all_is_carried_out()
        self.steps_on_arrays_that_are_there(first, second, 3)
        for number in range(answered):
            self.executor_answers(number % NODES, fails=False, writes_all=True)
        self.master_dies(cut, executors_live=True)
        self.connects()
        self.all_is_carried_out()

    def _start_anew(self) -> None:
        """The executors ended as well: whatever ran may run again, on others."""
        self.dispatched.clear()
        self.acknowledged.clear()
        for inbox in self.inbox.values():
            inbox.clear()
        for node in range(NODES):
            self.world.daemon_joins(node)
        assert self.world.state.adoption is None
        self.deliver()

    @invariant()
    def sessions_that_were_acknowledged_are_there(self) -> None:
        sessions = self.world.state.sessions
        assert self.rows.keys() <= sessions.keys()

    @invariant()
    def arrays_on_all_executors_are_known_once_all_is_carried_out(self) -> None:
        state = self.world.state
        session = state.sessions.get("s")
        if state.adoption is not None or session is None or not session.is_open or any(self.inbox.values()):
            return
        on_all = set.intersection(*(set(executor.arrays) for executor in self.executors.values()))
        assert on_all <= session.arrays.keys()
        ran = self.acknowledged & self.dispatched.keys()
        assert all(number <= session.last_number for number in ran), "it is not run again"

    def teardown(self) -> None:
        self.all_is_carried_out()
        super().teardown()


RestartHistory.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestRestartHistory = RestartHistory.TestCase
