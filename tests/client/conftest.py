"""One embedded server for the whole folder, and the models that are trained on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import shardwright as sw


@pytest.fixture(scope="session")
def session() -> Iterator[sw.Session]:
    with sw.connect(devices=8) as session:
        yield session
