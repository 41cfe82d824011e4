"""Order of the micro-batches on each stage.

A cell is the forward, backward or (zero-bubble) variable-gradient part of one chunk for one micro-batch. Orders assume
values that flow to higher chunks only, with any skips; each is free of deadlock because its cells admit times with
every cell after its dependencies.

gpipe         all forward cells, then all backward cells (Huang et al. 2019).
1f1b          as soon as the first backward cell can run, one of each in turn: at most S − s micro-batches are in
              flight on stage s of S (PipeDream-flush, Narayanan et al. 2021).
kFkB          1f1b over groups of k micro-batches: transfers of a group run beside the group's computing, for k times
              the activations (Ada-Grouper, Wang et al. 2023).
interleaved   several chunks a stage, chunk c on stage c mod S, in groups of S micro-batches; idle time shrinks with the
              chunks (Megatron-LM, Narayanan et al. 2021). Groups that are not full keep the order of full ones.
              `interleaved-4`: four chunks a stage; without a number the search says how many.
zero-bubble   1f1b whose gradients of variables wait until the stage would be idle: up to S micro-batches in flight on
              every stage (ZB-H1, Qi et al. 2023). Needs `weight` pieces; where there are none it is 1f1b.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardwright.errors import OptionError
from shardwright.spelling import did_you_mean

#: What a schedule may be called; any number may stand for the k of kFkB, and one of chunks after `interleaved-`.
SCHEDULE_NAMES = ("gpipe", "1f1b", "2f2b", "interleaved", "zero-bubble")


class Cell(NamedTuple):
    """kind: forward, backward or weight."""

    kind: str
    chunk: int
    micro_batch: int


CellOrder = tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule by kind: "gpipe", "kfkb" (with its k), "interleaved" (with its chunks a stage, if they are given) or
    "zero-bubble"."""

    kind: str
    group: int = 1
    chunks: int | None = None

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """`gpipe`, `1f1b`, `2f2b`, …, `interleaved`, `interleaved-2`, … or `zero-bubble`. Raises OptionError."""
        if text in ("gpipe", "interleaved", "zero-bubble"):
            return cls(text)
        if (chunks := re.fullmatch(r"interleaved-([1-9]\d{0,3})", text)) and int(chunks[1]) > 1:
            return cls("interleaved", chunks=int(chunks[1]))
        match = re.fullmatch(r"([1-9]\d*)f\1b", text)
        if not match:
            raise OptionError(
                f"{text!r} is no schedule",
                where="schedule",
                remedy=did_you_mean(text, SCHEDULE_NAMES)
                or f"use one of {', '.join(SCHEDULE_NAMES)} (or 3f3b, 4f4b, …; interleaved-2, …)",
            )
        return cls("kfkb", int(match[1]))

    def __str__(self) -> str:
        if self.kind == "kfkb":
            return f"{self.group}f{self.group}b"
        return self.kind if self.chunks is None else f"{self.kind}-{self.chunks}"

    @property
    def has_weight(self) -> bool:
        """Whether it computes gradients of variables apart from the rest of the backward part."""
        return self.kind == "zero-bubble"

    def orders(self, stage_of_chunk: Sequence[int], micro_batches: int) -> tuple[CellOrder, ...]:
        """The cells of every stage, in order. Raises OptionError if the schedule does not suit the chunks."""
        stages = max(stage_of_chunk) + 1
        chunks = tuple(tuple(c for c, at in enumerate(stage_of_chunk) if at == stage) for stage in range(stages))
        if self.kind == "gpipe":
            return tuple(tuple(_gpipe(own, micro_batches)) for own in chunks)
        if self.kind == "interleaved" and any(len(own) > 1 for own in chunks):
            self._require(tuple(stage_of_chunk) == tuple(c % stages for c in range(len(stage_of_chunk))))
            self._require(len(stage_of_chunk) % stages == 0)
            return tuple(tuple(_interleave(own, stage, stages, micro_batches)) for stage, own in enumerate(chunks))
        self._require(tuple(stage_of_chunk) == tuple(range(stages)))
        if self.kind == "zero-bubble":
            return tuple(tuple(_zero_bubble(stage, stages, micro_batches)) for stage in range(stages))
        return tuple(tuple(_kfkb(stage, stages, micro_batches, self.group)) for stage in range(stages))

    def _require(self, suits: bool) -> None:
        if suits:
            return
        wanted = "chunk c on stage c mod S, as many on each" if self.kind == "interleaved" else "chunk c on stage c"
        raise OptionError(f"the schedule {self} wants {wanted}", where="schedule", remedy="use gpipe, or other chunks")


def in_flight(
    schedule: Schedule, *, stages: int, chunks: int = 1, micro_batches: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Per stage: numbers of micro-batches with activations held by each of its `chunks`, at the maximal moments.

    A chunk holds a micro-batch from the beginning of its forward cell to the end of the last cell that reads its
    values. Dominated moments (no chunk holds more than at another one) are left out.
    """
    orders = schedule.orders([chunk % stages for chunk in range(stages * chunks)], micro_batches)
    last = "weight" if schedule.kind == "zero-bubble" else "backward"
    return tuple(
        _keep_maximal(_count_in_flight(order, stage, stages, chunks, last)) for stage, order in enumerate(orders)
    )


def _count_in_flight(order: CellOrder, stage: int, stages: int, chunks: int, last: str) -> Iterator[tuple[int, ...]]:
    held = [0] * chunks
    for cell in order:
        place = (cell.chunk - stage) // stages
        if cell.kind == "forward":
            held[place] += 1
            yield tuple(held)
        elif cell.kind == last:
            held[place] -= 1


def _keep_maximal(vectors: Iterator[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    distinct = sorted(set(vectors), reverse=True)
    maximal: list[tuple[int, ...]] = []
    for vector in distinct:
        if not any(all(a <= b for a, b in zip(vector, other, strict=True)) for other in maximal):
            maximal.append(vector)
    return tuple(maximal)


def _gpipe(chunks: Sequence[int], micro_batches: int) -> Iterator[Cell]:
    for chunk in chunks:
        yield from (Cell("forward", chunk, i) for i in range(micro_batches))
    for chunk in reversed(chunks):
        for i in range(micro_batches):
            yield Cell("backward", chunk, i)
            yield Cell("weight", chunk, i)


def _kfkb(stage: int, stages: int, micro_batches: int, size: int) -> Iterator[Cell]:
    groups = [range(i, min(i + size, micro_batches)) for i in range(0, micro_batches, size)]
    ahead = min(stages - stage, len(groups))
    for group in groups[:ahead]:
        yield from (Cell("forward", stage, i) for i in group)
    for number, group in enumerate(groups):
        for i in group:
            yield Cell("backward", stage, i)
            yield Cell("weight", stage, i)
        if number + ahead < len(groups):
            yield from (Cell("forward", stage, i) for i in groups[number + ahead])


def _zero_bubble(stage: int, stages: int, micro_batches: int) -> Iterator[Cell]:
    """Stage s computes gradients of variables s micro-batches late: S micro-batches are in flight on each."""
    ahead = min(stages - stage, micro_batches)
    yield from (Cell("forward", stage, i) for i in range(ahead))
    for i in range(micro_batches):
        yield Cell("backward", stage, i)
        if i >= stage:
            yield Cell("weight", stage, i - stage)
        if i + ahead < micro_batches:
            yield Cell("forward", stage, i + ahead)
    yield from (Cell("weight", stage, i) for i in range(max(0, micro_batches - stage), micro_batches))


def _interleave(chunks: Sequence[int], stage: int, stages: int, micro_batches: int) -> Iterator[Cell]:
    """Order whole groups of S micro-batches; cells of missing ones, spread evenly, are then left out."""
    rounds = -(-micro_batches // stages)
    whole = rounds * stages
    real = {i * whole // micro_batches: i for i in range(micro_batches)}
    steps = [(number, place) for number in range(rounds) for place in range(len(chunks))]
    forward = [(chunks[p], real.get(n * stages + i)) for n, p in steps for i in range(stages)]
    backward = [(chunks[-1 - p], real.get(n * stages + i)) for n, p in steps for i in range(stages)]
    ahead = min(2 * (stages - stage - 1) + (len(chunks) - 1) * stages, len(forward))
    for place in range(len(forward) + ahead):
        if place < len(forward):
            chunk, number = forward[place]
            if number is not None:
                yield Cell("forward", chunk, number)
        if place >= ahead:
            chunk, number = backward[place - ahead]
            if number is not None:
                yield Cell("backward", chunk, number)
                yield Cell("weight", chunk, number)
