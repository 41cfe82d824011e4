"""One child that compiles for the whole folder: what XLA says of memory is of real programs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shardwright.xla import CompileService


@pytest.fixture(scope="session")
def service() -> Iterator[CompileService]:
    with CompileService(8, children=1) as service:
        yield service
