"""One cluster for the folder: what one test leaves in it does not disturb the next."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.security import people
from tests.security.people import PeoplesCluster
from tests.server.raw_client import RawClient


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PeoplesCluster]:
    with people.running(tmp_path_factory.mktemp("cluster")) as running:
        running.client("alice").close()  # its servers have found each other
        yield running


@pytest.fixture
def alice(cluster: PeoplesCluster) -> Iterator[RawClient]:
    client = cluster.client("alice")
    yield client
    client.close()


@pytest.fixture
def bob(cluster: PeoplesCluster) -> Iterator[RawClient]:
    client = cluster.client("bob")
    yield client
    client.close()


@pytest.fixture
def olga(cluster: PeoplesCluster) -> RawClient:
    """The operator, without a session."""
    return RawClient(cluster.address, people.TOKENS["olga"])
