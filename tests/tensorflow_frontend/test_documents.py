"""The blocks of docs/tensorflow.md run, one after another."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.snippets.blocks import ROOT, blocks_of


@pytest.mark.slow
def test_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs/tensorflow.md"
    names: dict[str, object] = {}
    for block in blocks_of(page):
        if block.language == "python":
            exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), names)
    assert (tmp_path / "model.keras").is_file()
