"""Files that never end, and texts that cost their reader more than they have: refused within a second, in words."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from shardwright.builders.given import load as load_strategies
from shardwright.cli.output import read_program_file, read_text
from shardwright.clusters import secret_files
from shardwright.clusters.cluster import Cluster
from shardwright.clusters.resource_spec import resource_spec
from shardwright.cost.profiles import hardware_profile
from shardwright.errors import ShardwrightError
from shardwright.input_files import read_input
from shardwright.launch.hosts import read_hosts_file
from shardwright.launch.settings import read_settings
from shardwright.tuning import MOST_BYTES

READERS: dict[str, Callable[[Path], Any]] = {
    "cluster file": Cluster.load,
    "resource_spec": resource_spec,
    "run --config": lambda path: read_settings({}, path),
    "hosts file": lambda path: read_hosts_file(path, "--hosts-file"),
    "hardware profile": lambda path: hardware_profile(str(path)),
    "strategies": load_strategies,
}


@contextmanager
def refusal() -> Iterator[Any]:
    """A refusal in words and in time: of the processor, since tests share it."""
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    with pytest.raises(ShardwrightError) as caught:
        yield caught
    assert time.process_time() - began_cpu_s < 1.5  # one on an idle machine
    assert time.monotonic() - began_s < 10
    assert caught.value.remedy


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_a_file_without_an_end_is_refused(reader: Callable[[Path], Any], tmp_path: Path) -> None:
    endless = tmp_path / "endless.toml"
    endless.symlink_to("/dev/zero")
    with refusal() as caught:
        reader(endless)
    assert "more than 16 MiB" in str(caught.value)


@pytest.mark.parametrize("reader", [READERS["cluster file"], READERS["run --config"]])
def test_a_fifo_that_nobody_writes_is_refused(reader: Callable[[Path], Any], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "cluster.json")
    with refusal() as caught:
        reader(tmp_path / "cluster.json")
    assert "does not end within 1 s" in str(caught.value)


@pytest.mark.parametrize("reader", [read_text, read_program_file])
def test_a_program_of_a_device_is_refused(reader: Callable[[str], Any]) -> None:
    with refusal() as caught:
        reader("/dev/zero")
    assert "more than 16 MiB" in str(caught.value)


def test_a_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)

    def write() -> None:
        time.sleep(0.1)
        with open(path, "wb") as file:
            file.write(b"first ")
            file.flush()
            time.sleep(0.1)
            file.write(b"second")

    thread = threading.Thread(target=write)
    thread.start()
    assert read_input(path) == b"first second"
    thread.join()


def test_files_are_read_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for data in (b"", b"text", b"x" * MOST_BYTES):
        path.write_bytes(data)
        assert read_input(path) == data
    os.truncate(path, MOST_BYTES + 1)
    with pytest.raises(OSError, match="more than 16 MiB"):
        read_input(path)
    with pytest.raises(IsADirectoryError):
        read_input(tmp_path)


def nested_anchors() -> str:
    """Each line names the one before it ten times: 10**9 values in a few hundred bytes."""
    lines = ["a0: &a0 [x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    return "\n".join(lines) + "\n"


HOSTILE = {
    "anchors": nested_anchors(),
    "brackets": "[" * 90_000,
    "braces": "{a: " * 5_000,
    "dashes": "- " * 45_000,
    "many values": "- x\n" * 24_000,
    "long": "# " + "x" * 3_000_000,
    "itself": "a: &a [*a]\n",
}


@pytest.mark.parametrize(
    ("text", "reader"),
    [
        *((text, "cluster file") for text in HOSTILE.values()),
        *((HOSTILE["anchors"], reader) for reader in ("resource_spec", "run --config")),
        *((HOSTILE["dashes"], reader) for reader in ("resource_spec", "run --config")),
    ],
)
def test_hostile_yaml_is_refused(text: str, reader: str, tmp_path: Path) -> None:
    path = tmp_path / "file.yml"
    path.write_text(text)
    with refusal():
        READERS[reader](path)


@pytest.mark.parametrize("kind", ["[" * 100_000, '{"a":' * 100_000, "9" * 100_000])
def test_hostile_json_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(kind)
    with refusal():
        Cluster.load(path)


def test_a_token_of_a_fifo_without_a_writer_is_awaited_no_longer_than_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secret_files, "PIPE_WAIT_S", 0.2)
    os.mkfifo(tmp_path / "token", 0o600)
    path = tmp_path / "cluster.json"
    path.write_text('{"master": {"ip": "127.0.0.1", "port": 2222}, "security": {"token_file": "token"}}')
    with refusal() as caught:
        Cluster.load(path)
    assert "does not end" in str(caught.value)
