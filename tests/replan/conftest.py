"""One embedded server of eight devices for the whole folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import shardwright as sw


@pytest.fixture(scope="session")
def session() -> Iterator[sw.Session]:
    with sw.connect(devices=8) as session:
        yield session
