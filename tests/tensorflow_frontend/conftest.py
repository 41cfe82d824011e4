"""Skipped where TensorFlow is not installed. One embedded server of four devices for the folder."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest

import shardwright as sw

if importlib.util.find_spec("tensorflow") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ["KERAS_BACKEND"] = "tensorflow"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


@pytest.fixture(scope="session")
def session() -> Iterator[sw.Session]:
    with sw.connect(devices=4) as session:
        yield session


@pytest.fixture(autouse=True)
def plain_names() -> None:
    """Each test's layers are numbered from the start."""
    if "collect_ignore_glob" not in globals():
        import keras

        keras.utils.clear_session()
