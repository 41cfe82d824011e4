"""Directories of checkpoints as users name them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from shardwright.checkpoints.directories import resolve_directory
from shardwright.errors import CheckpointError


@pytest.mark.parametrize("is_local", [True, False])
def test_urls_of_stores_and_absolute_paths_are_taken_everywhere(is_local: bool) -> None:
    for store in ("gs://bucket/run", "s3://bucket/a b", "az://bucket", "hf://bucket/run/"):
        assert resolve_directory(store, is_local=is_local) == store
    assert resolve_directory("/shared//run/../other/.", is_local=is_local) == "/shared/other"
    assert resolve_directory(Path("/shared/run"), is_local=is_local) == "/shared/run"


def test_what_is_relative_means_the_programs_own_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    here = os.getcwd()
    for directory, absolute in (
        ("runs/gpt2", f"{here}/runs/gpt2"),
        (".", here),
        ("./~x", f"{here}/~x"),
        ("~", "/home/somebody"),
        ("~/runs", "/home/somebody/runs"),
    ):
        assert resolve_directory(directory, is_local=True) == absolute
        with pytest.raises(CheckpointError, match="workers do not have") as caught:
            resolve_directory(directory, is_local=False)
        assert "absolute path" in caught.value.remedy


@pytest.mark.parametrize(
    ("directory", "why"),
    [
        ("", "names no directory"),
        (" \n", "names no directory"),
        (None, "is no path"),
        (5, "is no path"),
        (b"/shared", "is no path"),
        ("/a\0b", "no path may have"),
        ("/a\udcffb", "no path may have"),
        ("~nobody-of-that-name/run", "not known"),
        ("file:///shared/run", "a scheme that Orbax does not take"),
        ("http://host/run", "a scheme that Orbax does not take"),
        (Path("gs://bucket/run"), "lost a slash"),
        ("gs://", "names no bucket"),
    ],
)
def test_what_names_no_directory_is_refused(directory: Any, why: str) -> None:
    with pytest.raises(CheckpointError, match=why) as caught:
        resolve_directory(directory, is_local=True)
    assert caught.value.remedy
