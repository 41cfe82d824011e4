"""How many objects the fuzzer tries: `pytest tests/ranks --fuzz-objects 10000`."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-objects", type=int, default=60, help="objects that tests/ranks/test_objects.py tries")
