"""Saves on a disk that gets full: what was complete stays, and saves go on once there is room."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import shardwright as sw
from tests.recovery.small_disk import small_disk

pytestmark = pytest.mark.slow

#: Bytes of the disk, and floats of a save: there is room for two.
DISK_BYTES, SIZE = 48 << 20, 4 << 20


def state_of(number: int) -> np.ndarray:
    return np.random.default_rng(number).random(SIZE, np.float32)


def test_a_save_that_does_not_fit_costs_none_of_the_others(tmp_path: Path) -> None:
    with small_disk(tmp_path, DISK_BYTES) as disk, sw.connect(devices=2) as session:
        if not disk.is_mount():
            pytest.skip("this process may not mount a disk")
        directory = disk / "run"

        def require(*numbers: int) -> None:
            """These are the checkpoints, they are right, and there is nothing else."""
            assert session.checkpoints(directory) == numbers
            assert sorted(path.name for path in directory.iterdir()) == [str(number) for number in numbers]
            for number in numbers:
                restored = session.restore(directory, step=number)
                np.testing.assert_array_equal(np.asarray(restored["w"]), state_of(number))

        for number in (1, 2):
            session.save({"w": state_of(number)}, directory, step=number).wait()
        with pytest.raises(sw.CheckpointError, match="its disk is full") as refusal:
            session.save({"w": state_of(3)}, directory, step=3).wait()
        assert (refusal.value.where, "free space" in refusal.value.remedy) == (str(directory), True)
        require(1, 2)

        shutil.rmtree(directory / "1")
        session.save({"w": state_of(3)}, directory, step=3).wait()
        require(2, 3)

        # Older ones are removed once the new one is complete: there must be room for it beside them.
        with pytest.raises(sw.CheckpointError, match="its disk is full"):
            session.save({"w": state_of(4)}, directory, step=4, max_to_keep=1).wait()
        require(2, 3)
        shutil.rmtree(directory / "2")
        session.save({"w": state_of(4)}, directory, step=4, max_to_keep=1).wait()
        require(4)
