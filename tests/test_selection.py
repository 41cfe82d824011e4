"""scripts/select_tests.py: what a change selects, and when it selects everything."""

from __future__ import annotations

import subprocess
from pathlib import Path

from scripts import select_tests
from scripts.select_tests import AREAS, EVERYTHING, select, select_since

ROOT = Path(__file__).resolve().parents[1]


def is_selected(test: str, *changed: str) -> bool:
    paths = select(changed).paths
    return any(Path(test).is_relative_to(path) for path in paths)


def test_the_table_names_what_there_is() -> None:
    assert [area for area in AREAS if area != select_tests.PASSED and not (ROOT / area).exists()] == []
    tests = {path for paths in AREAS.values() for path in paths} | {*select_tests.ALWAYS}
    assert [path for path in tests if not list(ROOT.glob(path))] == []


SHARED = (
    "pyproject.toml", ".ci/run", "tests/conftest.py", "scripts/select_tests.py", "shardwright/plans/plan.py",
    "protos/shardwright/proto/v1/master.proto", "new_room/file.py",
)  # fmt: skip


def test_shared_rooms_the_selection_and_unknown_files_select_everything() -> None:
    selections = {changed: select([changed, "planner/search/search.py"]) for changed in SHARED}
    assert [changed for changed, selection in selections.items() if selection.paths != EVERYTHING] == []
    assert [changed for changed, selection in selections.items() if changed not in selection.reasons[0]] == []


#: Changed file, a test that it selects, one that it does not.
CASES = (
    ("planner/search/search.py", "tests/planner/test_golden.py", "tests/ranks/test_ranks.py"),
    ("planner/rules/dot.py", "tests/planner/rules/test_linear.py", "tests/faults/test_load.py"),
    ("planner/stages/cut.py", "tests/server/test_pipeline_executor.py", "tests/client/test_session.py"),
    ("client/lowering.py", "tests/client/test_lowering.py", "tests/faults/test_load.py"),
    ("client/session.py", "tests/faults/test_load.py", "tests/planner/test_golden.py"),
    ("client/a_new_file.py", "tests/recovery/test_losses.py", "tests/planner/test_golden.py"),
    ("server/master/state.py", "tests/recovery/test_losses.py", "tests/planner/test_golden.py"),
    ("ranks/fusion.py", "tests/torch_frontend/test_ranks.py", "tests/server/test_crowds.py"),
    ("launch/ssh.py", "tests/launch/test_ssh_jobs.py", "tests/torch_frontend/test_ranks.py"),
    ("docs/options.md", "tests/test_snippets.py", "tests/cli/test_options.py"),
    ("tests/client/clusters.py", "tests/faults/test_reconnect.py", "tests/planner/test_golden.py"),
    ("tests/ranks/check_training.py", "tests/ranks/test_ranks.py", "tests/server/test_crowds.py"),
    ("tests/client/conftest.py", "tests/client/test_session.py", "tests/server/test_crowds.py"),
    ("tests/hlo/corpus/new.hlo", "tests/hlo/test_hlo_corpus.py", "tests/server/test_crowds.py"),
    ("tests/planner/test_golden.py", "tests/planner/test_golden.py", "tests/planner/test_plan.py"),
    ("benchmarks/gpu_targets.py", "tests/builders/test_bucket_fusion.py", "tests/server/test_crowds.py"),
    ("scripts/import_graph.py", "tests/test_structure.py", "tests/server/test_crowds.py"),
    ("scripts/run_tests.py", "tests/test_running.py", "tests/planner/test_golden.py"),
    ("scripts/test_frontends.sh", "tests/torch_frontend/test_steps.py", "tests/planner/test_golden.py"),
    ("Makefile", "tests/test_snippets.py", "tests/planner/test_golden.py"),
    (".importlinter", "tests/test_layers.py", "tests/planner/test_golden.py"),
    ("tests/tables.py", "tests/test_tables.py", "tests/server/test_crowds.py"),
    ("tests/two_nodes.py", "tests/recovery/test_losses.py", "tests/planner/test_golden.py"),
)


def test_a_file_selects_its_area() -> None:
    assert [test for case in CASES for test in case[1:] if not (ROOT / test).exists()] == []
    assert [case for case in CASES if not is_selected(case[1], case[0]) or is_selected(case[2], case[0])] == []


def test_what_everything_passed_at_selects_next_to_nothing() -> None:
    assert set(select([select_tests.PASSED]).paths) == set(select_tests.ALWAYS)


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=Test", "-c", "user.email=test@example.com"]
    return subprocess.run(
        ["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_what_changed_since_a_commit(tmp_path: Path) -> None:
    for name in (
        "planner/search/a.py",
        "tests/planner/test_golden.py",
        "tests/planner/search/test_a.py",
        "tests/test_docs.py",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "One")
    base = git(tmp_path, "rev-parse", "HEAD")
    assert select_since(base, tmp_path).paths == ("tests/test_docs.py",)

    (tmp_path / "planner/search/a.py").write_text("1\n")
    searched = ("tests/planner/search", "tests/planner/test_golden.py", "tests/test_docs.py")
    assert select_since(base, tmp_path).paths == searched  # before it is committed, too
    git(tmp_path, "commit", "--quiet", "--all", "-m", "Two")
    assert select_since(base, tmp_path).paths == searched

    assert select_since(base, tmp_path, commits_at_most=0).paths == EVERYTHING
    (tmp_path / "unheard_of.py").write_text("")
    assert select_since(base, tmp_path).paths == EVERYTHING
    for unknown in (None, "0" * 40):
        assert select_since(unknown, tmp_path).paths == EVERYTHING
