"""Where hosts come from: scripts and files that change, and what is said when they fail."""

from __future__ import annotations

import queue
from pathlib import Path

import pytest

from shardwright.errors import OptionError
from shardwright.launch.discovery import Discovery, file_source, script_source
from shardwright.launch.hosts import Host


def script(folder: Path, text: str) -> Path:
    path = folder / "hosts.sh"
    partial = folder / "partial"
    partial.write_text(f"#!/bin/sh\n{text}\n")
    partial.chmod(0o755)
    partial.rename(path)
    return path


def test_a_script_prints_hosts(tmp_path: Path) -> None:
    found = script_source(script(tmp_path, "echo a:2; echo 'b slots=3 # big'; echo c"))()
    assert found == (Host(name="a", slots=2), Host(name="b", slots=3), Host(name="c"))
    assert script_source(script(tmp_path, "true"))() == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("echo trouble >&2; exit 4", "ended with exit code 4: trouble"),
        ("echo 'a b c'", "'a b c' is no host"),
        ("echo a:0", "is no number of slots"),
        ("echo a; echo a", "named twice"),
    ],
)
def test_what_is_wrong_with_a_script_is_said(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        script_source(script(tmp_path, text))()


def test_a_script_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cannot be run") as caught:
        script_source(tmp_path / "missing.sh")()
    assert caught.value.where == "--host-discovery-script"


def test_changes_are_told_and_a_failed_look_changes_nothing(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("a slots=2\n")
    found: queue.SimpleQueue[tuple[Host, ...]] = queue.SimpleQueue()
    problems: queue.SimpleQueue[str] = queue.SimpleQueue()
    discovery = Discovery(file_source(hosts), found.put, problems.put)
    discovery.start()
    try:
        assert found.get(timeout=1) == (Host(name="a", slots=2),)
        hosts.unlink()
        assert "the hosts stay as they are" in problems.get(timeout=5)
        hosts.write_text("a slots=2\nb\n")
        assert found.get(timeout=5) == (Host(name="a", slots=2), Host(name="b"))
        assert found.empty()
    finally:
        discovery.close()


def test_the_first_look_has_to_succeed(tmp_path: Path) -> None:
    with pytest.raises(OptionError):
        Discovery(file_source(tmp_path / "missing"), lambda hosts: None, lambda text: None).start()
