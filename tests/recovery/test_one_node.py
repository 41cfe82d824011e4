"""A server of one node: its executor is killed, its daemon keeps the snapshots."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import shardwright as sw
from tests.recovery.training import assert_same, run, train


def kill_executor(session: sw.Session) -> None:
    import psutil

    server = session._state.server
    assert server is not None
    for child in psutil.Process(server.pid).children(recursive=True):
        if "worker.executor" in " ".join(child.cmdline()):
            child.kill()


@pytest.fixture(scope="module")
def session() -> Iterator[sw.Session]:
    with sw.connect(devices=2, snapshot_every=5) as session:
        yield session


def test_training_goes_on_with_the_same_losses(session: sw.Session) -> None:
    expected = run(session, 20)

    def disturb(number: int) -> None:
        if number == 13:
            kill_executor(session)

    before = len(session.recoveries)
    assert_same(run(session, 20, after_call=disturb), expected)
    assert len(session.recoveries) == before + 1


def test_wrong_options() -> None:
    with sw.connect(devices=1) as session:
        for wrong in (0, -1, 2.5, True, "10"):
            with pytest.raises(sw.OptionError, match="snapshot_every"):
                session.parallelize(train, snapshot_every=wrong)  # type: ignore[arg-type]
    with pytest.raises(sw.OptionError, match="snapshot_every"):
        sw.connect(snapshot_every=0)
