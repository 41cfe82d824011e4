"""From pieces and a schedule to the task graph: order of programs, transfers, lifetimes of buffers.

A value goes straight from its producer's stage to every consumer's stage, once, regardless of stages in between.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from shardwright.errors import PlanError
from shardwright.tasks.graph import MICRO_BATCH, Buffer, Task, TaskGraph
from shardwright.tasks.schedules import CellOrder, Schedule
from shardwright.tasks.step_spec import ProgramSpec, StepSpec
from shardwright.tasks.transfer_placement import Route, Slot, place_transfers

#: The programs of one stage in order, in groups: a receive is posted one group ahead of its reader.
Groups = list[list[Task]]


def task_graph(pieces: StepSpec, schedule: Schedule) -> TaskGraph:
    """The checked task graph of a step.

    Raises PlanError if the pieces do not fit together (a value with no writer, two writers, …), OptionError if the
    schedule does not suit the chunks.
    """
    orders = schedule.orders(pieces.stage_of_chunk, pieces.micro_batches)
    step = _TaskBuilder(pieces)
    groups = [step.groups(stage, order) for stage, order in enumerate(orders)]
    routes = step.routes(groups)
    graph = TaskGraph(
        schedule=str(schedule),
        micro_batches=pieces.micro_batches,
        stages=tuple(_free_after_last_use(tasks) for tasks in step.lists(groups, routes)),
        sizes=tuple(
            {value.name: value.sizes[stage] for value in pieces.values if stage in value.sizes}
            for stage in range(pieces.stage_count)
        ),
        sent_bytes={value.name: value.sent_bytes for value in pieces.values if value.sent_bytes},
        links=pieces.links,
    )
    graph.check()
    return graph


class _SentBuffer(NamedTuple):
    buffer: Buffer
    route: Route


class _TaskBuilder:
    """The pieces, indexed."""

    def __init__(self, pieces: StepSpec) -> None:
        self._pieces = pieces
        self._scopes = {value.name: value.scope for value in pieces.values}
        if len(self._scopes) != len(pieces.values):
            raise PlanError("two values of a step have the same name")
        self._buffers: dict[tuple[str, int | None], Buffer] = {}
        self._cells: dict[tuple[str, int | None], ProgramSpec] = {
            (p.kind, p.chunk): p for p in pieces.programs if p.kind in ("forward", "backward", "weight")
        }
        self._splits = self._of_kind("split")
        self._accumulates = self._of_kind("accumulate")
        self._once = {kind: self._sort_pieces(kind) for kind in ("start", "apply")}
        self._written_by: dict[str, list[ProgramSpec]] = defaultdict(list)
        for piece in pieces.programs:
            self._check_piece(piece)
            for name in piece.writes:
                self._written_by[name].append(piece)
        self._check_writers()

    # ---- what the pieces say -------------------------------------------

    def _of_kind(self, kind: str) -> list[ProgramSpec]:
        return [piece for piece in self._pieces.programs if piece.kind == kind]

    def _check_piece(self, piece: ProgramSpec) -> None:
        if piece.kind in ("forward", "backward", "weight"):
            if self._cells[piece.kind, piece.chunk] is not piece:
                raise PlanError(f"chunk {piece.chunk} has two {piece.kind} programs", where=piece.program)
            if piece.chunk is None or self._pieces.stage_of_chunk[piece.chunk] != piece.stage:
                raise PlanError(f"chunk {piece.chunk} is not on stage {piece.stage}", where=piece.program)
        for name in (*piece.reads, *piece.writes):
            if name not in self._scopes and name != MICRO_BATCH:
                raise PlanError(f"{name} is not among the values of the step", where=piece.program)

    def _check_writers(self) -> None:
        given = {name for name, _ in self._pieces.arguments}
        for name, scope in self._scopes.items():
            makers = [p for p in self._written_by[name] if scope == "micro_batch" or name not in p.donates]
            if len(makers) + (name in given) != 1:
                programs = ", ".join(p.program for p in makers) or "nothing"
                raise PlanError(f"{name} is written by {programs}{' and is an argument' if name in given else ''}")

    def _buffer(self, name: str, micro_batch: int | None) -> Buffer:
        key = (name, micro_batch if name == MICRO_BATCH or self._scopes[name] == "micro_batch" else None)
        return self._buffers.setdefault(key, Buffer(*key))

    def _buffers_of(self, names: Iterable[str], micro_batch: int | None) -> tuple[Buffer, ...]:
        """Buffers of one micro-batch; without one, of all of them."""
        if micro_batch is not None:
            return tuple(self._buffer(name, micro_batch) for name in names)
        return tuple(
            self._buffer(name, number)
            for name in names
            for number in (range(self._pieces.micro_batches) if self._scopes[name] == "micro_batch" else (None,))
        )

    def _task(self, piece: ProgramSpec, micro_batch: int | None) -> Task:
        return Task(
            kind=piece.kind,
            stage=piece.stage,
            chunk=piece.chunk,
            micro_batch=micro_batch,
            program=piece.program,
            reads=self._buffers_of(piece.reads, micro_batch),
            writes=self._buffers_of(piece.writes, micro_batch),
            donates=self._buffers_of(piece.donates, micro_batch),
            time_s=piece.time_s,
            workspace_bytes=piece.workspace_bytes,
        )

    # ---- order ---------------------------------------------------------

    def groups(self, stage: int, order: CellOrder) -> Groups:
        """The computations of a stage, in order, without sends and receives."""
        inputs = self._buffers_of(self._ends(self._pieces.arguments, stage), None)
        results = self._buffers_of(self._ends(self._pieces.outputs, stage), None)
        return [
            *(
                [[Task(kind="input", stage=stage, writes=inputs, time_s=self._pieces.arrivals_s.get(stage, 0.0))]]
                if inputs
                else []
            ),
            *([self._task(piece, None)] for piece in self._once["start"] if piece.stage == stage),
            *self._micro(stage, order),
            *([self._task(piece, None)] for piece in self._once["apply"] if piece.stage == stage),
            *([[Task(kind="fetch", stage=stage, reads=results)]] if results else []),
        ]

    def _ends(self, pairs: Sequence[tuple[str, int]], stage: int) -> list[str]:
        return [name for name, at in pairs if at == stage]

    def _sort_pieces(self, kind: str) -> list[ProgramSpec]:
        """Pieces that run once, each after the producers of its operands, on any stage."""
        done: set[str] = set()
        waiting = self._of_kind(kind)
        produced = {name for piece in waiting for name in piece.writes if name not in piece.donates}
        ordered = []
        while waiting:
            piece = next((p for p in waiting if all(name in done or name not in produced for name in p.reads)), None)
            if piece is None:
                names = ", ".join(waiting_piece.program for waiting_piece in waiting)
                raise PlanError(f"{names} wait for each other", where=f"{kind} pieces")
            waiting.remove(piece)
            done.update(piece.writes)
            ordered.append(piece)
        return ordered

    def _micro(self, stage: int, order: CellOrder) -> Iterator[list[Task]]:
        splits = [piece for piece in self._splits if piece.stage == stage]
        accumulates = [piece for piece in self._accumulates if piece.stage == stage]
        cells = [
            (self._cells[cell.kind, cell.chunk], cell.micro_batch)
            for cell in order
            if (cell.kind, cell.chunk) in self._cells
        ]
        last = {(p.program, i): place for place, (cell, i) in enumerate(cells) for p in accumulates if _feeds(cell, p)}
        done: set[tuple[str, int]] = set()
        for place, (cell, i) in enumerate(cells):
            group = []
            for split in splits:
                if (split.program, i) not in done and _feeds(split, cell):
                    done.add((split.program, i))
                    group.append(self._task(split, i))
            group.append(self._task(cell, i))
            group += [self._task(piece, i) for piece in accumulates if last.get((piece.program, i)) == place]
            yield group

    # ---- transfers -----------------------------------------------------

    def routes(self, groups: Sequence[Groups]) -> list[_SentBuffer]:
        """The transfers between stages, in a fixed order."""
        producers: dict[Buffer, tuple[int, Slot]] = {}
        here: list[set[Buffer]] = []
        for stage, own in enumerate(groups):
            written = set()
            for slot, task in _slots(own):
                for buffer in task.writes:
                    written.add(buffer)
                    if task.kind != "input" or buffer not in producers:
                        producers[buffer] = (stage, slot)
            here.append(written)
        sent = []
        for stage, own in enumerate(groups):
            fetched: set[Buffer] = set()
            for slot, task in _slots(own):
                for buffer in task.reads:
                    if buffer in here[stage] or buffer in fetched or buffer.value == MICRO_BATCH:
                        continue
                    if buffer not in producers:
                        raise PlanError(f"{task} of stage {stage} reads {buffer}, which nothing writes")
                    fetched.add(buffer)
                    sent.append(_SentBuffer(buffer, Route(*producers[buffer], stage, slot)))
        return sent

    def lists(self, groups: Sequence[Groups], buffers: Sequence[_SentBuffer]) -> Iterator[list[Task]]:
        """Per stage the groups with sends and receives between them."""
        woven = place_transfers([buffer.route for buffer in buffers], len(groups))
        for stage, (own, (receives, sends)) in enumerate(zip(groups, woven, strict=True)):
            tasks = []
            for number, group in enumerate(own):
                tasks += [self._receive(buffers[transfer], transfer) for transfer in receives.get(number, ())]
                for place, task in enumerate(group):
                    tasks.append(task)
                    tasks += [
                        self._send(stage, buffers[transfer], transfer)
                        for transfer in sends.get(Slot(number, place), ())
                    ]
            yield tasks

    def _send(self, stage: int, transfer: _SentBuffer, number: int) -> Task:
        return Task(
            kind="send", stage=stage, micro_batch=transfer.buffer.micro_batch, reads=(transfer.buffer,),
            peer=transfer.route.target, transfer=number,
        )  # fmt: skip

    def _receive(self, transfer: _SentBuffer, number: int) -> Task:
        return Task(
            kind="receive", stage=transfer.route.target, micro_batch=transfer.buffer.micro_batch,
            writes=(transfer.buffer,), peer=transfer.route.source, transfer=number,
        )  # fmt: skip


def _feeds(first: ProgramSpec, second: ProgramSpec) -> bool:
    return not set(first.writes).isdisjoint(second.reads)


def _slots(groups: Groups) -> Iterator[tuple[Slot, Task]]:
    for number, group in enumerate(groups):
        for place, task in enumerate(group):
            yield Slot(number, place), task


def _free_after_last_use(tasks: Sequence[Task]) -> tuple[Task, ...]:
    """The tasks, each with `frees`: buffers not read, written or handed over later on the stage."""
    needed: set[Buffer] = set()
    out = []
    for task in reversed(tasks):
        touched = dict.fromkeys((*task.reads, *task.writes))
        frees = tuple(b for b in touched if b not in needed and b.value != MICRO_BATCH)
        needed.update(touched)
        out.append(replace(task, frees=frees) if frees else task)
    return tuple(reversed(out))
