"""A worker's daemon without a network: `DaemonState`."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from shardwright.errors import AuthenticationError, ClusterConfigError, ServerUnavailableError
from shardwright.server.worker import state as st_

AWAY = st_.ConnectionLost(error=ServerUnavailableError("nobody there"))


def start(generation: int) -> st_.StartRequested:
    return st_.StartRequested(
        generation=generation, coordinator_address="h:1", process_count=1, process_id=0, data_port=0
    )


def exited(generation: int) -> st_.ChildExited:
    return st_.ChildExited(generation=generation, exit_code=1, last_lines="")


def joined() -> st_.DaemonState:
    state = st_.DaemonState(master_address="h:1", wait_s=10.0)
    assert state.handle(st_.ConnectionOpened(), 0.0) == [st_.SayHello(generation=0)]
    return state


def test_dialing_backs_off_and_gives_up_after_the_wait() -> None:
    state = st_.DaemonState(master_address="h:1", wait_s=10.0)
    now_s, delays = 0.0, []
    while isinstance(command := state.handle(AWAY, now_s)[0], st_.Dial):
        delays.append(command.delay_s)
        now_s += command.delay_s
    assert delays[:4] == [0.1, 0.2, 0.4, 0.8]
    assert max(delays) == st_.LAST_RETRY_S
    assert now_s == 10.0
    assert isinstance(command, st_.Exit)
    assert command.code == 75
    assert "did not answer within 10 s" in str(command.error)


def test_a_wrong_token_is_not_tried_again() -> None:
    state = st_.DaemonState(master_address="h:1", wait_s=10.0)
    error = AuthenticationError("no")
    assert state.handle(st_.ConnectionLost(error=error), 0.0) == [st_.Exit(code=1, error=error)]


def test_executors_follow_each_other() -> None:
    state = joined()
    assert state.handle(start(1), 0.0) == [st_.Spawn(start=start(1))]
    assert state.handle(st_.StopRequested(generation=1), 0.0) == [st_.KillExecutor(generation=1)]
    assert state.handle(exited(1), 0.0) == [st_.ReportExit(child=exited(1))]
    assert state.handle(start(2), 0.0) == [st_.Spawn(start=start(2))]
    assert state.handle(start(3), 0.0) == [st_.KillExecutor(generation=2)], "never two at once: they share devices"
    assert state.handle(exited(2), 0.0) == [st_.Spawn(start=start(3))], "nobody asks for the forgotten one"


def test_a_lost_master_is_dialed_again_and_told_of_the_executor() -> None:
    state = joined()
    state.handle(start(1), 0.0)
    commands = state.handle(AWAY, 100.0)
    assert [type(command) for command in commands] == [st_.Log, st_.Dial], "the executor looks after itself"
    assert state.handle(st_.ConnectionOpened(), 101.0) == [st_.SayHello(generation=1)]
    assert state.handle(AWAY, 102.0)
    assert state.handle(exited(1), 101.0) == [], "nobody to tell"
    assert state.handle(st_.ConnectionOpened(), 101.0) == [st_.SayHello(generation=0)]


def test_every_end_waits_for_the_executor() -> None:
    refusal = ClusterConfigError("files differ")
    for event, code in (
        (st_.NodeRefused(error=refusal), 1),
        (st_.MasterEnded(reason="stopping"), 0),
        (st_.MasterEnded(reason="gave up", is_failure=True), 75),
        (st_.ExitRequested(exit_code=130), 130),
    ):
        state = joined()
        state.handle(start(1), 0.0)
        commands = state.handle(event, 0.0)
        assert st_.KillExecutor(generation=1) in commands
        assert not any(isinstance(command, st_.Exit) for command in commands)
        (end,) = state.handle(exited(1), 0.0)
        assert isinstance(end, st_.Exit)
        assert end.code == code


def test_a_drain_ends_with_the_masters_word_or_without_a_master() -> None:
    notice = st_.DrainRequested(reason="SIGTERM")
    for event in (st_.MasterEnded(reason="it has drained"), st_.DrainExpired(), AWAY):
        state = joined()
        state.handle(start(1), 0.0)
        assert state.handle(notice, 0.0) == [st_.AskToDrain(reason="SIGTERM")]
        assert state.handle(notice, 0.0) == []
        assert st_.KillExecutor(generation=1) in state.handle(event, 0.0)
        assert state.handle(exited(1), 0.0) == [st_.Exit(code=0)]
    alone = st_.DaemonState(master_address="h:1", wait_s=10.0)
    assert alone.handle(notice, 0.0) == [st_.Exit(code=0)], "nothing runs that could end"


class DaemonHistory(RuleBasedStateMachine):
    """Any events in any order: at most one executor, and an end is an end."""

    def __init__(self) -> None:
        super().__init__()
        self.state = st_.DaemonState(master_address="h:1", wait_s=10.0)
        self.running: set[int] = set()
        self.exits = 0
        self.now_s = 0.0

    @rule(
        event=st.one_of(
            st.just(st_.ConnectionOpened()),
            st.just(AWAY),
            st.integers(1, 5).map(start),
            st.integers(1, 5).map(lambda generation: st_.StopRequested(generation=generation)),
            st.just(st_.MasterEnded(reason="r")),
            st.just(st_.ExitRequested(exit_code=130)),
            st.just(st_.DrainRequested(reason="r")),
            st.just(st_.DrainExpired()),
        ),
        seconds=st.sampled_from([0.0, 3.0]),
    )
    def happens(self, event: st_.Event, seconds: float) -> None:
        self.now_s += seconds
        self.take(self.state.handle(event, self.now_s))

    @rule()
    def child_exits(self) -> None:
        if self.running:
            self.take(self.state.handle(exited(self.running.pop()), self.now_s))

    def take(self, commands: list[st_.Command]) -> None:
        for command in commands:
            if isinstance(command, st_.Spawn):
                assert not self.running, "two executors would share the devices"
                self.running.add(command.start.generation)
            if isinstance(command, st_.Exit):
                assert not self.running, "nothing is left running"
                self.exits += 1

    @invariant()
    def holds(self) -> None:
        self.state.check_invariants()
        assert self.exits <= 1


DaemonHistory.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestDaemonHistory = DaemonHistory.TestCase
