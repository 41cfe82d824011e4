"""Lines of the log: as JSON and back, what they are about, what children print; no server."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import datetime

import pytest

from shardwright.log_lines import CHILD_MARK, ChildOutput, LineCutter, LogLine, about, fields
from shardwright.protocol import log_messages
from shardwright.server.log_store import LogStore, Query, RecentLines
from shardwright.server.logs import LogWriter

FULL = LogLine(
    time_s=1_700_000_000.125, level="warning", process="executor", message="ä\nb", node=3, pid=7, session="1a2b3c4d",
    step=5, plan="0123456789ab", call="RunSteps", traceback="Traceback …\n  x", output="last\nwords",
)  # fmt: skip


def line(number: int, *, node: int = 0, session: str = "", level: str = "info") -> LogLine:
    return LogLine(time_s=float(number), level=level, process="daemon", message=str(number), node=node, session=session)


def test_a_line_survives_json_and_the_wire() -> None:
    assert LogLine.from_json(FULL.to_json()) == FULL
    assert "\n" not in FULL.to_json()
    assert json.loads(FULL.to_json())["time"] == "2023-11-14T22:13:20.125Z"
    assert log_messages.from_proto(log_messages.to_proto(FULL)) == FULL


class Written:
    """A log that writes to a pipe, and the lines at its other end."""

    def __init__(self, log_format: str) -> None:
        self._reader, writer = os.pipe()
        self.log = LogWriter(writer, log_format=log_format, process="master", node=0)  # type: ignore[arg-type]
        self._writer = writer
        self.logger = logging.getLogger("test.operators")
        self.logger.propagate = False
        self.logger.handlers[:] = [self.log]
        self.logger.setLevel(logging.DEBUG)

    def lines(self) -> list[str]:
        self.log.wait_until_written(10)
        os.close(self._writer)
        with os.fdopen(self._reader) as pipe:
            return pipe.read().splitlines()


def test_json_has_every_record_in_a_line_of_its_own() -> None:
    written = Written("json")
    with about(session="1a2b3c4d5e6f", call="LoadPlan"):
        written.logger.info("first\nline", extra=fields(step=4))
    try:
        raise ValueError("no such thing")
    except ValueError:
        written.logger.exception("it failed")
    written.log.put("printed", "error")
    written.logger.error("x" * 50_000, extra=fields(output="y" * 50_000))
    first, failed, printed, long = map(json.loads, written.lines())
    assert first["message"] == "first\nline"
    assert (first["session"], first["step"], first["call"]) == ("1a2b3c4d", 4, "LoadPlan")
    assert (first["process"], first["node"], first["pid"]) == ("master", 0, os.getpid())
    assert abs(datetime.fromisoformat(first["time"]).timestamp() - time.time()) < 60
    assert failed["traceback"].startswith("Traceback (most recent call last):")
    assert failed["traceback"].endswith("ValueError: no such thing")
    assert "session" not in failed
    assert (printed["message"], printed["level"]) == ("printed", "error")
    assert set(long["message"]) == {"x"}
    assert set(long["output"]) == {"y"}


def test_text_is_for_people() -> None:
    written = Written("text")
    written.logger.info("hello %d", 1)
    written.logger.warning("lost", extra={"log_line": FULL})
    hello, *child = written.lines()
    time.strptime(hello.split()[0], "%H:%M:%S")
    assert hello.endswith(" hello 1")
    assert child[0].endswith(" executor: ä")
    assert child[1:] == ["  b", "  Traceback …", "    x", "  last", "  words"]


def test_a_terminal_is_not_written_to_by_strangers() -> None:
    line = replace(FULL, message="\x1b[2J\n12:00:00 all is well\u009b", traceback="", output="")
    assert line.text == "\\x1b[2J\n  12:00:00 all is well\\x9b"


def test_dropped_lines_are_told_in_json() -> None:
    reader, writer = os.pipe()
    log = LogWriter(writer, waiting_lines=10, log_format="json", process="daemon", node=1)
    for number in range(5000):
        log.put(f"{number} {'x' * 200}")
    lines: list[str] = []
    reading = threading.Thread(target=lambda: lines.extend(os.fdopen(reader)))
    reading.start()
    log.wait_until_written(10)
    os.close(writer)
    reading.join(10)
    told = [json.loads(text)["message"] for text in lines]
    assert sum(int(text.split()[0]) for text in told if "lines of the log were dropped" in text) == log.dropped > 0


def test_a_childs_lines_are_told_from_what_it_prints(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "shardwright.test")
    output = ChildOutput(logging.getLogger("shardwright.test"), "executor", 2)
    cutter = LineCutter()
    written = f"raw\n{CHILD_MARK}{FULL.to_json()}\n{CHILD_MARK}{{broken\n{'z' * 10_000}\nend".encode()
    for at in range(0, len(written), 1000):
        for text in cutter.feed(written[at : at + 1000]):
            output.take(text)
    for text in cutter.rest():
        output.take(text)
    records = caplog.records
    assert [record.levelname for record in records] == ["DEBUG", "WARNING", "DEBUG", "DEBUG", "DEBUG"]
    assert records[1].log_line == FULL  # type: ignore[attr-defined]
    assert output.last_lines[0] == "raw"
    assert set(output.last_lines[-2]) == {"z"}
    assert output.last_lines[-1] == "end"


def test_a_child_process_logs_to_its_parent() -> None:
    program = (
        "from shardwright.log_lines import about, fields, log_to_parent; import logging\n"
        "log_to_parent('planner', 1); log = logging.getLogger('shardwright.server')\n"
        "with about(session='1a2b3c4d', plan='p'): log.warning('slow', extra=fields(step=3))\n"
        "logging.getLogger('jax').warning('theirs')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    marked, theirs = done.stderr.splitlines()
    got = LogLine.from_json(marked.removeprefix(CHILD_MARK))
    assert (got.process, got.node, got.session, got.plan, got.step) == ("planner", 1, "1a2b3c4d", "p", 3)
    assert "theirs" in theirs


# ---- what is kept ----------------------------------------------------------------
def test_recent_lines_are_bounded() -> None:
    recent = RecentLines(most_bytes=100_000, most_lines=50)
    for number in range(1, 201):
        recent.append(line(number))
    first, lines = recent.after(0, 1000)
    assert (first, len(lines), lines[-1].message) == (151, 50, "200")
    assert recent.after(198, 10) == (199, [line(199), line(200)])
    assert recent.after(200, 10) == (0, [])
    recent.append(LogLine(time_s=0.0, level="info", process="", message="x" * 99_000))
    assert len(recent.after(0, 1000)[1]) < 3


def test_the_store_takes_each_line_of_a_node_once() -> None:
    own = RecentLines()
    store = LogStore([0, 1, 2], own)
    store.add(1, "a", 1, [line(1, node=1), line(2, node=1)])
    store.add(1, "a", 1, [line(1, node=1), line(2, node=1), line(3, node=1)])  # again, after a broken connection
    own.append(line(10))
    assert [each.message for each in store.after(0, Query())[0]] == ["1", "2", "3", "10"]
    seen = store.last
    store.add(1, "b", 1, [line(4, node=1)])  # the daemon was started anew
    store.add(7, "c", 1, [line(5, node=7)])  # no node of the cluster
    assert store.after(seen, Query()) == ([line(4, node=1)], False)


def test_queries_choose_lines() -> None:
    store = LogStore([0, 1], RecentLines())
    store.add(0, "a", 1, [line(1, session="1a2b3c4d"), line(2, level="error"), line(3)])
    store.add(1, "b", 1, [line(4, node=1, session="1a2b3c4d", level="warning")])

    def found(**query: object) -> list[str]:
        return [each.message for each in store.after(0, Query(**query))[0]]  # type: ignore[arg-type]

    assert found(node=1) == ["4"]
    assert found(session="1a2b") == ["1", "4"]
    assert found(session="1a2b3c4d5e6f7081") == ["1", "4"], "a client knows the whole id"
    assert found(level="warning") == ["2", "4"]
    assert found(session="ffff") == []


def test_a_reader_is_told_of_lines_that_are_gone() -> None:
    store = LogStore(range(5000), RecentLines())
    big = LogLine(time_s=1.0, level="info", process="daemon", message="x" * 8000, node=1)
    store.add(1, "a", 1, [big])
    seen = store.last
    assert store.after(0, Query()) == ([big], False)
    store.add(1, "a", 2, [big] * 10)
    lines, has_gap = store.after(seen, Query())
    assert 0 < len(lines) < 10, "a node of 5000 has 16 KiB"
    assert has_gap
