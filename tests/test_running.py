"""scripts/run_tests.py: two commands side by side, what failed once more, pytest's closing line last."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from scripts import run_tests
from scripts.run_tests import Group, groups_of, run_groups

_TESTS = """
import pathlib, pytest

FLAG = pathlib.Path(__file__).with_name("flag")

@pytest.mark.cluster
def test_fails_the_first_time():
    if not FLAG.exists():
        FLAG.touch()
        pytest.fail("beside others")

def test_computes(): ...
"""

GROUPS = (Group(name="computing", marks="not cluster", how=()), Group(name="cluster", marks="cluster", how=()))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with tests of its own that stands for this repository."""
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    cluster: waits\n")
    monkeypatch.setattr(run_tests, "ROOT", tmp_path)
    monkeypatch.setattr(run_tests, "REPORTS", tmp_path / "reports")
    monkeypatch.setattr(run_tests, "PASSED", tmp_path / "passed.txt")
    return tmp_path


def test_what_failed_beside_others_runs_once_more(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (project / "test_them.py").write_text(_TESTS)
    assert run_groups(GROUPS, []) == 0
    output = capfd.readouterr().out
    assert "beside others" in output
    assert "what failed (cluster), once more, alone:" in output
    assert re.search(r"1 passed.* in [\d.]+s.*$", output.rstrip().splitlines()[-1])
    assert {path.name for path in (project / "reports").glob("*.xml")} == {"computing.xml", "cluster.xml"}


def test_a_fault_fails_again_and_an_empty_part_does_not(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (project / "test_them.py").write_text("def test_fault():\n    assert 1 == 2\n")
    assert run_groups(GROUPS, []) == 1
    assert "1 failed" in capfd.readouterr().out.rstrip().splitlines()[-1]


def test_the_commit_is_written_where_nothing_lies_beside_it(project: Path) -> None:
    for words in ("init --quiet", "add .", "-c user.name=T -c user.email=t@example.com commit --quiet -m One"):
        subprocess.run(["git", *words.split()], cwd=project, check=True)
    (project / "beside.py").write_text("")
    run_tests.write_passed()
    assert not (project / "passed.txt").exists()
    (project / "beside.py").unlink()
    run_tests.write_passed()
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=project, check=True, capture_output=True, text=True).stdout
    assert (project / "passed.txt").read_text() == head


def test_every_test_is_in_one_group_of_all_tiers() -> None:
    assert [group.marks for group in groups_of("all", 2)] == ["not cluster", "cluster"]
    assert [group.marks for group in groups_of("quick", 2)] == ["not cluster and not dear"]
