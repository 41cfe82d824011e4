"""A short run of mutated messages to a live server; `make fuzz` runs it for longer."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.fuzz import messages
from tests.server.raw_client import embedded

pytestmark = pytest.mark.cluster

#: Seconds after which a busy machine has seen enough of them.
LIMIT_S = 20.0


def test_mutated_messages_are_answered_by_type(tmp_path: Path) -> None:
    for server, client in embedded(messages.DEVICES, *messages.OPTIONS):
        end_s = time.monotonic() + LIMIT_S
        report = messages.run(
            server, client, tmp_path, count=2000, seed=20240229, is_over=lambda end_s=end_s: time.monotonic() > end_s
        )
        assert not report.problems, "\n\n".join(report.problems)
        assert report.answered > 50
