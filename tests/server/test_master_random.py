"""Random histories of a master: invariants after every event, each step at most once, no reply lost."""

from __future__ import annotations

from collections import Counter, deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shardwright.errors import ExecutionError
from shardwright.server.master import commands as do
from shardwright.server.master import events as ev
from shardwright.server.master import saves
from tests.server.simulation import PROGRAM, World

NODES = 2
nodes = st.integers(0, NODES - 1)
ids = st.integers(1, 12)

FIRST_WAIT = 1000


class MasterHistory(RuleBasedStateMachine):
    """Daemons come and go, executors die or answer late and in any interleaving, a client does what it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(node_count=NODES)
        self.inbox: dict[int, deque[do.ToWorkers]] = {node: deque() for node in range(NODES)}
        self.generation = 0
        self.stream = 0
        self.next_number = 1
        self.next_id = 1000
        self.dispatched: Counter[int] = Counter()
        self.replied: dict[int, list[int]] = {}
        self.has_session = False
        self.waiting: set[int] = set()  # calls that wait for a save
        self.next_call = FIRST_WAIT

    def deliver(self) -> None:
        """Hand the master's commands to the executors and the client."""
        if self.world.state.formation.generation != self.generation or self.world.state.formation.phase != "ready":
            self.generation = self.world.state.formation.generation
            for inbox in self.inbox.values():
                inbox.clear()
        for order in self.world.orders:
            if isinstance(order, do.RunOnWorkers):
                self.dispatched[order.step.number] += 1
            for inbox in self.inbox.values():
                inbox.append(order)
        self.world.orders.clear()
        for told in [*self.world.take(do.Answer), *self.world.take(do.Fail)]:
            if told.call >= FIRST_WAIT:
                self.waiting.remove(told.call)  # once: KeyError the second time
        for reply in self.world.take(do.ReplyStep):
            self.replied.setdefault(reply.stream, []).append(reply.number)
        for compiling in self.world.take(do.Compile):
            self.world.send(ev.CompileFinished(plan_id=compiling.plan_id, program=PROGRAM))

    # ---- the cluster -------------------------------------------------------
    @rule(node=nodes)
    def daemon_comes(self, node: int) -> None:
        self.world.daemon_joins(node)
        self.deliver()

    @rule(node=nodes)
    def daemon_goes(self, node: int) -> None:
        self.world.send(ev.DaemonLeft(connection=10 + node))
        self.deliver()

    @rule(node=nodes)
    def node_goes(self, node: int) -> None:
        self.world.node_leaves(node)
        self.deliver()

    @rule(node=nodes, generation=st.integers(0, 3))
    def daemon_comes_back(self, node: int, generation: int) -> None:
        self.world.daemon_joins(node, executor_generation=generation)
        self.deliver()

    @rule(silent=st.sets(nodes), silent_daemons=st.sets(nodes))
    def some_are_silent(self, silent: set[int], silent_daemons: set[int]) -> None:
        self.world.passes(20.0, silent=silent, silent_daemons=silent_daemons)
        self.deliver()

    @rule(node=nodes)
    def executor_comes(self, node: int) -> None:
        record = self.world.state.formation.nodes[node]
        if record.executor and record.executor_connection is None:
            self.world.executor_joins(node)
            self.deliver()

    @rule(node=nodes, misses_another=st.booleans())
    def executor_dies(self, node: int, misses_another: bool = False) -> None:
        if self.world.state.formation.nodes[node].executor:
            (self.world.executor_misses_another if misses_another else self.world.executor_dies)(node)
            self.deliver()

    @rule(node=nodes)
    def stream_breaks(self, node: int) -> None:
        record = self.world.state.formation.nodes[node]
        if record.executor_connection is not None:
            self.world.send(ev.ExecutorLeft(connection=record.executor_connection))
            self.deliver()

    @rule(node=nodes, fails=st.booleans(), writes_all=st.booleans())
    def executor_answers(self, node: int, fails: bool, writes_all: bool) -> None:
        if self.inbox[node]:
            order = self.inbox[node].popleft()
            error = (
                ExecutionError("no")
                if fails and saves.is_file_work(order) | isinstance(order, do.RunOnWorkers)
                else None
            )
            self.world.done(order.sequence, node, error=error, written_bytes=4 if writes_all else 0)
            self.deliver()

    @rule(node=nodes, limit_s=st.sampled_from([3.0, 30.0]))
    def node_drains(self, node: int, limit_s: float) -> None:
        self.world.send(ev.DrainRequested(connection=10 + node, reason="notice", limit_s=limit_s))
        self.deliver()

    @rule(seconds=st.sampled_from([0.5, 20.0, 70.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.later(seconds)
        self.deliver()

    @rule(seconds=st.sampled_from([5.0, 15.0]))
    def time_passes_in_ticks(self, seconds: float) -> None:
        """So that cancelled steps are ended, and too long ones."""
        self.world.passes(seconds)
        self.deliver()

    # ---- a client ----------------------------------------------------------
    @precondition(lambda self: not self.has_session)
    @rule()
    def opens(self) -> None:
        self.world.send(ev.SessionRequested(call=1, session_id="s"))
        self.has_session = "s" in self.world.state.sessions
        self.next_number = 1
        self.dispatched.clear()
        self.deliver()

    @rule()
    def connects(self) -> None:
        self.stream += 1
        self.world.send(ev.StepsOpened(stream=self.stream, session_id="s"))
        self.deliver()

    @rule()
    def disconnects(self) -> None:
        self.world.send(ev.StepsClosed(stream=self.stream))
        self.deliver()

    @rule()
    def loads(self) -> None:
        self.world.send(ev.LoadRequested(call=2, session_id="s", plan_id="plan"))
        self.deliver()

    @rule()
    def abandons_a_load(self) -> None:
        self.world.send(ev.LoadAbandoned(call=2, session_id="s", plan_id="plan"))
        self.deliver()

    @rule()
    def unloads(self) -> None:
        self.world.send(ev.UnloadRequested(call=3, session_id="s", executable_id="plan"))
        self.deliver()

    @rule(array_id=ids, node=nodes)
    def puts(self, array_id: int, node: int) -> None:
        record = self.world.state.formation.nodes[node]
        if record.executor_connection is not None:
            self.world.arrives(array_id, node)
            self.deliver()

    @rule(arguments=st.tuples(ids, ids), back=st.integers(0, 3))
    def steps(self, arguments: tuple[int, int], back: int) -> None:
        """The next step, or an older one again."""
        number = max(1, self.next_number - back)
        self.next_id += 2
        session = self.world.state.sessions.get("s")
        accepted = session.last_number if session else 0
        self.world.step(number, arguments, (self.next_id, self.next_id + 1), stream=self.stream)
        if session is not None and session.last_number > accepted:
            self.next_number = session.last_number + 1
        self.deliver()

    @rule(array_id=ids)
    def reads_a_batch(self, array_id: int) -> None:
        session = self.world.state.sessions.get("s")
        accepted = session.last_number if session else 0
        batch = ev.BatchStepInfo(output_bytes=(8,))
        self.world.step(self.next_number, (), (array_id,), stream=self.stream, executable_id="", batch=batch)
        if session is not None and session.last_number > accepted:
            self.next_number = session.last_number + 1
        self.deliver()

    @rule(array_id=ids)
    def saves(self, array_id: int) -> None:
        session = self.world.state.sessions.get("s")
        accepted = session.last_number if session else 0
        files = ev.FileStepInfo(is_save=True)
        self.world.step(self.next_number, (array_id,), (), stream=self.stream, executable_id="", files=files)
        if session is not None and session.last_number > accepted:
            self.next_number = session.last_number + 1
        self.deliver()

    @rule(back=st.integers(0, 3))
    def waits_for_a_save(self, back: int) -> None:
        self.next_call += 1
        self.waiting.add(self.next_call)
        self.world.send(ev.SaveAwaited(call=self.next_call, session_id="s", number=max(1, self.next_number - back)))
        self.deliver()

    @rule(back=st.integers(-1, 3))
    def cancels(self, back: int) -> None:
        number = max(1, self.next_number - back)
        self.world.send(ev.StepsCancelled(call=6, session_id="s", numbers=(number,)))
        self.deliver()

    @rule(array_ids=st.lists(ids, max_size=3).map(tuple), ahead=st.integers(-1, 2))
    def releases(self, array_ids: tuple[int, ...], ahead: int) -> None:
        after = max(0, self.next_number - 1 + ahead)
        self.world.send(ev.ReleaseRequested(call=4, session_id="s", array_ids=array_ids, after_step=after))
        self.deliver()

    @rule()
    def closes(self) -> None:
        self.world.send(ev.SessionClosed(call=5, session_id="s"))
        self.deliver()

    # ---- what always holds -------------------------------------------------
    @invariant()
    def each_step_runs_once(self) -> None:
        self.has_session = "s" in self.world.state.sessions
        assert all(count == 1 for count in self.dispatched.values())

    @invariant()
    def replies_come_in_order(self) -> None:
        for numbers in self.replied.values():
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))

    def teardown(self) -> None:
        """Once the cluster is well and all executors answered, every accepted step has an outcome."""
        world, formation = self.world, self.world.state.formation
        if world.state.drain is not None:
            for node in world.state.drain.nodes or ():
                world.node_leaves(node)
            world.later(0.5)
            assert world.state.drain is None
        for node in range(NODES):
            if formation.nodes[node].daemon is None:
                world.daemon_joins(node)
        for _ in range(3):
            world.now_s += world.limits.last_retry_s
            world.passes(0.5)
            for node in range(NODES):
                record = formation.nodes[node]
                if formation.phase == "stopping" and record.executor:
                    world.executor_dies(node)
            for node in range(NODES):
                record = formation.nodes[node]
                if formation.phase == "starting" and record.executor and record.executor_connection is None:
                    world.executor_joins(node)
        self.deliver()
        if formation.phase != "ready":
            return  # given up: too many generations failed to start
        for _ in range(3):
            while any(self.inbox.values()):
                for node in range(NODES):
                    if self.inbox[node]:
                        world.done(self.inbox[node].popleft().sequence, node)
                self.deliver()
            world.later(world.limits.argument_wait_s + 1)
            self.deliver()
        for session in world.state.sessions.values():
            assert not session.running
            assert session.current_save is None
            assert not any(isinstance(item.request, ev.StepRequested) for item in session.queue)
        assert not self.waiting, "whoever waited for a save was told"


MasterHistory.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestMasterHistory = MasterHistory.TestCase
