"""One folder of plans for the servers of a folder's tests: each text is planned once for each cluster."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", autouse=True)
def kept_plans(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Of this run of the tests alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDWRIGHT_CACHE", str(tmp_path_factory.mktemp("plans")))
        yield
