"""Select the tests that a change can affect.

    python scripts/select_tests.py [BASE]

Prints the paths of tests to run, `tests` where it is all of them, and on standard error why. BASE: a commit; without it
the one in tests/passed.txt, at which everything passed last. What is compared are the files as they lie here.

A file of the product selects what `AREAS` says of its folder. A file of tests, or of what stands around the product,
selects the tests that import it, over any number of files between; a helper in a folder of tests and a conftest.py
that folder, too, for what is started by name. Everything is selected by files that no rule names, by rooms that all
others use, by the selection itself, where BASE is no ancestor, and where it is more than `COMMITS_AT_MOST` commits ago.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
PASSED = "tests/passed.txt"
EVERYTHING = ("tests",)

#: About ten landings.
COMMITS_AT_MOST = 100

#: Seconds each: layers, names in documents, marks and the rest that any file can break.
ALWAYS = (
    "tests/test_docs.py", "tests/test_durations.py", "tests/test_layers.py", "tests/test_tuning_numbers.py",
    "tests/test_structure.py",
)  # fmt: skip

FRONTENDS = ("tests/keras_frontend", "tests/tensorflow_frontend", "tests/torch_frontend")
DOCUMENTS = (
    "tests/test_docs.py", "tests/test_site.py", "tests/test_snippets.py", "tests/operators/test_deployment.py",
    "tests/keras_frontend/test_documents.py", "tests/tensorflow_frontend/test_documents.py",
)  # fmt: skip
PIPELINES = (
    "tests/planner/pipeline", "tests/planner/stages", "tests/tasks", "tests/client/test_pipelines.py",
    "tests/client/test_pipeline_failures.py", "tests/server/test_pipeline_executor.py",
    "tests/server/test_task_runner.py", "tests/recovery/test_pipelines.py", "tests/elasticity/test_pipelines.py",
    "tests/cli/test_pipeline_commands.py",
)  # fmt: skip
#: Whole plans: golden ones, exhaustive search, numbers, caches, deadlines.
PLANS = ("tests/planner/test_*.py", "tests/planner/plans", "tests/cli", "tests/builders")
SERVED = (
    "tests/client", "tests/datasets", "tests/elasticity", "tests/faults", "tests/recovery", "tests/replan",
    "tests/security",
)  # fmt: skip

#: For what of the client knows nothing of lost nodes and servers.
ON_CLIENT = ("tests/client", "tests/replan", "tests/cli", "tests/test_docs.py")

#: Files under a folder, or a file → tests. The longest that fits counts.
AREAS: Mapping[str, tuple[str, ...]] = {
    "builders": ("tests/builders", "tests/planner/test_*.py", "tests/replan", *DOCUMENTS),
    "client": (*SERVED, "tests/builders", "tests/examples", "tests/operators", *DOCUMENTS, *FRONTENDS),
    "client/alternatives.py": ON_CLIENT,
    "client/annotate.py": ON_CLIENT,
    "client/announcement.py": ON_CLIENT,
    "client/argument_checks.py": ON_CLIENT,
    "client/array_operators.py": ON_CLIENT,
    "client/array_specs.py": ON_CLIENT,
    "client/dumps.py": ON_CLIENT,
    "client/frontends": (*FRONTENDS, "tests/client/test_public_names.py"),
    "client/initializer.py": ON_CLIENT,
    "client/local_statistics.py": ON_CLIENT,
    "client/lowering.py": ON_CLIENT,
    "client/pins.py": ON_CLIENT,
    "client/placement.py": ON_CLIENT,
    "client/plan_trials.py": ON_CLIENT,
    "client/pytrees.py": ON_CLIENT,
    "client/step_report.py": ON_CLIENT,
    "client/step_trace.py": ON_CLIENT,
    "client/tuning.py": ON_CLIENT,
    "client/tuning_record.py": ON_CLIENT,
    "launch": ("tests/launch", "tests/ranks", "tests/cli", "tests/test_membership.py", "tests/test_input_files.py"),
    "planner": (
        "tests/planner", "tests/cost", "tests/xla", "tests/report", "tests/benchmarks", "tests/cli", "tests/builders",
        "tests/replan", "tests/client/test_training.py", "tests/client/test_pipelines.py", "tests/examples",
    ),
    "planner/cache": (*PLANS, "tests/planner/warm_start", "tests/client/test_kept_plans.py", "tests/replan"),
    "planner/memory": (
        *PLANS, "tests/planner/memory", "tests/planner/search", "tests/planner/segments", "tests/planner/solver",
        "tests/planner/warm_start", "tests/cost",
    ),
    "planner/microbatch": (
        *PLANS, *PIPELINES, "tests/planner/microbatch", "tests/planner/memory", "tests/planner/search",
    ),
    "planner/pipeline": (*PLANS, *PIPELINES, "tests/benchmarks", "tests/report"),
    "planner/plans": (*PLANS, "tests/xla", "tests/report", "tests/client/test_training.py"),
    "planner/rewrites": (
        *PLANS, "tests/planner/rewrites", "tests/planner/microbatch", "tests/planner/memory", "tests/xla",
    ),
    "planner/search": (
        *PLANS, "tests/planner/search", "tests/planner/memory", "tests/planner/warm_start", "tests/replan",
    ),
    "planner/segments": (
        *PLANS, "tests/planner/segments", "tests/planner/search", "tests/planner/memory", "tests/planner/warm_start",
    ),
    "planner/solver": (*PLANS, "tests/planner/solver", "tests/planner/search", "tests/planner/segments"),
    "planner/stages": (*PLANS, *PIPELINES),
    "planner/warm_start": (*PLANS, "tests/planner/warm_start", "tests/replan"),
    "ranks": ("tests/ranks", "tests/test_membership.py", *FRONTENDS),
    "server": (*SERVED, "tests/server", "tests/operators", "tests/launch", "tests/fuzz", "tests/cli"),
    "shardwright/checkpoints": (*SERVED, "tests/checkpoints", "tests/server", "tests/fuzz"),
    "shardwright/cli": ("tests/cli", "tests/launch", "tests/operators", "tests/report", "tests/test_docs.py"),
    "shardwright/cost": (
        "tests/cost", "tests/planner", "tests/benchmarks", "tests/builders", "tests/cli", "tests/report", "tests/xla",
    ),
    "shardwright/horovod": ("tests/ranks", *FRONTENDS),
    "shardwright/keras.py": ("tests/keras_frontend", "tests/client/test_public_names.py"),
    "shardwright/report": ("tests/report", "tests/cli", "tests/client", "tests/planner/plans", "tests/fuzz"),
    "shardwright/tasks": (*PIPELINES, "tests/report", "tests/fuzz"),
    "shardwright/tensorflow.py": ("tests/tensorflow_frontend", "tests/client/test_public_names.py"),
    "shardwright/torch.py": ("tests/torch_frontend", "tests/client/test_public_names.py"),
    # Around the product: what runs them, beside what imports them.
    ".importlinter": (),  # `make check` reads it, at every landing
    "Makefile": ("tests/test_running.py", *DOCUMENTS),  # a runner that loses tests would lose them of all, too
    "benchmarks": ("tests/benchmarks",),
    "cluster_configs": ("tests/clusters", "tests/cli", "tests/examples", *DOCUMENTS),
    "deploy": ("tests/operators",),
    "docs": DOCUMENTS,
    "examples": ("tests/examples", *DOCUMENTS, *FRONTENDS),
    "launch_worker.sh": ("tests/server", "tests/launch"),
    "mkdocs.yml": DOCUMENTS,
    "oracles": ("tests/oracles",),
    "scripts": (),
    "scripts/generate_protos.py": EVERYTHING,
    "scripts/install.py": EVERYTHING,
    "scripts/run_tests.py": ("tests/test_running.py",),
    "scripts/select_tests.py": EVERYTHING,
    "scripts/site_pages.py": DOCUMENTS,
    "scripts/test_frontends.sh": FRONTENDS,
    "tests/durations.json": (),
    "tests/two_nodes.py": ("tests/datasets", "tests/faults", "tests/recovery", "tests/replan", "tests/server"),
    PASSED: (),
    "workloads": (),
}  # fmt: skip

#: Tests and what stands around the product: these files know by their imports whom they concern.
AROUND = ("benchmarks", "examples", "oracles", "scripts", "tests", "workloads")


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Tests, and for each file that selected some which ones; `EVERYTHING` where it is all."""

    paths: tuple[str, ...]
    reasons: tuple[str, ...]


# ---- who imports whom ------------------------------------------------------------------------------------------------
@cache
def read_imports(root: Path = ROOT) -> dict[str, frozenset[str]]:
    """Of each file of tests and around the product: the files among them that it imports."""
    files = {
        str(path.relative_to(root)): path
        for folder in AROUND
        for path in (root / folder).rglob("*.py")
        if "__pycache__" not in path.parts
    }
    return {name: frozenset(_imported_files(path, files)) for name, path in files.items()}


def _imported_files(path: Path, files: Mapping[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        modules: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module:
            modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        for module in modules:
            stem = module.replace(".", "/")
            yield from (name for name in (f"{stem}.py", f"{stem}/__init__.py") if name in files)


def find_importers(changed: str, imports: Mapping[str, frozenset[str]]) -> set[str]:
    """Files that import a file, over any number of files between."""
    importers: set[str] = set()
    news = {changed}
    while news:
        news = {name for name, imported in imports.items() if imported & news} - importers
        importers |= news
    return importers


# ---- what a file selects ---------------------------------------------------------------------------------------------
def select_for(changed: str, imports: Mapping[str, frozenset[str]]) -> tuple[str, ...]:
    """Paths of tests for a changed file; `EVERYTHING` where no rule names it."""
    path = PurePosixPath(changed)
    if path.suffix == ".md" and path.parts[0] != "tests":
        return DOCUMENTS
    areas = [area for area in AREAS if path.is_relative_to(area)]
    by_area = AREAS[max(areas, key=len)] if areas else ()
    if path.parts[0] in AROUND and path.suffix == ".py":
        return (*_select_by_imports(path, imports), *by_area)
    if path.parts[0] == "tests" and len(path.parts) > 2:
        return (str(PurePosixPath(*path.parts[:2])),)
    return by_area if areas else EVERYTHING


def _select_by_imports(path: PurePosixPath, imports: Mapping[str, frozenset[str]]) -> Iterator[str]:
    for name in sorted({str(path), *find_importers(str(path), imports)}):
        file = PurePosixPath(name)
        if file.name.startswith("test_"):
            yield name
        elif file.name == "conftest.py" or (file == path and file.parts[0] == "tests" and len(file.parts) > 2):
            yield str(file.parent)


def select(changed: Iterable[str], root: Path = ROOT) -> Selection:
    imports = read_imports(root)
    paths: set[str] = set(ALWAYS)
    reasons: list[str] = []
    for name in sorted(changed):
        tests = select_for(name, imports)
        if not set(EVERYTHING).isdisjoint(tests):
            return Selection(paths=EVERYTHING, reasons=(f"everything: {name} concerns all tests, or no rule names it",))
        reasons.append(f"{name}: {' '.join(tests) or 'nothing more'}")
        paths |= set(tests)
    return Selection(paths=_without_repeats(paths, root), reasons=tuple(reasons))


def _without_repeats(paths: Iterable[str], root: Path) -> tuple[str, ...]:
    """Those that are there, patterns as their files, none that lies in another's folder."""
    names = {str(each.relative_to(root)) for path in paths for each in root.glob(path)}
    return tuple(sorted(name for name in names if not names & {str(each) for each in PurePosixPath(name).parents}))


# ---- what has changed ------------------------------------------------------------------------------------------------
def _git(root: Path, *arguments: str) -> list[str]:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.splitlines()


def read_base(root: Path = ROOT) -> str | None:
    path = root / PASSED
    return path.read_text().strip() if path.exists() else None


def select_since(base: str | None, root: Path = ROOT, commits_at_most: int = COMMITS_AT_MOST) -> Selection:
    if base is None:
        return Selection(paths=EVERYTHING, reasons=(f"everything: there is no {PASSED}",))
    try:
        _git(root, "merge-base", "--is-ancestor", base, "HEAD")
    except subprocess.CalledProcessError:
        return Selection(paths=EVERYTHING, reasons=(f"everything: {base} is no ancestor of HEAD in this clone",))
    commits = int(_git(root, "rev-list", "--count", f"{base}..HEAD")[0])
    if commits > commits_at_most:
        return Selection(paths=EVERYTHING, reasons=(f"everything: {commits} commits since {base} are too many",))
    changed = _git(root, "diff", "--name-only", "--no-renames", base)
    return select({*changed, *_git(root, "ls-files", "--others", "--exclude-standard")}, root)


def main(arguments: Sequence[str]) -> None:
    selection = select_since(arguments[0] if arguments else read_base())
    print("\n".join(selection.reasons), file=sys.stderr)
    print(*selection.paths)


if __name__ == "__main__":
    main(sys.argv[1:])
