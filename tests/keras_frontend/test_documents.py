"""The blocks of docs/keras.md run, one after another."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.snippets.blocks import ROOT
from tests.snippets.run import run_python


@pytest.mark.dear
def test_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_python(ROOT / "docs/keras.md")
    assert (tmp_path / "model.keras").is_file()
    assert (tmp_path / "runs/by-hand").is_dir()
