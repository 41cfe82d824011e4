"""A master is killed, one row of its state is damaged, and it is started again: who is told what, and who goes on."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

import shardwright as sw
from tests.recovery.test_restarted_master import Cluster

pytestmark = pytest.mark.cluster


def damage(folder: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(folder / "state" / "state.sqlite3", isolation_level=None)) as database:
        assert database.execute(statement, values).rowcount >= 1


def flipped(folder: Path, table: str, column: str) -> bytes:
    with closing(sqlite3.connect(folder / "state" / "state.sqlite3")) as database:
        (data,) = database.execute(f"SELECT {column} FROM {table} LIMIT 1").fetchone()
    bits = bytearray(data)
    bits[len(bits) // 2] ^= 1
    return bytes(bits)


def test_one_session_is_lost_by_name_and_the_other_goes_on(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 2)
    lost = cluster.connect(name="run-lost")
    try:
        double = cluster.session.parallelize(lambda x: x * 2)
        value = double(np.full((8, 4), 3, np.float32))
        lost_double = lost.parallelize(lambda x: x * 2)
        float(lost_double(np.float32(1)))
        cluster.kill_master()
        damage(tmp_path, "UPDATE sessions SET last_number = 'abc' WHERE name = 'run-lost'")
        damage(tmp_path, "UPDATE binaries SET partitioned_gzip = ?", flipped(tmp_path, "binaries", "partitioned_gzip"))
        cluster.start_server(0)
        np.testing.assert_array_equal(np.asarray(double(value)), np.full((8, 4), 12, np.float32))
        with pytest.raises(sw.SessionError, match=r"the server's state was damaged .*column last_number"):
            float(lost_double(np.float32(1)))
        with pytest.raises(sw.SessionError, match="column last_number"):
            sw.connect(cluster.address, name="run-lost")
        with sw.connect(cluster.address, name="run-lost") as again:
            assert again.resume() is None
        assert len(list((tmp_path / "state").glob("*.damaged-*"))) == 1
    finally:
        lost._state.close_quietly()
        cluster.stop()
