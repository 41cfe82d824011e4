"""A clock that shows the same on a busy machine."""

from __future__ import annotations

import pytest

from shardwright.planner.clock import Clock


@pytest.fixture
def just_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deadline of nearly nothing has passed, and its grace has not, however long planning takes on this machine."""
    monkeypatch.setattr(Clock, "elapsed_s", property(lambda _: 0.1))
