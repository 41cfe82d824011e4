"""Hosts as users write them, and the place of every rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwright.errors import OptionError
from shardwright.launch.hosts import Host, is_this_machine, parse_hosts, place_ranks, read_hosts_file


def placed(hosts: str, size: int) -> list[tuple[int, str, int, int, int, int]]:
    return [
        (p.rank, p.host.name, p.local_rank, p.local_size, p.cross_rank, p.cross_size)
        for p in place_ranks(parse_hosts(hosts, "-H"), size)
    ]


@pytest.mark.parametrize(
    ("hosts", "size", "expected"),
    [
        ("a:1", 1, [(0, "a", 0, 1, 0, 1)]),
        ("a:2,b:2", 4, [(0, "a", 0, 2, 0, 2), (1, "a", 1, 2, 0, 2), (2, "b", 0, 2, 1, 2), (3, "b", 1, 2, 1, 2)]),
        ("a:2,b:2", 3, [(0, "a", 0, 2, 0, 2), (1, "a", 1, 2, 0, 1), (2, "b", 0, 1, 1, 2)]),
        ("a:1,b:3", 4, [(0, "a", 0, 1, 0, 2), (1, "b", 0, 3, 1, 2), (2, "b", 1, 3, 0, 1), (3, "b", 2, 3, 0, 1)]),
        ("a:4,b:4", 2, [(0, "a", 0, 2, 0, 1), (1, "a", 1, 2, 0, 1)]),
        ("b,a", 2, [(0, "b", 0, 1, 0, 2), (1, "a", 0, 1, 1, 2)]),
    ],
)
def test_ranks_fill_hosts_in_order(hosts: str, size: int, expected: list[tuple[int, str, int, int, int, int]]) -> None:
    assert placed(hosts, size) == expected


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("node-1.example.org:8", Host(name="node-1.example.org", slots=8)),
        ("me@node:2", Host(name="node", slots=2, user="me")),
        ("10.0.0.7", Host(name="10.0.0.7")),
        ("[fe80::1]:2", Host(name="fe80::1", slots=2)),
    ],
)
def test_a_host_is_read(text: str, host: Host) -> None:
    assert parse_hosts(text, "-H") == (host,)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("a:0", "'0' is no number of slots"),
        ("a:two", "'two' is no number of slots"),
        ("a:-1", "'-1' is no number of slots"),
        ("a:2,,b:2", "'' is no host"),
        ("a b:2", "'a b:2' is no host"),
        ("-oProxyCommand=x:1", "is no host"),
        ("a:1,a:2", "'a' is named twice"),
    ],
)
def test_a_bad_host_is_named_with_its_flag(text: str, named: str) -> None:
    with pytest.raises(OptionError, match=named) as raised:
        parse_hosts(text, "-H")
    assert raised.value.where == "-H"


def test_too_few_slots_are_named() -> None:
    with pytest.raises(OptionError, match="5 processes do not fit the 4 slots of a:1, b:3") as raised:
        placed("a:1,b:3", 5)
    assert raised.value.where == "-np"


def test_a_hosts_file_has_a_host_a_line(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# the first rack\nme@a slots=2\n\nb:3  # spare\nc\n")
    assert read_hosts_file(path, "--hosts-file") == (
        Host(name="a", slots=2, user="me"), Host(name="b", slots=3), Host(name="c", slots=1),
    )  # fmt: skip


@pytest.mark.parametrize(("text", "where"), [("a\nb slots=x\n", "hosts:2"), ("a b c\n", "hosts:1"), ("\n# none\n", "")])
def test_a_bad_line_of_a_hosts_file_is_named(text: str, where: str, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(OptionError) as raised:
        read_hosts_file(path, "--hosts-file")
    assert where in raised.value.where


def test_a_missing_hosts_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="no-file cannot be read"):
        read_hosts_file(tmp_path / "no-file", "--hosts-file")


@pytest.mark.parametrize(
    ("name", "here"),
    [("localhost", True), ("127.0.0.1", True), ("::1", True), ("198.51.100.7", False), ("no-such-host.invalid", False)],
)
def test_this_machine_is_known_by_its_addresses(name: str, here: bool) -> None:
    assert is_this_machine(name) is here
