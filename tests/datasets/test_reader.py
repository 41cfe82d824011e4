"""The thread that reads a worker's rows."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shardwright.errors import DatasetError
from shardwright.server.runtime.datasets.functions import DatasetSpec
from shardwright.server.runtime.datasets.reader import BatchReader, Demand
from tests.server.raw_client import wait_until


class Source:
    """Batches that hold their own number; what was read, and whether somebody reads."""

    def __init__(self, count: int = 1 << 30) -> None:
        self.read: list[int] = []
        self.is_closed = False
        self.count = count
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, start: int, rows: np.ndarray) -> Iterator[Any]:
        try:
            for number in range(start, self.count):
                self.gate.wait(30)
                self.read.append(number)
                yield {"a": np.full((len(rows), 2), number), "b": lambda number=number: rows + number}
        finally:
            self.is_closed = True


def reader(
    source: Source, *, prefetch: int = 2, leaves: frozenset[int] | None = None, idle_s: float = 60
) -> BatchReader:
    spec = DatasetSpec(dataset_id="1", function="m:f", batch=8, options_json="", prefetch=prefetch)
    demand = Demand(rows=np.array([2, 5], np.int64).tobytes(), leaves=leaves)
    return BatchReader(spec, demand, 0, source, idle_s=idle_s)


def take(of: BatchReader, position: int) -> list[np.ndarray | None]:
    return of.take(position, lambda: None)


def test_it_reads_so_many_ahead_and_no_more() -> None:
    source = Source()
    made = reader(source)
    for position in range(3):
        a, b = take(made, position)
        np.testing.assert_array_equal(a, np.full((2, 2), position))
        np.testing.assert_array_equal(b, [2 + position, 5 + position])
        wait_until(lambda position=position: source.read == list(range(position + 3)))
    assert made.wait_for(3, 5.0)[0] >= 4


def test_leaves_that_nobody_needs_are_not_made() -> None:
    a, b = take(reader(Source(), leaves=frozenset({1})), 0)
    assert a is None
    np.testing.assert_array_equal(b, [2, 5])


def test_batches_between_are_thrown_away() -> None:
    source = Source()
    made = reader(source, prefetch=0)
    a, _ = take(made, 5)
    assert a is not None
    assert a[0, 0] == 5
    assert source.read == list(range(6))
    assert not made.reaches(3, 3)
    assert made.reaches(6, 6)
    assert not made.reaches(50, 50)  # beginning there is less work


def test_a_wait_ends_after_its_time_and_when_whoever_waits_gives_up() -> None:
    source = Source()
    source.gate.clear()
    made = reader(source)
    assert made.wait_for(0, 0.05) == (0, False)

    def give_up() -> None:
        raise KeyError("enough")

    with pytest.raises(KeyError):
        made.take(0, give_up)
    source.gate.set()
    assert take(made, 0)[0] is not None


def test_the_end() -> None:
    made = reader(Source(count=2))
    assert made.wait_for(5, 10.0) == (2, True)
    assert take(made, 1)[0] is not None
    with pytest.raises(DatasetError, match="no batch 2: the data end before batch 2"):
        take(made, 2)


def test_closing_ends_the_function() -> None:
    source = Source()
    made = reader(source)
    take(made, 0)
    made.close()
    wait_until(lambda: source.is_closed)
    with pytest.raises(DatasetError, match="closed"):
        take(made, 1)


def test_a_reader_that_is_replaced_still_hands_over_what_is_waited_for() -> None:
    source = Source()
    source.gate.clear()
    made, taken = reader(source), []
    waiting = threading.Thread(target=lambda: taken.append(take(made, 0)))
    waiting.start()
    wait_until(lambda: made._is_taking)
    made.retire()
    assert not made.reaches(0, 0)
    source.gate.set()
    waiting.join(30)
    assert len(taken) == 1
    wait_until(lambda: source.is_closed)


def test_an_idle_reader_ends() -> None:
    source = Source()
    made = reader(source, idle_s=0.2)
    take(made, 0)
    wait_until(lambda: source.is_closed)
    assert not made.reaches(1, 1)


def test_an_error_is_told_when_its_batch_is_asked_for_and_the_reader_is_done_then() -> None:
    def failing(start: int, rows: np.ndarray) -> Iterator[Any]:
        yield from (np.zeros(len(rows)) for _ in range(start, 2))
        raise OSError("disk")

    made = reader(failing)  # type: ignore[arg-type]
    for position in range(2):
        assert take(made, position)[0] is not None
        assert made.reaches(2, 2)
    with pytest.raises(DatasetError, match="batch 2 cannot be read: OSError: disk"):
        made.wait_for(2, 10.0)
    assert not made.reaches(2, 2)
