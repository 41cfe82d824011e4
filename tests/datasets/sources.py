"""Functions that servers read batches from; what they were asked for goes into files."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Iterator
from json import dumps as dumps  # a name that is only imported here
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

#: Rows and columns of `x`.
WIDTH = 16


def whole_batch(number: int, batch: int, seed: int) -> dict[str, np.ndarray]:
    """A batch as one machine sees it."""
    x = np.random.default_rng([seed, number]).normal(size=(batch, WIDTH)).astype(np.float32)
    return {"x": x, "y": x.sum(axis=1, keepdims=True), "label": np.arange(batch, dtype=np.int64) + number}


def batches(
    start: int,
    *,
    batch: int,
    rows: np.ndarray,
    seed: int = 0,
    count: int = 1 << 60,
    log: str = "",
    fails_at: int = -1,
    fails_while: str = "",
    second_node: int = 0,
    pause_s: float = 0.0,
    last_rows: int = 0,
) -> Iterator[dict[str, Any]]:
    """Batches up to number `count`.

    log: folder for a file of each process, a line a batch. fails_at: number of a batch that raises while the file
    `fails_while` is there, if one is named. second_node: it raises only for rows from this one on. pause_s: before each
    batch. last_rows: rows of one more batch.
    """
    write(log, event="opened", start=start)
    try:
        for number in range(start, count + (last_rows > 0)):
            is_failing = not fails_while or Path(fails_while).exists()
            if number == fails_at and is_failing and rows[-1] >= second_node:
                raise FileNotFoundError(f"no shard {number}")
            time.sleep(pause_s)
            write(log, number=number, rows=rows.tolist(), event="read")
            there = rows if number < count else rows[rows < last_rows]
            whole = whole_batch(number, batch, seed)
            yield {name: whole[name][there] for name in ("x", "y", "label")}
    finally:
        write(log, event="closed")


def lazy(start: int, *, batch: int, rows: np.ndarray, seed: int = 0, log: str = "") -> Iterator[dict[str, Any]]:
    """The same, of arrays that are made where they are needed."""

    def leaf(number: int, name: str) -> np.ndarray:
        write(log, number=number, event=name, rows=rows.tolist())
        return whole_batch(number, batch, seed)[name][rows]

    for number in itertools.count(start):
        yield {name: (lambda number=number, name=name: leaf(number, name)) for name in ("x", "y")}


def reused(start: int, *, batch: int, rows: np.ndarray, seed: int = 0) -> Iterator[dict[str, Any]]:
    """The same, always in the same memory."""
    memory = {name: array[rows] for name, array in whole_batch(0, batch, seed).items()}
    for number in itertools.count(start):
        for name, array in whole_batch(number, batch, seed).items():
            memory[name][...] = array[rows]
        yield memory


class Pair(NamedTuple):
    """A container with names."""

    x: np.ndarray
    y: list[np.ndarray]


def pairs(start: int, *, batch: int, rows: np.ndarray, seed: int = 0) -> Iterator[tuple[Pair, None]]:
    """The same arrays in other containers."""
    for number in itertools.count(start):
        whole = whole_batch(number, batch, seed)
        yield Pair(whole["x"][rows], [whole["y"][rows]]), None


def too_many_rows(start: int, *, batch: int, rows: np.ndarray) -> Iterator[np.ndarray]:
    """It does not look at `rows`."""
    del start, rows
    while True:
        yield np.zeros((batch, 2), np.float32)


def objects(start: int, *, batch: int, rows: np.ndarray) -> Iterator[dict[str, Any]]:
    """Texts, which no device takes."""
    del start, batch
    yield {"text": np.array(["a"] * len(rows))}


def ends_its_process(
    start: int, *, batch: int, rows: np.ndarray, at: int, how: str, seed: int = 0
) -> Iterator[dict[str, np.ndarray]]:
    """Batches up to number `at`, which ends the process: `how` is "exit", or the name of a signal."""
    for number in itertools.count(start):
        if number == at and how == "exit":
            os._exit(7)
        if number == at:
            signal.raise_signal(signal.Signals[how])  # in this thread: the process ends before the batch is told of
        yield {"x": whole_batch(number, batch, seed)["x"][rows]}


def nothing(start: int, *, batch: int, rows: np.ndarray) -> list[Any]:
    del start, batch, rows
    return []


def write(log: str, **event: Any) -> None:
    if log:
        with (Path(log) / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(event) + "\n")


def events(log: Path, event: str) -> dict[int, list[dict[str, Any]]]:
    """What was written, by process."""
    found = {}
    for path in sorted(log.glob("*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found[int(path.stem)] = [line for line in lines if line["event"] == event]
    return found
