"""Nodes of an elastic cluster that are read again: from the edited file, and from a program."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwright.clusters.cluster import Cluster
from shardwright.server.master.cluster_watch import ClusterSource, file_source, program_source, watch_cluster


def describe(*ports: int, **fields: Any) -> str:
    workers = [{"ip": "127.0.0.1", "port": port, "devices": 2} for port in ports]
    master = {"ip": "127.0.0.1", "port": 2222, "devices": 2}
    return json.dumps({"master": master, "workers": workers, "min_nodes": 1, "insecure": True, **fields})


def write_at_once(path: Path, text: str) -> None:
    """As editors do: whoever reads meanwhile gets the old text or the new one."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def watch(source: ClusterSource, cluster: Cluster, *edits: Callable[[], object]) -> list[list[int]]:
    """The ports of each new cluster; each edit is made once what was before it has been looked at."""
    told: list[list[int]] = []
    looks = 0

    def read() -> str:
        nonlocal looks
        looks += 1
        return source.read()

    async def run() -> None:
        counted = ClusterSource(source.name, read, source.parse, every_s=0.02)
        watching = asyncio.ensure_future(
            watch_cluster(counted, cluster, lambda new: told.append([node.port for node in new.nodes]))
        )
        for edit in edits:
            edit()
            end = looks + 3  # one may be under way, the next sees the edit, a third begins once that is dealt with
            while looks < end:
                assert not watching.done()
                await asyncio.sleep(0.01)
        watching.cancel()

    asyncio.run(run())
    return told


@pytest.fixture(params=["file", "program"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> ClusterSource:
    path = tmp_path / "cluster.json"
    path.write_text(describe(2223))
    program = tmp_path / "nodes.sh"
    program.write_text(f"#!/bin/sh\ncat {path}\n")
    program.chmod(0o700)
    return file_source(path) if request.param == "file" else program_source(str(program), path)


def test_each_change_of_the_nodes_is_told_once(source: ClusterSource, tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    cluster = Cluster.load(path)
    texts = (describe(2223, 2224), describe(2224), describe(2224))
    edits = [lambda text=text: write_at_once(path, text) for text in texts]
    assert watch(source, cluster, *edits) == [[2222, 2223, 2224], [2222, 2224]]


def test_what_is_wrong_is_named_once_and_changes_nothing(
    source: ClusterSource, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "cluster.json"
    cluster = Cluster.load(path)
    wrong = ["{", describe(2223, 2224, min_nodes=2), describe(2223, 2223)]
    with caplog.at_level(logging.WARNING, "shardwright.server"):
        assert watch(source, cluster, *[lambda text=text: write_at_once(path, text) for text in wrong]) == []
        assert watch(source, cluster, lambda: write_at_once(path, describe(2224))) == [[2222, 2224]]
    assert len(caplog.messages) == len(wrong)
    assert all(f"{source.name}" in message and "stay as they are" in message for message in caplog.messages)
    assert "restart of the master" in caplog.messages[1]


@pytest.mark.parametrize(
    ("lines", "message"),
    [("exit 3", "exit code 3"), ("echo lost >&2; exit 1", "exit code 1: lost"), (None, "cannot be run")],
)
def test_a_program_that_fails_is_named_once(
    lines: str | None, message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, program = tmp_path / "cluster.json", tmp_path / "nodes.sh"
    path.write_text(describe(2223))
    if lines is not None:
        program.write_text(f"#!/bin/sh\n{lines}\n")
        program.chmod(0o700)
    source = program_source(str(program), path)
    with caplog.at_level(logging.WARNING, "shardwright.server"):
        assert watch(source, Cluster.load(path), lambda: None) == []
    (warning,) = caplog.messages
    assert message in warning


def test_only_elastic_clusters_discover_nodes(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    fields = json.loads(describe(2223))
    del fields["min_nodes"]
    path.write_text(json.dumps(fields))
    command = [sys.executable, "-m", "shardwright.server", str(path), "0", "--discover", "nodes.sh"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    assert ended.returncode == 1
    assert 'write "min_nodes" into the cluster file' in ended.stderr
