"""A plugin of pytest: each rank's outcomes as JSON lines, written at once, so that a job that is ended leaves them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

_FILE = Path(os.environ["RANK_REPORT"], f"{os.environ['HOROVOD_RANK']}.jsonl")


def _write(**record: object) -> None:
    with _FILE.open("a") as report:
        report.write(json.dumps(record) + "\n")


def pytest_runtest_logstart(nodeid: str) -> None:
    """A test begins."""
    _write(test=nodeid.rpartition("::")[2], outcome="begun", seconds=0.0, text="")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A part of a test is over: its setup, itself, or what comes after it."""
    if report.when == "call" or report.outcome != "passed":
        text = "" if report.outcome == "passed" else report.longreprtext.strip()[-600:]
        _write(test=report.nodeid.rpartition("::")[2], outcome=report.outcome, seconds=report.duration, text=text)
