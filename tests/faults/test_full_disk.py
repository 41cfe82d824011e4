"""Saves on a disk that gets full: what was complete stays, and saves go on once there is room."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import shardwright as sw
from tests.recovery.small_disk import full_disk, small_disk

pytestmark = pytest.mark.dear

#: Bytes of the disk, and floats of a save of which there is room for two, and of a small one.
DISK_BYTES, LARGE, SMALL = 48 << 20, 4 << 20, 64 << 10


@pytest.fixture(scope="module")
def session() -> Iterator[sw.Session]:
    with sw.connect(devices=2) as session:
        yield session


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """Of checkpoints; on a small disk, which has nothing else."""
    with small_disk(tmp_path, DISK_BYTES) as disk:
        if not disk.is_mount():  # only root may mount one
            pytest.skip("this process may not mount a disk")
        yield disk / "run"


def state_of(number: int, size: int) -> dict[str, np.ndarray]:
    return {"w": np.random.default_rng(number).random(size, np.float32)}


def require(session: sw.Session, directory: Path, size: int, *numbers: int) -> None:
    """These are the checkpoints, they are right, and there is nothing else."""
    assert session.checkpoints(directory) == numbers
    assert sorted(path.name for path in directory.iterdir()) == [str(number) for number in numbers]
    for number in numbers:
        restored = session.restore(directory, step=number)
        np.testing.assert_array_equal(np.asarray(restored["w"]), state_of(number, size)["w"])


def test_a_save_that_does_not_fit_costs_none_of_the_others(session: sw.Session, directory: Path) -> None:
    for number in (1, 2):
        session.save(state_of(number, LARGE), directory, step=number).wait()
    with pytest.raises(sw.CheckpointError, match="its disk is full") as refusal:
        session.save(state_of(3, LARGE), directory, step=3).wait()
    assert refusal.value.where == str(directory)
    assert "free space" in refusal.value.remedy
    require(session, directory, LARGE, 1, 2)

    shutil.rmtree(directory / "1")
    session.save(state_of(3, LARGE), directory, step=3).wait()
    require(session, directory, LARGE, 2, 3)


def test_older_ones_go_once_the_new_one_is_complete(session: sw.Session, directory: Path) -> None:
    """There must be room for it beside them."""
    for number in (1, 2):
        session.save(state_of(number, LARGE), directory, step=number).wait()
    with pytest.raises(sw.CheckpointError, match="its disk is full"):
        session.save(state_of(3, LARGE), directory, step=3, max_to_keep=1).wait()
    require(session, directory, LARGE, 1, 2)
    shutil.rmtree(directory / "1")
    session.save(state_of(3, LARGE), directory, step=3, max_to_keep=1).wait()
    require(session, directory, LARGE, 3)


def test_wherever_in_a_save_the_disk_gets_full_nothing_of_it_stays(session: sw.Session, directory: Path) -> None:
    """There is room for nothing, then for the arrays and ever more of the files about them."""
    session.save(state_of(1, SMALL), directory, step=1).wait()
    disk, page = directory.parent, os.statvfs(directory).f_frsize
    for spare in (0, *range(4 * SMALL // page, 8 * SMALL // page)):
        reserved = disk / "reserved"
        reserved.write_bytes(bytes(spare * page))
        with full_disk(disk):
            reserved.unlink()
            try:
                session.save(state_of(2, SMALL), directory, step=2).wait()
                break
            except sw.CheckpointError as error:
                said = error.message
            assert "its disk is full" in said
            require(session, directory, SMALL, 1)
    require(session, directory, SMALL, 1, 2)
