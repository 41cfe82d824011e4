"""Skipped where torch is not installed. One embedded server of four devices for the folder."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

import shardwright as sw

try:
    import torch  # noqa: F401
except ImportError:
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ["KERAS_BACKEND"] = "torch"


@pytest.fixture(scope="session")
def session() -> Iterator[sw.Session]:
    with sw.connect(devices=4) as session:
        yield session
