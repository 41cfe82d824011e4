"""What the master knows of one session: arrays, executables, numbered steps.

Steps and releases of a session form one queue; its head is dispatched as soon
as everything that it reads is there, so dispatch order is number order on
every executor. Life of an array id:

| state     | meaning                                        | a step that reads it       |
|-----------|------------------------------------------------|----------------------------|
| (unknown) | not written yet, or never                      | waits, then ArrayError     |
| arriving  | put on some nodes, not on all                  | waits, then ArrayError     |
| there     | put everywhere, or output of a dispatched step | may run                    |
| gone      | released, donated, lost, or its step failed    | fails with `gone`'s reason |
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from shardwright.errors import ArrayError, ResourceLimitError, ShardwrightError
from shardwright.server.limits import Limits
from shardwright.server.master.events import ProgramFacts, ReleaseRequested, StepRequested

#: How many ids that are gone are remembered, to say why; older ones count as unknown.
GONE_REMEMBERED = 65_536


@dataclass(slots=True)
class ArrayRecord:
    """nodes: where its shards have arrived; None: everywhere."""

    size_bytes: int
    nodes: set[int] | None = None


@dataclass(slots=True)
class Executable:
    """state: "compiling", "loading" (or waiting for a cluster to load on), "loaded"."""

    plan_id: str
    state: str = "compiling"
    program: ProgramFacts | None = None
    waiting_calls: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What a step number ended with; kept until the client cannot ask again."""

    error: ShardwrightError | None
    values: tuple[object, ...] = ()
    run_s: float = 0.0


@dataclass(slots=True)
class Queued:
    """A step or a release in the session's queue, and since when it waits."""

    request: StepRequested | ReleaseRequested
    since_s: float


@dataclass(slots=True)
class Session:
    """Mutable record; every step number is in exactly one of queue, running, outcomes (or forgotten)."""

    session_id: str
    limits: Limits
    last_seen_s: float
    is_open: bool = False  # on the executors of the running generation
    open_call: int | None = None
    stream: int | None = None
    last_number: int = 0
    reply_cursor: int = 1
    queue: deque[Queued] = field(default_factory=deque)
    running: dict[int, int] = field(default_factory=dict)  # step number → sequence
    outcomes: dict[int, StepOutcome] = field(default_factory=dict)
    arrays: dict[int, ArrayRecord] = field(default_factory=dict)
    gone: dict[int, ShardwrightError] = field(default_factory=dict)
    array_bytes: int = 0
    executables: dict[str, Executable] = field(default_factory=dict)

    # ---- arrays ------------------------------------------------------------
    def add_array(self, array_id: int, size_bytes: int) -> None:
        self.arrays[array_id] = ArrayRecord(size_bytes=size_bytes)
        self.array_bytes += size_bytes
        self.gone.pop(array_id, None)

    def arrived(self, array_id: int, size_bytes: int, node: int, node_count: int) -> None:
        """Shards of `array_id` were put on `node`."""
        record = self.arrays.get(array_id)
        if record is None:
            self.add_array(array_id, size_bytes)
            record = self.arrays[array_id]
            record.nodes = set()
        if record.nodes is not None:
            record.nodes.add(node)
            if len(record.nodes) == node_count:
                record.nodes = None

    def drop_array(self, array_id: int, why: ShardwrightError) -> bool:
        """Whether it was there; afterwards it is gone either way."""
        record = self.arrays.pop(array_id, None)
        if record is not None:
            self.array_bytes -= record.size_bytes
        self.gone.pop(array_id, None)
        self.gone[array_id] = why
        while len(self.gone) > GONE_REMEMBERED:
            del self.gone[next(iter(self.gone))]
        return record is not None

    # ---- steps -------------------------------------------------------------
    def refusal(self, step: StepRequested) -> ShardwrightError | None:
        """Why the step can never run, or None."""
        executable = self.executables.get(step.executable_id)
        if executable is None:
            return ArrayError(f"no executable {step.executable_id!r} is loaded", remedy="load the plan first")
        for array_id in step.arguments:
            if array_id in self.gone:
                return self.gone[array_id]
        if executable.program is None:
            return None
        return self._misfit(step, executable.program) or self._over_limit(step, executable.program)

    def _misfit(self, step: StepRequested, program: ProgramFacts) -> ShardwrightError | None:
        if len(step.arguments) != program.argument_count or len(step.outputs) != len(program.output_bytes):
            return ArrayError(
                f"{len(step.arguments)} arguments and {len(step.outputs)} outputs for a program of "
                f"{program.argument_count} and {len(program.output_bytes)}"
            )
        for number in program.donated:
            if step.arguments.count(step.arguments[number]) > 1:
                return ArrayError(
                    f"array {step.arguments[number]} is donated as argument {number} and passed twice",
                    remedy="pass a copy, or do not donate it",
                )
        for array_id in step.released:
            if array_id in step.arguments:
                return ArrayError(
                    f"array {array_id} is released before the step that reads it", remedy="release it later"
                )
        fresh = [array_id for array_id in (*step.outputs, *(inline for inline, _ in step.inline)) if array_id]
        for array_id in fresh:
            if array_id in self.arrays:
                return ArrayError(f"array id {array_id} is in use already", remedy="give each new array a new id")
        if len(set(fresh)) != len(fresh):
            return ArrayError("an array id is given to two new arrays", remedy="give each new array a new id")
        return None

    def _over_limit(self, step: StepRequested, program: ProgramFacts) -> ShardwrightError | None:
        added = sum(size for array_id, size in zip(step.outputs, program.output_bytes, strict=True) if array_id)
        added += sum(size for _, size in step.inline)
        freed = {step.arguments[number] for number in program.donated} | set(step.released)
        added -= sum(self.arrays[array_id].size_bytes for array_id in freed if array_id in self.arrays)
        return self.excess(added, len(step.outputs) + len(step.inline))

    def excess(self, added_bytes: int, added_arrays: int) -> ResourceLimitError | None:
        """What is wrong with that many more arrays and bytes, or None."""
        limits, count, size_bytes = self.limits, len(self.arrays) + added_arrays, self.array_bytes + added_bytes
        if size_bytes <= limits.session_array_bytes and count <= limits.arrays_per_session:
            return None
        return ResourceLimitError(
            f"the session's {count} arrays would take {size_bytes / 2**30:.2f} GiB, its limits are "
            f"{limits.arrays_per_session} arrays and {limits.session_array_bytes / 2**30:.2f} GiB",
            remedy="release arrays, or raise the server's limit",
        )

    def missing_arguments(self, step: StepRequested) -> list[int]:
        """Arguments that are not on every node yet."""
        inline = {array_id for array_id, _ in step.inline}
        return [
            array_id
            for array_id in step.arguments
            if array_id not in inline and ((record := self.arrays.get(array_id)) is None or record.nodes is not None)
        ]

    def start(self, step: StepRequested, sequence: int) -> None:
        """Book a step as dispatched: its inputs and outputs change hands now."""
        program = self.executables[step.executable_id].program
        assert program is not None
        for array_id in step.released:
            self.drop_array(array_id, ArrayError(f"array {array_id} was released"))
        for array_id, size_bytes in step.inline:
            self.add_array(array_id, size_bytes)
        for number in program.donated:
            array_id = step.arguments[number]
            self.drop_array(array_id, donated_error(array_id, step.number))
        for array_id, size_bytes in zip(step.outputs, program.output_bytes, strict=True):
            if array_id:
                self.add_array(array_id, size_bytes)
        self.running[step.number] = sequence

    def finish(self, number: int, outcome: StepOutcome) -> None:
        """Keep what step `number` ended with, and forget what no client may ask for again."""
        self.running.pop(number, None)
        self.outcomes[number] = outcome
        self.outcomes.pop(number - 2 * self.limits.pending_steps, None)

    def check_invariants(self) -> None:
        queued = [item.request.number for item in self.queue if isinstance(item.request, StepRequested)]
        known = [*self.outcomes, *self.running, *queued]
        assert len(set(known)) == len(known), "a step number is in one place only"
        assert all(0 < number <= self.last_number for number in known)
        assert queued == sorted(queued), "steps wait in the order of their numbers"
        oldest = self.last_number - self.limits.pending_steps
        assert all(number in known for number in range(max(1, oldest), self.last_number + 1)), "no number is lost"
        assert self.array_bytes == sum(record.size_bytes for record in self.arrays.values())
        assert not self.arrays.keys() & self.gone.keys(), "an array is there or gone"
        assert bool(self.running) <= self.is_open


def donated_error(array_id: int, number: int) -> ArrayError:
    return ArrayError(
        f"array {array_id} was donated to step {number}", remedy="use the step's results instead, or do not donate it"
    )
