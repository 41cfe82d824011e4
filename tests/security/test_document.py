"""docs/security.md promises what tests hold."""

from __future__ import annotations

import ast
import re

from tests.server.raw_client import ROOT

PAGE = ROOT / "docs" / "security.md"


def test_every_claim_names_tests_that_exist() -> None:
    _, _, table = PAGE.read_text().partition("| claim | test |\n|---|---|\n")
    rows = table.partition("\n\n")[0].splitlines()
    assert len(rows) >= 15
    for row in rows:
        _, claim, tests, _ = row.split("|")
        named = re.findall(r"`(tests/\S+\.py)::(\w+)`", tests)
        assert named, f"no test holds the claim: {claim}"
        for path, name in named:
            functions = {node.name for node in ast.parse((ROOT / path).read_text()).body if hasattr(node, "name")}
            assert name in functions, f"{path} has no {name}"


def test_it_is_short() -> None:
    assert len(PAGE.read_text().splitlines()) <= 150
