"""The model of the snapshot protocol finds nothing; and it finds the faults that were there."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from shardwright.server.master import snapshots
from tests.recovery.snapshot_model import STEPS, SnapshotHistory, run

FEW = settings(
    max_examples=12, stateful_step_count=STEPS, deadline=None, database=None, derandomize=True,
    suppress_health_check=list(HealthCheck), phases=(Phase.generate,),
)  # fmt: skip


def few(first_seed: int) -> None:
    run_state_machine_as_test(seed(first_seed)(type("Few", (SnapshotHistory,), {})), settings=FEW)


def test_nothing_that_may_be_restored_is_dropped() -> None:
    few(0)


def test_it_finds_daemons_that_go_by_what_the_master_remembers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they did: whatever is on the disk, and whatever the client knows."""
    monkeypatch.setattr(snapshots, "_restorable", lambda snapshot: (snapshot.complete,))
    monkeypatch.setattr(snapshots, "_oldest", lambda snapshot: snapshot.complete)
    with pytest.raises(AssertionError, match=r"was dropped, and (its client would restore it|the store may name it)"):
        few(0)


@pytest.mark.dear
def test_nothing_is_dropped_in_many_histories() -> None:
    run(10_000, first_seed=1000)
