"""Which XLA the rules are for."""

from __future__ import annotations

import pytest

from shardwright.planner.rules import linear


@pytest.fixture
def earlier_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules for XLA before it kept all partial sums, whichever is installed."""
    monkeypatch.setattr(linear, "xla_version", lambda: (0, 10, 2))
