"""Eight CPU devices for every test, set before anything imports JAX; nothing is answered from plans of other runs.

Every test's CPU seconds go into the report that --junit-xml writes.
"""

from __future__ import annotations

import atexit
import importlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

from tests.light_compilation import LIGHT_COMPILATION

_DEVICES = "--xla_force_host_platform_device_count"

os.environ["JAX_PLATFORMS"] = "cpu"
if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}=8".strip()
if "xla_backend_optimization_level" not in os.environ["XLA_FLAGS"]:
    os.environ["XLA_FLAGS"] += f" {LIGHT_COMPILATION}"
os.environ["SHARDWRIGHT_CACHE"] = "off"
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or each of a thousand processes would compile every module again
sys.dont_write_bytecode = False
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="shardwright-state-")  # tokens of the servers that tests start
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

for _signal, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_signal) is signal.SIG_IGN:  # what a shell has put in the background hears no Ctrl-C
        signal.signal(_signal, _handler)


# ---- what a test costs: scripts/durations.py makes tests/durations.json of it ---------------------------------
_START = pytest.StashKey[os.times_result]()


def _cpu_s_since(start: os.times_result) -> float:
    """Of this process and its ended children; no more than there were, of children that began in earlier tests."""
    now = os.times()
    return min(sum(now[:4]) - sum(start[:4]), (now.elapsed - start.elapsed) * (os.cpu_count() or 1))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    item.stash[_START] = os.times()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """CPU seconds of a test with its fixtures, and its mark, as properties of its case in --junit-xml's file."""
    if call.when == "teardown":
        marks = [mark for mark in ("cluster", "dear") if item.get_closest_marker(mark)]
        item.user_properties += [("cpu_s", f"{_cpu_s_since(item.stash[_START]):.2f}"), ("mark", (*marks, "quick")[0])]
    return (yield)


# ---- two nodes of two devices, one pair a process, for every test that needs no others -------------------------
@pytest.fixture(scope="session")
def started_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """As the last test left them; `two_nodes` and `healed` mend them first."""
    # By name: it imports JAX, and concerns those tests alone that import it, too.
    nodes = importlib.import_module("tests.two_nodes").TwoNodes(tmp_path_factory.mktemp("two_nodes"))
    yield nodes
    nodes.stop()


@pytest.fixture(scope="module")
def two_nodes(started_nodes: Any) -> Any:
    """A `TwoNodes` that is as new for each module, for fixtures of a module."""
    started_nodes.heal()
    return started_nodes


@pytest.fixture
def healed(two_nodes: Any) -> Iterator[Any]:
    """A `Running` that is as new for each test: servers, and a session that ends with the test."""
    two_nodes.heal()
    session = two_nodes.connect()
    yield two_nodes.servers, session
    session._state.close_quietly()
