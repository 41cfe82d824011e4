"""How fast a pipeline runs, from seconds per chunk alone: what a search asks for thousands of candidates.

The same orders, the same placing of sends and receives and the same engine as for a task graph, without its buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardwright.tasks.engine import Compute, Operation, Receive, Send, Transfer, run_operations
from shardwright.tasks.schedules import Cell, Schedule
from shardwright.tasks.simulate import idle_part
from shardwright.tasks.transfer_placement import Route, Slot, place_transfers


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkTime:
    """Seconds of one chunk for one micro-batch.

    forward_s: None where the chunk's forward and backward parts are one program (of `backward_s`), as the last's are.
    weight_s: gradients of variables where they are a program of their own, not in `backward_s`; None where not.
    """

    forward_s: float | None
    backward_s: float
    weight_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkEdge:
    """What goes from chunk `source` to a higher one for each micro-batch, and the gradient that comes back.

    forward_s, backward_s: seconds that each keeps its link, latency included; None where nothing is sent that way.
    """

    source: int
    target: int
    forward_s: float | None
    backward_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEstimate:
    """One step: seconds, and the seconds that each stage computes."""

    step_s: float
    busy_s: tuple[float, ...]

    @property
    def bubble_fraction(self) -> float:
        return idle_part(self.busy_s, self.step_s)


class _ChunkEnd(NamedTuple):
    kind: str
    chunk: int


def estimate_step(
    schedule: Schedule,
    *,
    stage_of_chunk: Sequence[int],
    micro_batches: int,
    chunks: Sequence[ChunkTime],
    edges: Sequence[ChunkEdge],
    before_s: Sequence[float] | None = None,
    after_s: Sequence[float] | None = None,
) -> StepEstimate:
    """Seconds of a step in which every stage does `before_s`, its cells of all micro-batches, and `after_s`.

    Raises OptionError where the schedule does not suit `stage_of_chunk`.
    """
    orders = schedule.orders(stage_of_chunk, micro_batches)
    seconds = {
        (kind, chunk): value
        for chunk, time in enumerate(chunks)
        for kind, value in (("forward", time.forward_s), ("backward", time.backward_s), ("weight", time.weight_s))
        if value is not None
    }
    cells = [[cell for cell in order if cell[:2] in seconds] for order in orders]
    routes, transfers = _routes(cells, edges, chunks, stage_of_chunk, micro_batches)
    operations: list[list[Operation]] = []
    busy = []
    for stage, woven in enumerate(place_transfers(routes, len(cells))):
        before = before_s[stage] if before_s else 0.0
        after = after_s[stage] if after_s else 0.0
        own: list[Operation] = [Compute(before)]
        arrivals: dict[int, list[int]] = {}
        for numbers in woven.receives.values():
            for number in numbers:
                arrivals.setdefault(routes[number].read.group, []).append(number)
        busy_s = before + after
        for place, cell in enumerate(cells[stage]):
            own += map(Receive, woven.receives.get(place, ()))
            time_s = seconds[cell.kind, cell.chunk]
            busy_s += time_s
            own.append(Compute(time_s, tuple(arrivals.get(place, ()))))
            own += map(Send, woven.sends.get(Slot(place, 0), ()))
        own.append(Compute(after))
        operations.append(own)
        busy.append(busy_s)
    times = run_operations(operations, transfers)
    return StepEstimate(step_s=max(each[-1][1] for each in times.operations), busy_s=tuple(busy))


def _routes(
    cells: Sequence[Sequence[Cell]],
    edges: Sequence[ChunkEdge],
    chunks: Sequence[ChunkTime],
    stage_of_chunk: Sequence[int],
    micro_batches: int,
) -> tuple[list[Route], list[Transfer]]:
    place = {cell: Slot(number, 0) for order in cells for number, cell in enumerate(order)}
    routes: list[Route] = []
    transfers: list[Transfer] = []
    for edge in edges:
        reader = "backward" if chunks[edge.target].forward_s is None else "forward"
        ways = (
            (edge.forward_s, _ChunkEnd("forward", edge.source), _ChunkEnd(reader, edge.target)),
            (edge.backward_s, _ChunkEnd("backward", edge.target), _ChunkEnd("backward", edge.source)),
        )
        for time_s, made, read in ways:
            source, target = stage_of_chunk[made.chunk], stage_of_chunk[read.chunk]
            if time_s is None or source == target:
                continue
            for i in range(micro_batches):
                routes.append(Route(source, place[Cell(*made, i)], target, place[Cell(*read, i)]))
            transfers += [Transfer(source, target, time_s)] * micro_batches
    return routes, transfers
