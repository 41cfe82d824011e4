"""Who waits for whom is said, and ended; when ranks were in which collective is written down."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import shardwright as sw
from shardwright import ranks
from shardwright.ranks.stall import describe_stall, find_missing, read_seconds
from shardwright.ranks.watch import Position, Watch
from tests.ranks.processes import run_ranks

#: The limit holds for `init`, too, which waits for the last process to start.
_STALLS = {"SHARDWRIGHT_STALL_WARNING_S": "1", "SHARDWRIGHT_STALL_SHUTDOWN_S": "12"}


def test_the_warning_names_who_is_missing_where() -> None:
    here = Position(ranks=(0, 1, 2), count=17, call="allreduce sum 'loss' float32[]", since_s=0.0)
    text = "rank 2 has not called allreduce sum 'loss' float32[] (number 17), in which ranks 0, 1 have waited for 60 s"
    assert describe_stall(here, [2], [0, 1], 60.2) == text


def test_who_is_waited_for_has_begun_less_or_gone_another_way() -> None:
    def missing(call: str, **others: tuple[int, str]) -> list[int]:
        here = Position(ranks=(0, 1, 2), count=2, call=call, since_s=0.0)
        return find_missing(here, 0, {int(rank[1:]): {(0, 1, 2): begun} for rank, begun in others.items()})

    there = 2, "barrier"
    assert missing("barrier", r0=there, r1=(1, "barrier"), r2=there) == [1]
    assert missing("barrier", r0=there, r1=there) == [2]
    assert missing("barrier", r0=there, r1=(2, "sw.ranks.shutdown"), r2=there) == [1]
    assert missing("barrier", r0=there, r1=(2, "a collective"), r2=(2, "join")) == []
    assert missing("start of the jitted function f", r0=there, r1=(2, "the jitted function f"), r2=there) == [2]
    assert missing("join", r0=there, r1=there, r2=(3, "barrier")) == []


def test_seconds_come_from_the_caller_then_the_variable_then_the_default() -> None:
    assert read_seconds(3, "SHARDWRIGHT_STALL_WARNING_S", 60, {"SHARDWRIGHT_STALL_WARNING_S": "5"}) == 3
    assert read_seconds(None, "SHARDWRIGHT_STALL_WARNING_S", 60, {"SHARDWRIGHT_STALL_WARNING_S": "5"}) == 5
    assert read_seconds(None, "SHARDWRIGHT_STALL_WARNING_S", 60, {}) == 60
    for given, variables, where in [(-1.0, {}, "stall_warning_s"), (None, {"V": "x"}, "V")]:
        with pytest.raises(sw.OptionError) as caught:
            read_seconds(given, where if given is None else "SHARDWRIGHT_STALL_WARNING_S", 60, variables)
        assert caught.value.where == where


def test_a_watch_counts_collectives_of_each_set_and_knows_the_one_it_is_in() -> None:
    watch = Watch()
    with watch.collective((0, 1)):
        pass
    with watch.collective((0, 2)):
        pass
    with watch.collective((0, 1)):
        watch.describe("barrier")
        with watch.collective((0, 1)):  # a part of it
            pass
        here = watch.position()
        assert here is not None
        assert (here.ranks, here.count, here.call) == ((0, 1), 2, "barrier")
    assert watch.position() is None
    assert watch.begun() == {(0, 1): (2, "barrier"), (0, 2): (1, "a collective")}


def test_a_timeline_of_one_process(tmp_path: Path) -> None:
    ranks.init()
    try:
        ranks.start_timeline(tmp_path / "trace.json")
        with pytest.raises(sw.OptionError, match="runs already"):
            ranks.start_timeline(tmp_path / "other.json")
        ranks.barrier()
        ranks.stop_timeline()
        with pytest.raises(sw.OptionError, match="no timeline"):
            ranks.stop_timeline()
    finally:
        ranks.shutdown()
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [event["name"] for event in events if event["ph"] == "X"] == ["barrier"]


@pytest.mark.cluster
def test_a_late_rank_is_named_and_the_job_goes_on() -> None:
    done = run_ranks("tests.ranks.check_stall", 3, "4", SHARDWRIGHT_STALL_WARNING_S="1")
    assert [child.returncode for child in done] == [0, 0, 0], done
    assert "rank 2 has not called allreduce average 'gradients'" in done[0].stdout
    assert "(number 3), in which ranks 0, 1 have waited for" in done[0].stdout
    assert "has not called allreduce" not in done[1].stdout + done[2].stdout


@pytest.mark.cluster
def test_a_rank_that_never_calls_is_an_error_after_the_limit() -> None:
    first, second, last = run_ranks("tests.ranks.check_stall", 3, "1000", timeout_s=150, grace_s=9, **_STALLS)
    assert first.returncode == second.returncode == 1, (first.stdout, second.stdout)
    assert "error: stall shutdown: rank 2 did not call allreduce average 'gradients'" in first.stdout
    assert last.returncode < 0


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("way", "call"), [("shutdown", "sw.ranks.shutdown"), ("jit", "the jitted function compute"), ("init", "init")]
)
def test_a_wait_of_any_kind_names_its_ranks_and_ends(way: str, call: str) -> None:
    first, second, last = run_ranks("tests.ranks.check_ways", 3, way, timeout_s=150, grace_s=9, **_STALLS)
    assert first.returncode == second.returncode == 1, (first.stdout, second.stdout)
    assert f"rank 2 has not called {'sw.ranks.' if way == 'init' else 'barrier'}" in first.stdout
    assert "rank 2" in first.stdout.splitlines()[-1] + first.stdout.splitlines()[-2]
    if way != "init":
        assert f"ranks 0, 1 have not called {call}" in last.stdout


@pytest.mark.cluster
def test_a_set_waits_for_its_own_ranks_alone() -> None:
    """Ranks 0 and 1 begin with a collective of their own, while rank 2 sleeps."""
    done = run_ranks("tests.ranks.check_ways", 3, "set")
    assert [child.returncode for child in done] == [0, 0, 0], done
    assert all(float(child.stdout.split("seconds ")[1]) < 5 for child in done[:2]), done


@pytest.mark.cluster
def test_a_timeline_shows_all_ranks_on_one_clock(tmp_path: Path) -> None:
    path, second = tmp_path / "trace.json", tmp_path / "second.json"
    done = run_ranks("tests.ranks.check_timeline", 2, str(path), str(second))
    assert [child.returncode for child in done] == [0, 0], done
    spans = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    late = {event["pid"]: event for event in spans if "'late'" in event["name"]}
    assert late.keys() == {0, 1}
    assert late[0]["dur"] > 0.4e6  # it waits for the other, which begins later and ends at about the same time
    assert late[1]["ts"] - late[0]["ts"] > 0.4e6
    ends = [event["ts"] + event["dur"] for event in late.values()]
    assert abs(ends[0] - ends[1]) < 0.3e6
    assert {event["pid"] for event in spans if event["name"] == "a step"} == {0, 1}
    assert {event["pid"] for event in spans if event["name"].startswith("the jitted function")} == {0, 1}
    assert not any("'after'" in event["name"] for event in spans)
    spans = [event for event in json.loads(second.read_text())["traceEvents"] if event["ph"] == "X"]
    assert [event["pid"] for event in spans if "'second'" in event["name"]] == [0, 1]
