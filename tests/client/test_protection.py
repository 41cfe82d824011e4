"""What a session would restore after a loss, and that one which lost all is protected again."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shardwright.client.cluster_view import ClusterView
from shardwright.client.connection import MasterConnection
from shardwright.client.handles import Handles
from shardwright.client.journal import Journal
from shardwright.client.limits import FAILED_SNAPSHOTS
from shardwright.client.protection import Protection
from shardwright.client.recovery import Recovery
from shardwright.client.step_result import StepResult
from shardwright.client.stream import StepStream
from shardwright.errors import SnapshotLostError, WorkerLostError
from shardwright.plans.layouts import Layout
from shardwright.proto.v1 import master_pb2
from shardwright.protocol import wire
from tests.server.raw_client import wait_until

ARRAY = cast(Layout, SimpleNamespace(size_bytes=8))


def protected(journal: Journal) -> Protection:
    protection = Protection(journal)
    protection.ask(5)
    protection.turn_on(0)
    return protection


def take(protection: Protection, number: int) -> None:
    assert protection.may_begin(number)
    protection.begin(protection.note_all(number, {}), StepResult(number, "a snapshot"))


def add(journal: Journal, array_id: int) -> None:
    request = master_pb2.RunStepsRequest(outputs=[array_id])
    journal.add_step(request, StepResult(array_id, "step", is_repeated=True), [(array_id, ARRAY)], ())


def test_the_journal_holds_what_the_snapshot_that_would_be_restored_lacks() -> None:
    journal = Journal()
    protection = protected(journal)
    add(journal, 1)
    take(protection, 2)
    add(journal, 3)
    assert (len(journal.entries), protection.message.snapshot) == (2, 0), "2 is not complete: all begins anew"
    assert protection.complete(9) is None, "that is another one"
    assert protection.complete(2) is not None
    assert (len(journal.entries), protection.message.snapshot) == (1, 2)
    take(protection, 4)
    protection.begin_recovery()
    assert protection.complete(4) is None, "it is restored from 2"
    assert (len(journal.entries), protection.message.snapshot) == (1, 2)


def test_who_is_not_protected_says_so() -> None:
    journal = Journal()
    assert not Protection(journal).message.is_wanted
    journal.live[7] = ARRAY
    protection = protected(journal)
    assert protection.message == master_pb2.Protection(is_wanted=True), "7 is in no snapshot"
    take(protection, 1)
    protection.complete(1)
    assert protection.message == master_pb2.Protection(is_wanted=True, is_ready=True, snapshot=1)
    for number in range(2, 2 + FAILED_SNAPSHOTS):
        take(protection, number)
        protection.fail(number)
    assert protection.message == master_pb2.Protection(is_wanted=True)
    take(protection, 9)
    protection.complete(9)
    assert protection.message.is_ready
    protection.give_up()
    assert protection.message == master_pb2.Protection(is_wanted=True)
    assert protection.is_lost
    protection.turn_on(0)
    assert protection.message == master_pb2.Protection(is_wanted=True, is_ready=True)


class Servers:
    """Executors that were lost, with their snapshots, and run again. heard: what the client said of its protection."""

    def __init__(self) -> None:
        self.heard: list[master_pb2.Protection] = []

    def run_steps(self, requests: Iterator[master_pb2.RunStepsRequest]) -> Any:
        return _Replies(self._reply(requests))

    def _reply(self, requests: Iterator[master_pb2.RunStepsRequest]) -> Iterator[master_pb2.RunStepsReply]:
        for request in requests:
            if request.HasField("protection"):
                self.heard.append(request.protection)
            if request.HasField("restore_snapshot"):
                lost = SnapshotLostError("it is lost", remedy="run init again")
                yield master_pb2.RunStepsReply(number=request.number, error=wire.error_to_proto(lost))
            elif request.number:
                yield master_pb2.RunStepsReply(number=request.number)

    def status(self) -> master_pb2.StatusReply:
        node = master_pb2.NodeStatus(node=master_pb2.Node(index=0, device_count=1), state="ready", generation=2)
        return master_pb2.StatusReply(nodes=[node])

    def require_session(self, status: master_pb2.StatusReply) -> None:
        """It is there."""


class _Replies:
    def __init__(self, replies: Iterator[master_pb2.RunStepsReply]) -> None:
        self._replies = replies

    def __iter__(self) -> Iterator[master_pb2.RunStepsReply]:
        return self._replies

    def initial_metadata(self) -> tuple[()]:
        return ()

    def cancel(self) -> None:
        """They end with the requests."""


def test_a_session_that_lost_all_is_protected_again_by_its_next_call(caplog: pytest.LogCaptureFixture) -> None:
    servers = Servers()
    stream = StepStream(servers.run_steps, "s", reconnect_s=5.0)
    master = SimpleNamespace(status=servers.status, require_session=servers.require_session)
    cluster = SimpleNamespace(
        master=master, info=SimpleNamespace(is_elastic=False), take_nodes=lambda nodes: None, epoch=0
    )
    lost_states = []

    def lose_kept() -> bool:
        lost_states.append("kept")
        return True

    recovery = Recovery(
        cast(ClusterView, cluster),
        Handles(cast(MasterConnection, master), stream),
        stream,
        lambda uploads, may_retry: None,
        relocate=lambda base, entries, check: 0,
        lose_kept=lose_kept,
    )
    assert not recovery.begin(5)
    wait_until(lambda: bool(servers.heard))
    recovery.note_loss(WorkerLostError("the executors were lost"))
    wait_until(lambda: not recovery.is_on)
    recovery.wait_until_over()
    error = stream.take_error()
    assert isinstance(error, SnapshotLostError)
    assert "not protected now" in error.remedy
    assert "call keep again" in error.remedy
    assert lost_states
    recovery.begin_again()
    assert recovery.is_on
    assert "protected anew" in caplog.text
    wait_until(lambda: len(servers.heard) == 3)
    assert [(each.is_wanted, each.is_ready) for each in servers.heard] == [(True, True), (True, False), (True, True)]
    stream.close()
