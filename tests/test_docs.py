"""What the documents say can be done can be done: commands parse, links lead somewhere, tables are complete."""

from __future__ import annotations

import ast
import inspect
import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from shardwright import __version__
from shardwright.cli.app import build_parser
from shardwright.client.session import Session
from shardwright.offline import plan
from tests.snippets.blocks import DOCUMENTS, ROOT

#: Folders whose files documents name by path.
FOLDERS = (
    "shardwright", "client", "launch", "planner", "server", "examples", "cluster_configs", "docs", "benchmarks",
    "oracles", "workloads", "tests",
)  # fmt: skip


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(), re.DOTALL)


def commands() -> list[str]:
    """Every `shardwright …` line of the documents' shell blocks and of the commands' own help."""
    shell = [line for path in DOCUMENTS for block in blocks(path, "sh") for line in block.splitlines()]
    parser = build_parser()
    helps = next(action.choices for action in parser._actions if isinstance(action.choices, dict))
    shell += [line.strip() for command in helps.values() for line in (command.epilog or "").splitlines()]
    parts = [part.strip() for line in shell for part in line.split("#")[0].split("|")]
    return sorted({part for part in parts if part.startswith("shardwright ")})


@pytest.mark.parametrize("command", commands())
def test_command_lines_parse(command: str) -> None:
    build_parser().parse_args(shlex.split(command)[1:])


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_named_files_exist(path: Path) -> None:
    text = path.read_text()
    targets = [target for target in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in target]
    assert [target for target in targets if not (path.parent / target).exists()] == []
    named = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w/.*-]+)`", text)
    assert [name for name in named if not list(ROOT.glob(name))] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_python_blocks_are_python(path: Path) -> None:
    for block in blocks(path, "python"):
        ast.parse(block)


def test_decisions_are_listed_by_their_titles() -> None:
    decisions = ROOT / "docs" / "adr"
    listed = re.findall(r"^- \[(\d{4} .+)\]\((.+)\)$", (decisions / "README.md").read_text(), re.MULTILINE)
    titles = [(path.read_text().splitlines()[0].removeprefix("# "), path.name) for path in decisions.glob("[0-9]*.md")]
    assert sorted(listed) == sorted(titles)


def test_decisions_are_short() -> None:
    lines = {path.name: len(path.read_text().splitlines()) for path in (ROOT / "docs" / "adr").glob("[0-9]*.md")}
    assert {name: count for name, count in lines.items() if count > 40} == {}


def test_every_key_of_a_cluster_file_is_explained() -> None:
    schema = json.loads((ROOT / "shardwright" / "clusters" / "cluster.schema.json").read_text())
    options = (ROOT / "docs" / "options.md").read_text()
    results = [*schema["properties"], *schema["properties"]["security"]["properties"]]
    results += [*schema["properties"]["links"]["properties"], *schema["$defs"]["node"]["properties"]]
    results += [*schema["$defs"]["link"]["properties"]]
    assert [key for key in results if f"`{key}`" not in options and f'"{key}"' not in options] == []


def test_every_option_of_a_plan_is_explained() -> None:
    rows = set(
        re.findall(
            r"`(\w+)`",
            "\n".join(re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / "options.md").read_text(), re.MULTILINE)),
        )
    )
    parameters = {*inspect.signature(Session.parallelize).parameters, *inspect.signature(plan).parameters}
    assert parameters - {"self", "fn", "hlo", "names", "cluster"} <= rows


def test_changelog_has_the_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert version == __version__
    assert f"\n## [{version}] - " in (ROOT / "CHANGELOG.md").read_text()


def test_makefile_targets_named_in_documents_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {name for path in DOCUMENTS for name in re.findall(r"`make ([a-z-]+)`", path.read_text())}
    assert named <= targets
