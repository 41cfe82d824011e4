"""Random histories of the snapshot protocol: every order of disk, network and death.

    python -m tests.recovery.snapshot_model --steps 100000 --seed 0

What the store may name after the master's next death, and what a client would restore, is whole in the daemons that
have stored it and live; its contents are right, and the client's journal reaches on from it.
"""

from __future__ import annotations

import argparse
import logging
import time

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from shardwright.server.master import machine
from tests.recovery.snapshot_parts import NODES
from tests.recovery.snapshot_world import World

nodes = st.integers(0, NODES - 1)
names = st.sampled_from(["a", "b"])
few = st.integers(1, 6)

STEPS = 50

ACTORS = ("clients_go_on", "daemons_go_on", "executors_go_on", "write_all")
CLIENT_WORK = ("hear_client", "hear_master", "recover", "join_client", "protect")
NODE_WORK = ("work", "store", "hear_executor", "hear_daemon", "join_daemon", "join_executor", "carry_out_late_offer")
CLIENT_FAULTS = ("break_client", "end_client", "close_session")
NODE_FAULTS = ("break_daemon", "end_executor", "end_daemon")


class SnapshotHistory(RuleBasedStateMachine):
    """Two sessions on three nodes. counted: rules carried out by all histories so far."""

    counted = 0
    restores = 0
    completed = 0

    def __init__(self) -> None:
        super().__init__()
        self._log = logging.getLogger("shardwright.server")
        self._level = self._log.level
        self._log.setLevel(logging.CRITICAL)
        self.world = World()
        self.closed = dict.fromkeys(("a", "b"), 0)  # sessions of each name so far

    def id_of(self, name: str) -> str:
        """Of the session that has the name now."""
        return f"{name}{self.closed[name]}"

    @initialize()
    def forms(self) -> None:
        """A cluster with a session: few histories get as far by chance."""
        self.world.settle()
        self.client_comes("a")
        self.world.settle()
        self.client_comes("a")
        self.world.settle()

    # ---- what goes on ----------------------------------------------------------------------

    @rule(name=names, chosen=st.integers(0, 7), frees=st.booleans(), count=few)
    def steps(self, name: str, chosen: int, frees: bool, count: int) -> None:
        for _ in range(count):
            self.world.step(self.id_of(name), chosen, frees=frees)

    @rule(what=st.sampled_from(CLIENT_WORK), name=names, count=few)
    def client_goes_on(self, what: str, name: str, count: int) -> None:
        for _ in range(count):
            getattr(self.world, what)(self.id_of(name))

    @rule(what=st.sampled_from(NODE_WORK), node=nodes, count=few)
    def node_goes_on(self, what: str, node: int, count: int) -> None:
        for _ in range(count):
            getattr(self.world, what)(node)

    @rule(who=st.lists(st.sampled_from(ACTORS), min_size=1, max_size=3), rounds=few)
    def some_go_on(self, who: list[str], rounds: int) -> None:
        for _ in range(rounds):
            for each in who:
                getattr(self.world, each)()

    @rule(name=names, count=st.integers(3, 9), disk=st.sampled_from([99, 3, 0]))
    def trains(self, name: str, count: int, disk: int) -> None:
        """Steps, and what comes of them."""
        self.client_comes(name)
        for _ in range(count):
            self.world.step(self.id_of(name), 1, frees=True)
            self.world.go_on()
            self.disk_writes(disk)

    @rule(count=st.integers(0, 6))
    def disk_writes(self, count: int) -> None:
        for _ in range(count):
            self.world.disk.end_one()

    @rule()
    def all_settles(self) -> None:
        self.world.settle()
        for name in ("a", "b"):
            self.client_comes(name)
        self.world.settle()

    @rule(name=names)
    def client_comes(self, name: str) -> None:
        self.world.open_client(self.id_of(name))
        self.world.protect(self.id_of(name))

    @rule()
    def time_passes(self) -> None:
        self.world.tick()

    # ---- what goes wrong -------------------------------------------------------------------

    @rule(what=st.sampled_from(CLIENT_FAULTS), name=names)
    def client_fails(self, what: str, name: str) -> None:
        getattr(self.world, what)(self.id_of(name))
        self.closed[name] += what == "close_session"

    @rule(what=st.sampled_from(NODE_FAULTS), node=nodes)
    def node_fails(self, what: str, node: int) -> None:
        getattr(self.world, what)(node)

    @rule(is_late=st.booleans(), node=nodes, count=few)
    def disk_or_daemon_fails(self, is_late: bool, node: int, count: int) -> None:
        """The disk is full; or a daemon answers an offer too late, and carries it out some time."""
        if is_late:
            self.world.store(node, is_late=True)
        else:
            for _ in range(count):
                self.world.disk.end_one(fails=True)

    @rule(written=st.integers(0, 9), cut=st.integers(0, 3), executors_live=st.booleans())
    def master_dies(self, written: int, cut: int, executors_live: bool) -> None:
        """And is started again: cut, written: see `World.end_master`."""
        self.world.end_master(written, cut)
        if not executors_live:
            self.world.executors.clear()
        self.world.start_master()

    @invariant()
    def all_holds(self) -> None:
        type(self).counted += 1
        if self.world.state is not None:
            machine.check_invariants(self.world.state)
        self.world.check_all()

    def teardown(self) -> None:
        """Nothing waits for ever, and nothing is kept for ever."""
        self._log.setLevel(self._level)
        world = self.world
        world.settle()
        world.check_all()
        for client in world.clients.values():
            assert client.protection.pending is None, "its end is never told"
        type(self).restores += world.restores
        type(self).completed += world.completed
        assert world.state is not None
        for name in list(world.state.sessions):
            world.close_session(name)
        world.settle()
        world.tick()
        world.late.clear()
        world.settle()
        assert not any(daemon.store.held_bytes for daemon in world.daemons), "parts of sessions that ended"


def run(steps: int, first_seed: int) -> None:
    """At least so many steps. Raises what a history finds."""
    count, number = 0, first_seed
    while count < steps:
        machine = type("SeededHistory", (SnapshotHistory,), {"counted": 0})
        chosen = settings(
            max_examples=100, stateful_step_count=STEPS, deadline=None, database=None,
            suppress_health_check=list(HealthCheck), phases=(Phase.generate, Phase.shrink),
        )  # fmt: skip
        run_state_machine_as_test(seed(number)(machine), settings=chosen)
        count += machine.counted
        number += 1
        print(f"{count} steps, {machine.completed} snapshots, {machine.restores} restores", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    began_s = time.monotonic()
    run(options.steps, options.seed)
    print(f"nothing was lost; {time.monotonic() - began_s:.0f} s")


if __name__ == "__main__":
    main()
