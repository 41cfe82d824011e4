"""A few of the schedules of `make soak`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recovery.soak import run_schedules

pytestmark = pytest.mark.cluster


def test_seeded_faults_change_nothing(tmp_path: Path) -> None:
    told: list[str] = []
    run_schedules(range(3), tmp_path, told.append)
    assert len(told) == 3
