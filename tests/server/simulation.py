"""A world for `MasterState`: daemons, executors and clients that are numbers, and a clock that is moved by hand."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, TypeVar

from shardwright.server.limits import Limits
from shardwright.server.master import commands as do
from shardwright.server.master import events as ev
from shardwright.server.master import machine
from shardwright.server.master.nodes import Identity, Member
from shardwright.server.master.state import MasterState

IDENTITY = Identity(cluster_hash="h", shardwright_version="1", jax_version="2")
WAIT_S = 100.0
TICK_S = 0.5
PROGRAM = ev.ProgramInfo(plan_id="plan", argument_count=2, donated=frozenset({0}), output_bytes=(8, 4))

#: Of jaxlib 0.9.
MISSES_ANOTHER = (
    "F0101 client.cc:80] Terminating process because the JAX distributed service detected fatal errors. This most "
    "likely indicates that another task died; see the other task logs for more details."
)

C = TypeVar("C")


@dataclass
class World:
    """`send` an event; commands pile up in `commands`, orders to executors in `orders`."""

    node_count: int = 2
    limits: Limits = field(default_factory=lambda: Limits(pending_steps=4, sessions=2, session_array_bytes=1000))
    now_s: float = 0.0
    commands: list[do.Command] = field(default_factory=list)
    orders: list[do.ToWorkers] = field(default_factory=list)
    generation_of: dict[int, int] = field(default_factory=dict)  # node → generation it was told to start
    names_by_hand: bool = False  # whether the answers of the store are the test's
    heard: dict[int, dict[str, Any]] = field(default_factory=dict)  # node → what its executor says that it is doing

    def __post_init__(self) -> None:
        members = tuple(
            Member(index=index, address=f"host:{index}", device_count=4) for index in range(self.node_count)
        )
        self.state = MasterState.create(members, IDENTITY, self.limits, wait_s=WAIT_S)

    def send(self, event: ev.Event) -> list[do.Command]:
        commands = machine.handle(self.state, event, self.now_s)
        machine.check_invariants(self.state)
        self.commands += commands
        self.orders += [command for command in commands if isinstance(command, do.ToWorkers)]
        for command in commands:
            if isinstance(command, do.StartExecutor):
                self.generation_of[command.process_id] = command.generation
            if isinstance(command, do.NameSnapshot) and not self.names_by_hand:
                self.send(ev.SnapshotNamed(session_id=command.session_id, number=command.number))
        return commands

    def take(self, kind: type[C]) -> list[C]:
        """Commands of a kind so far, forgotten afterwards."""
        results = [command for command in self.commands if isinstance(command, kind)]
        self.commands = [command for command in self.commands if not isinstance(command, kind)]
        return results

    def later(self, seconds: float) -> list[do.Command]:
        self.now_s += seconds
        return self.send(ev.Tick())

    def passes(
        self, seconds: float, *, silent: Collection[int] = (), silent_daemons: Collection[int] = ()
    ) -> list[do.Command]:
        """Time in ticks, with signs of life of all but these nodes' executors and daemons; what came of it."""
        commands: list[do.Command] = []
        for _ in range(round(seconds / TICK_S)):
            for connection, node in self.state.formation.connections.items():
                if node not in silent:
                    commands += self.send(ev.ExecutorHeard(connection=connection, **self.heard.get(node, {})))
            for node, record in self.state.formation.nodes.items():
                if record.daemon is not None and node not in silent_daemons:
                    commands += self.send(ev.DaemonHeard(connection=record.daemon))
            commands += self.later(TICK_S)
        return commands

    # ---- nodes: daemon connections are 10 + node, executor connections 100·generation + node ----
    def daemon_joins(self, node: int, /, **wrong: object) -> list[do.Command]:
        hello: dict[str, object] = {
            "connection": 10 + node, "node": node, "cluster_hash": "h", "shardwright_version": "1",
            "jax_version": "2", "coordinator_address": f"host:{node}",
        }  # fmt: skip
        return self.send(ev.DaemonJoined(**(hello | wrong)))  # type: ignore[arg-type]

    def executor_connection(self, node: int) -> int:
        return 100 * self.generation_of[node] + node

    def executor_joins(self, node: int, device_count: int = 4) -> list[do.Command]:
        return self.send(
            ev.ExecutorJoined(
                connection=self.executor_connection(node), node=node, generation=self.generation_of[node],
                data_address=f"host:{9000 + node}", device_count=device_count, pid=1000 + node,
            )
        )  # fmt: skip

    def executor_dies(self, node: int, exit_code: int = -9, last_lines: str = "a\nlast words") -> list[do.Command]:
        return self.send(
            ev.ExecutorExited(
                connection=10 + node, generation=self.generation_of[node], exit_code=exit_code, last_lines=last_lines,
                coordinator_address=f"host:{node}",
            )
        )  # fmt: skip

    def executor_misses_another(self, node: int) -> list[do.Command]:
        """It is ended by jax.distributed, as after another one's end."""
        return self.executor_dies(node, exit_code=-6, last_lines=MISSES_ANOTHER)

    def node_leaves(self, node: int) -> None:
        """Its daemon died, and its executor with it."""
        connection = self.state.formation.nodes[node].executor_connection
        self.send(ev.DaemonLeft(connection=10 + node))
        if connection is not None:
            self.send(ev.ExecutorLeft(connection=connection))

    def form(self) -> None:
        """All nodes are there, all executors run."""
        for node in range(self.node_count):
            self.daemon_joins(node)
        for node in range(self.node_count):
            self.executor_joins(node)

    def all_done(self, **how: object) -> None:
        """Every executor carries out every order so far, and what comes of it."""
        while self.orders:
            order = self.orders.pop(0)
            for node in range(self.node_count):
                self.done(order.sequence, node, **how)

    def all_done_of(self, kind: type[do.Command], **how: object) -> None:
        """Every executor carries out the orders of this kind so far; the others wait."""
        orders = [order for order in self.orders if isinstance(order, kind)]
        self.orders = [order for order in self.orders if not isinstance(order, kind)]
        for order in orders:
            for node in range(self.node_count):
                self.done(order.sequence, node, **how)

    def done(self, sequence: int, node: int, **how: object) -> list[do.Command]:
        connection = self.executor_connection(node)
        return self.send(ev.CommandDone(connection=connection, sequence=sequence, **how))  # type: ignore[arg-type]

    # ---- a session "s" with the executable "plan" and the stream 1 ----
    def open_session(self) -> None:
        self.send(ev.SessionRequested(call=1, session_id="s"))
        self.all_done()
        self.send(ev.StepsOpened(stream=1, session_id="s"))

    def load(self, program: ev.ProgramInfo = PROGRAM) -> None:
        self.send(ev.LoadRequested(call=2, session_id="s", plan_id=program.plan_id))
        self.send(ev.CompileFinished(plan_id=program.plan_id, program=program))
        self.all_done()

    def arrives(self, array_id: int, *nodes: int, devices: range = range(1 << 20)) -> None:
        for node in nodes or range(self.node_count):
            connection = self.executor_connection(node)
            array = ev.UploadedArray(array_id=array_id, size_bytes=8, devices=devices)
            self.send(ev.ArraysUploaded(connection=connection, session_id="s", arrays=(array,)))

    def step(self, number: int, arguments: tuple[int, ...], outputs: tuple[int, ...], **more: object) -> None:
        step: dict[str, object] = {"stream": 1, "session_id": "s", "executable_id": "plan"} | more
        self.send(ev.StepRequested(number=number, arguments=arguments, outputs=outputs, **step))  # type: ignore[arg-type]

    def runs(self) -> list[int]:
        """Numbers of the steps that executors were told to run, so far."""
        return [order.step.number for order in self.orders if isinstance(order, do.RunOnWorkers)]


def ready_world(node_count: int = 2) -> World:
    """A formed cluster, an open session, a loaded program; arrays 1 and 2 are there."""
    world = World(node_count=node_count)
    world.form()
    world.open_session()
    world.load()
    world.arrives(1)
    world.arrives(2)
    world.commands.clear()
    return world
