"""tests/durations.json: what tests cost, and that the quick ones are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from scripts import durations

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "durations.json"

#: CPU seconds of a function with all its items: what costs more is marked `dear`.
QUICK_FUNCTION_S = 4.0
#: A busy machine measures more.
_ALLOWANCE = 1.5

#: Of all quick tests: under six minutes of two cores.
QUICK_TIER_S = 700.0

_MEASURED = """
import pytest

@pytest.mark.parametrize("item", [1, 2])
def test_sums(item):
    sum(range(20_000_000))

@pytest.mark.dear
def test_marked(): ...

def test_skipped():
    pytest.skip("not here")
"""


def rows() -> dict[str, durations.Row]:
    return json.loads(TABLE.read_text())


#: Run in environments of their own.
_ELSEWHERE = ("tests/keras_frontend/", "tests/tensorflow_frontend/", "tests/torch_frontend/")


def test_every_test_file_has_a_row() -> None:
    """A new file's: run it with --junit-xml=REPORT, then scripts/durations.py REPORT."""
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
    assert set(rows()) == files
    assert [file for file, row in rows().items() if not row and not file.startswith(_ELSEWHERE)] == []


def test_what_computes_for_long_is_marked() -> None:
    dear = {
        f"{file}::{name}": spent_s
        for file, row in rows().items()
        if "quick" in row
        for name, spent_s in row["quick"]["functions"].items()
        if spent_s > QUICK_FUNCTION_S * _ALLOWANCE
    }
    assert dear == {}


def test_quick_tests_together_take_minutes() -> None:
    spent_s = sum(row["quick"]["cpu_s"] for row in rows().values() if "quick" in row)
    assert spent_s <= QUICK_TIER_S


def test_a_report_becomes_rows_by_mark_and_function(tmp_path: Path) -> None:
    """From a run of pytest with the suite's own hooks."""
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "test_measured.py").write_text(_MEASURED)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    dear: costs\n    cluster: waits\n")
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # the copied hooks import from tests/
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, timeout=60)
    row = durations.sum_cases(list(durations.read_cases(report)))["test_measured.py"]
    assert set(row) == {"quick", "dear"}
    assert row["quick"]["functions"].keys() <= {"test_sums"}
    assert 0.1 < row["quick"]["cpu_s"] < 10
    merged = durations.merge_rows({"gone.py": row, "test_other.py": row}, {}, ["test_other.py"])
    assert merged == {"test_other.py": row}
