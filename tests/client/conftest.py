"""One embedded server for the whole folder, and one cluster of two workers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import shardwright as sw
from tests.client.clusters import Clusters


@pytest.fixture(scope="session")
def session() -> Iterator[sw.Session]:
    with sw.connect(devices=8) as session:
        yield session


@pytest.fixture(scope="session")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clusters]:
    clusters = Clusters(tmp_path_factory.mktemp("clusters"))
    yield clusters
    clusters.stop()


@pytest.fixture
def two_workers(clusters: Clusters) -> sw.Session:
    return clusters.session(2)
