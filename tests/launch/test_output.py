"""Output as users read it: whole lines, whatever pieces they came in."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest

from shardwright.errors import OptionError
from shardwright.launch.hosts import Host
from shardwright.launch.job import ProcessSpec
from shardwright.launch.output import JobOutput, LineSplitter


def specs(count: int) -> list[ProcessSpec]:
    host = Host(name="localhost", slots=count)
    return [
        ProcessSpec(number=number, kind="rank", label=str(number), host=host, command=("true",))
        for number in range(count)
    ]


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        ([b"one\ntw", b"o\n"], [b"one", b"two"]),
        ([b"\n\n"], [b"", b""]),
        ([b"crlf\r", b"\nnext\r\n"], [b"crlf", b"next"]),
        ([b"\r 10%", b"\r 20%", b"\r100%\n"], [b" 10%", b" 20%", b"100%"]),
        ([b"no end"], [b"no end"]),
        ([b"a\x00\xff\n"], [b"a\x00\xff"]),
        ([], []),
    ],
)
def test_pieces_become_lines(pieces: list[bytes], lines: list[bytes]) -> None:
    splitter = LineSplitter()
    assert [line for piece in pieces for line in splitter.feed(piece)] + splitter.finish() == lines


def test_a_line_that_never_ends_does_not_grow_for_ever() -> None:
    splitter = LineSplitter()
    lines = [line for _ in range(40) for line in splitter.feed(b"x" * 65536)]
    assert b"".join([*lines, *splitter.finish()]) == b"x" * (40 * 65536)
    assert max(map(len, lines)) <= (1 << 20) + 65536


def test_lines_of_many_threads_stay_whole() -> None:
    taken: list[bytes] = []
    output = JobOutput(specs(8), {"stdout": taken.append, "stderr": taken.append})

    def write(number: int) -> None:
        text = b"".join(b"%d-%d\n" % (number, line) * 3 for line in range(200))
        for start in range(0, len(text), 7):
            output.write(number, "stdout", text[start : start + 7])

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    output.close()
    lines = b"".join(taken).splitlines()
    assert len(lines) == 8 * 200 * 3
    for number in range(8):
        own = [line for line in lines if line.startswith(b"[%d]" % number)]
        assert own == [b"[%d]<stdout>:%d-%d" % (number, number, line) for line in range(200) for _ in range(3)]


def test_timestamps_stand_ahead() -> None:
    taken: list[bytes] = []
    output = JobOutput(specs(1), {"stdout": taken.append, "stderr": taken.append}, timestamps=True)
    output.write(0, "stderr", b"hello\n")
    assert re.fullmatch(rb"\d\d:\d\d:\d\d\.\d{3} \[0\]<stderr>:hello\n", b"".join(taken))


def test_logs_hold_the_bytes_as_they_came(tmp_path: Path) -> None:
    output = JobOutput(
        specs(11), {"stdout": lambda data: None, "stderr": lambda data: None}, directory=tmp_path / "logs"
    )
    output.write(3, "stdout", b"a\r\nb\rc")
    output.write(10, "stderr", b"\xff\n")
    output.close()
    assert (tmp_path / "logs" / "rank.03.stdout").read_bytes() == b"a\r\nb\rc"
    assert (tmp_path / "logs" / "rank.10.stderr").read_bytes() == b"\xff\n"
    assert len(list((tmp_path / "logs").iterdir())) == 22


def test_a_folder_that_cannot_be_written_names_its_flag(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match="cannot be written") as raised:
        JobOutput(specs(1), {}, directory=tmp_path / "file")
    assert raised.value.where == "--output-dir"


def test_who_stops_reading_is_noticed_once() -> None:
    closed: list[bool] = []

    def refuse(data: bytes) -> None:
        raise BrokenPipeError

    output = JobOutput(specs(1), {"stdout": refuse, "stderr": refuse}, on_broken_pipe=lambda: closed.append(True))
    for _ in range(3):
        output.write(0, "stdout", b"line\n")
    assert closed == [True]
