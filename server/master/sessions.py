"""The master's state of one session: arrays, executables, numbered steps.

Steps and releases of a session form one queue; its head is dispatched once all its arguments are there: dispatch order
is number order on every executor. Life of an array id:

| state     | meaning                                        | a step that reads it       |
|-----------|------------------------------------------------|----------------------------|
| (unknown) | not written yet, or never                      | waits, then ArrayError     |
| arriving  | put on some of its nodes, not on all           | waits, then ArrayError     |
| being read | output of a batch that the workers read       | waits for the workers      |
| there     | put on all, or output of a dispatched step     | may run                    |
| gone      | released, donated, lost, or its step failed    | fails with `drop_reasons`'s reason |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from types import MappingProxyType

from shardwright.errors import (
    ArrayError,
    CheckpointError,
    ResourceLimitError,
    SessionError,
    ShardwrightError,
    StepCancelledError,
)
from shardwright.server.limits import Limits
from shardwright.server.master.events import Kept, ProgramInfo, ReleaseRequested, StepRequested
from shardwright.server.master.people import Person
from shardwright.server.master.session_records import Executable, QueuedRequest, Save, Snapshots, StepOutcome
from shardwright.server.master.statistics import Statistics
from shardwright.server.tuning import MAX_REMEMBERED_DROPS, MAX_REMEMBERED_SAVES
from shardwright.units import format_bytes

#: Why an array is gone: the step it was donated to, 0 for "released", or an error. A step donates
#: hundreds of arrays, and hardly ever is one of them asked for: words are made when it is.
DropReasons = int | ShardwrightError


@dataclass(slots=True)
class Session:
    """Mutable record; every step number is in exactly one of queue, running, outcomes (or forgotten).

    name: by which another process may take it up; "": none. first_number: of the steps that this master knows of.
    highest_id: of all arrays so far. kept: as of the last step that began. loss: why arrays of before a restart of the
    master are gone. awaits_number: its client says where its numbers go on. is_unreported: executors of before may
    have it; until they are heard, steps are held. live: arrays that its client took to be there when it came back.
    highest_made: newest output of a step that succeeded. is_protected: whether its client makes all arrays again after
    a loss. told: the head that its client was told of.
    has_programs: it sent some. has_losses: arrays were lost, which its client is to be told. person: whose it is.
    """

    session_id: str
    limits: Limits
    last_seen_s: float
    person: Person
    name: str = ""
    is_open: bool = False  # on the executors of the running generation
    open_call: int | None = None
    stream: int | None = None
    first_number: int = 1
    last_number: int = 0
    highest_id: int = 0
    highest_made: int = 0
    kept: Kept | None = None
    loss: ShardwrightError | None = None
    is_loss_told: bool = False
    awaits_number: bool = False
    is_unreported: bool = False
    is_protected: bool = False
    told: tuple[int, bool] = (0, False)
    has_programs: bool = False
    has_losses: bool = False
    live: tuple[int, ...] = ()
    held: list[StepRequested] = field(default_factory=list)
    reply_cursor: int = 1
    queue: deque[QueuedRequest] = field(default_factory=deque)
    running: dict[int, int] = field(default_factory=dict)  # step number → sequence
    cancelled: set[int] = field(default_factory=set)  # numbers that were cancelled before their steps came
    outcomes: dict[int, StepOutcome] = field(default_factory=dict)
    arrays: dict[int, int] = field(default_factory=dict)  # id → logical bytes, of those there or arriving
    arriving: dict[int, set[int]] = field(default_factory=dict)  # id → nodes where its shards are not yet
    being_read: set[int] = field(default_factory=set)  # outputs of batches: a worker may fail where others do not
    drop_reasons: dict[int, DropReasons] = field(default_factory=dict)
    array_bytes: int = 0
    executables: dict[str, Executable] = field(default_factory=dict)
    saves: dict[int, Save] = field(default_factory=dict)  # by step number; the last one may be under way
    snapshots: Snapshots = field(default_factory=Snapshots)
    retired: dict[str, ShardwrightError] = field(default_factory=dict)  # programs of nodes that are gone
    last_step_s: float = 0.0  # when the last step ended
    statistics: Statistics = field(default_factory=Statistics)  # the server's
    owner: str = ""  # name of the token that it was opened with
    salt: str = ""  # of one with a name: see `session_secrets.py`

    @property
    def label(self) -> str:
        """For people: who has it, and digits that tell it apart."""
        return self.session_id[:8] + (f" of {self.owner}" if self.owner else "")

    @property
    def holds_anything(self) -> bool:
        """Whether its end would cost its client more than a connection; also where nobody can tell yet."""
        snapshots = self.snapshots
        has_state = self.kept is not None or snapshots.complete or snapshots.copied_kept
        has_news = self.has_losses or self.loss is not None or self.is_unreported
        return bool(self.arrays or self.executables or self.has_programs or has_state or has_news)

    # ---- arrays ------------------------------------------------------------
    def add_array(self, array_id: int, size_bytes: int) -> None:
        self.arrays[array_id] = size_bytes
        self.highest_id = max(self.highest_id, array_id)
        self.array_bytes += size_bytes
        self.person.array_bytes += size_bytes
        self.drop_reasons.pop(array_id, None)

    def record_arrival(self, array_id: int, size_bytes: int, node: int, holders: frozenset[int]) -> None:
        """Shards of `array_id` were put on `node`, one of its `holders`."""
        if array_id not in self.arrays:
            self.add_array(array_id, size_bytes)
            self.arriving[array_id] = set(holders)
        missing = self.arriving.get(array_id)
        if missing is not None:
            missing.discard(node)
            if not missing:
                del self.arriving[array_id]

    def drop_array(self, array_id: int, why: DropReasons = 0) -> bool:
        """Whether it was there; afterwards it is gone either way."""
        size_bytes = self.arrays.pop(array_id, None)
        self.array_bytes -= size_bytes or 0
        self.person.array_bytes -= size_bytes or 0
        self.arriving.pop(array_id, None)
        self.being_read.discard(array_id)
        self.drop_reasons[array_id] = why
        if len(self.drop_reasons) > 2 * MAX_REMEMBERED_DROPS:  # seldom, and then all at once
            for old in list(islice(self.drop_reasons, MAX_REMEMBERED_DROPS)):
                del self.drop_reasons[old]
        return size_bytes is not None

    def why_gone(self, array_id: int) -> ShardwrightError:
        why = self.drop_reasons[array_id]
        if isinstance(why, ShardwrightError):
            return why
        if why == 0:
            return ArrayError(f"array {array_id} was released", remedy="keep the handle for as long as you need it")
        return ArrayError(
            f"array {array_id} was donated to step {why}",
            remedy="use the step's results instead, or do not donate it",
        )

    # ---- steps -------------------------------------------------------------
    def refusal(self, step: StepRequested) -> ShardwrightError | None:
        """Why the step can never run, or None."""
        if step.files is not None and step.files.is_save and (busy := self._save_refusal()) is not None:
            return busy
        executable = self.executable_of(step)
        if executable is None:
            unknown = ArrayError(f"no executable {step.executable_id!r} is loaded", remedy="load the plan first")
            return self.retired.get(step.executable_id, unknown)
        if not self.drop_reasons.keys().isdisjoint(step.arguments):
            return self.why_gone(next(array_id for array_id in step.arguments if array_id in self.drop_reasons))
        if executable.program is None:
            return None
        return self._find_mismatch(step, executable.program) or self._find_excess(step, executable.program)

    def executable_of(self, step: StepRequested) -> Executable | None:
        """What the step runs; a save, snapshot, restore, batch or move is an executable of its own, loaded
        everywhere."""
        own = step.files or step.snapshot or step.batch
        output_bytes = own.output_bytes if own is not None else step.moved_bytes
        if output_bytes is None:
            return self.executables.get(step.executable_id)
        program = ProgramInfo(
            plan_id="",
            argument_count=len(step.arguments),
            donated=frozenset(),
            output_bytes=output_bytes,
        )
        return Executable(plan_id="", state="loaded", program=program)

    def _find_mismatch(self, step: StepRequested, program: ProgramInfo) -> ShardwrightError | None:
        if len(step.arguments) != program.argument_count or len(step.outputs) != len(program.output_bytes):
            return ArrayError(
                f"{len(step.arguments)} arguments and {len(step.outputs)} outputs for a program of "
                f"{program.argument_count} and {len(program.output_bytes)}"
            )
        distinct = set(step.arguments)
        if len(distinct) != len(step.arguments):
            for number in program.donated:
                if step.arguments.count(step.arguments[number]) > 1:
                    return ArrayError(
                        f"array {step.arguments[number]} is donated as argument {number} and passed twice",
                        remedy="pass a copy, or do not donate it",
                    )
        for array_id in distinct.intersection(step.released):
            return ArrayError(f"array {array_id} is released before the step reads it", remedy="release it later")
        fresh = [array_id for array_id in (*step.outputs, *(inline for inline, _ in step.inline)) if array_id]
        for array_id in self.arrays.keys() & fresh:
            return ArrayError(f"array id {array_id} is in use already", remedy="give each new array a new id")
        if len(set(fresh)) != len(fresh):
            return ArrayError("an array id is given to two new arrays", remedy="give each new array a new id")
        return None

    def _find_excess(self, step: StepRequested, program: ProgramInfo) -> ShardwrightError | None:
        added = sum(program.output_bytes) + sum(size for _, size in step.inline)
        if self.excess(added, len(step.outputs) + len(step.inline)) is None:
            return None  # whatever it frees
        added -= sum(size for array_id, size in zip(step.outputs, program.output_bytes, strict=True) if not array_id)
        freed = {step.arguments[number] for number in program.donated} | set(step.released)
        added -= sum(self.arrays.get(array_id, 0) for array_id in freed)
        return self.excess(added, len(step.outputs) + len(step.inline))

    def excess(self, added_bytes: int, added_arrays: int) -> ResourceLimitError | None:
        """What is wrong with that many more arrays and bytes, or None."""
        limits, count, size_bytes = self.limits, len(self.arrays) + added_arrays, self.array_bytes + added_bytes
        if size_bytes <= limits.session_array_bytes and count <= limits.arrays_per_session:
            return self.person.excess(added_bytes)
        return ResourceLimitError(
            f"the session's {count} arrays would take {format_bytes(size_bytes)}, its limits are "
            f"{limits.arrays_per_session} arrays and {format_bytes(limits.session_array_bytes)}",
            remedy="release arrays, or raise the server's limit",
        )

    def missing_arguments(self, step: StepRequested) -> list[int]:
        """Arguments that are not on every node yet."""
        inline = {array_id for array_id, _ in step.inline}
        arrays, arriving, being_read = self.arrays, self.arriving, self.being_read
        return [
            array_id
            for array_id in step.arguments
            if (array_id not in arrays or array_id in arriving or array_id in being_read) and array_id not in inline
        ]

    def number_refusal(self, number: int) -> ShardwrightError | None:
        """Why step `number` may not come now, or None; a number that was seen before may."""
        if number > self.last_number + 1 or number < 1:
            return SessionError(
                f"step {number} does not follow step {self.last_number}", remedy="number steps 1, 2, 3, …"
            )
        if number <= self.last_number - self.limits.pending_steps:
            return SessionError(f"the reply to step {number} is no longer kept", remedy="open a new session")
        if self.reply_cursor and number - self.reply_cursor >= self.limits.pending_steps:
            return ResourceLimitError(
                f"step {number} was sent, but the reply to step {self.reply_cursor} is still out",
                remedy=f"send at most {self.limits.pending_steps} steps ahead of the replies",
            )
        return None

    def enqueue(self, request: StepRequested | ReleaseRequested, now_s: float, *, is_again: bool = False) -> None:
        """Steps by number; a release right after the step that it names, though that may come later."""
        queue, order = self.queue, _order(request)
        at = len(queue)
        while at and _order(queue[at - 1].request) > order:
            at -= 1
        queue.insert(at, QueuedRequest(request=request, since_s=now_s, is_again=is_again))

    def is_late(self, item: QueuedRequest, now_s: float) -> bool:
        return now_s - item.since_s > self.limits.argument_wait_s

    def lateness(self, item: QueuedRequest, now_s: float) -> ShardwrightError | None:
        """Why the step has waited too long for its arguments, or None."""
        if not self.is_late(item, now_s) or not isinstance(item.request, StepRequested):
            return None
        missing = self.missing_arguments(item.request)
        if not missing or not self.being_read.isdisjoint(missing):
            return None  # compiling takes as long as it takes, and reading as long as its own step may
        return ArrayError(
            f"array {missing[0]}, an argument of step {item.request.number}, was not written within "
            f"{self.limits.argument_wait_s:g} s",
            remedy="put it on every node, or run the step that makes it",
        )

    def is_loaded(self, step: StepRequested) -> bool:
        executable = self.executable_of(step)
        return executable is not None and executable.state == "loaded"

    def start(self, step: StepRequested, sequence: int, now_s: float) -> None:
        """Book a step as dispatched: its inputs and outputs change hands now."""
        executable = self.executable_of(step)
        assert executable is not None
        assert executable.program is not None
        program = executable.program
        for array_id in step.released:
            self.drop_array(array_id)
        for array_id, size_bytes in step.inline:
            self.add_array(array_id, size_bytes)
        for number in program.donated:
            self.drop_array(step.arguments[number], step.number)
        for array_id, size_bytes in zip(step.outputs, program.output_bytes, strict=True):
            if array_id:
                self.add_array(array_id, size_bytes)
        if step.batch is not None:
            self.being_read.update(step.outputs)
        if step.snapshot is not None and step.snapshot.is_restore:
            self.drop_reasons.clear()  # what was lost is made again by steps that follow
        self.running[step.number] = sequence
        if step.kept is not None:
            before = self.kept.description if self.kept is not None else b""
            self.kept = replace(step.kept, description=step.kept.description or before)
        if step.snapshot is not None and not step.snapshot.is_restore:
            self.snapshots.copied_kept[step.number] = self.kept
        if step.files is not None and step.files.is_save:
            self._start_save(step, now_s)

    def finish(self, number: int, outcome: StepOutcome, kind: str = "step") -> None:
        """Keep the outcome of step `number`, and forget outcomes no client may ask for again."""
        self.statistics.step_ended(self.session_id, kind, outcome.error, outcome.run_s)
        self.running.pop(number, None)
        self.outcomes[number] = outcome
        self.outcomes.pop(number - 2 * self.limits.pending_steps, None)

    @property
    def current_save(self) -> Save | None:
        """The save that is under way; a session has one at a time."""
        last = next(reversed(self.saves.values()), None)
        return None if last is None or last.is_done else last

    def _save_refusal(self) -> CheckpointError | None:
        """Why no save may begin now, or None."""
        save = self.current_save
        if save is None:
            return None
        return CheckpointError(f"the save of step {save.number} is still under way", remedy="wait for it first")

    def _start_save(self, step: StepRequested, now_s: float) -> None:
        """Book a save whose step was dispatched."""
        expected_bytes = sum(self.arrays[array_id] for array_id in step.arguments)
        self.saves[step.number] = Save(
            number=step.number, expected_bytes=expected_bytes, started_s=now_s, work=self.statistics.saves
        )
        for old in list(self.saves)[:-MAX_REMEMBERED_SAVES]:
            del self.saves[old]

    def take_number(self, number: int) -> None:
        """The first step of a client that is back: it had answers to all before."""
        self.awaits_number = False
        if self.loss is not None or number > self.last_number + 1:
            self.first_number, self.last_number = number, number - 1
            self.outcomes.clear()
            self.cancelled.clear()

    def change_person(self, name: str) -> None:
        """Its client says who it is: after a restart of the master, only the owner is known. name: "": it does not."""
        person = self.person
        if name and person.name != name:
            person.people.leave(person, self.array_bytes)
            self.person = person.people.join(person.people.find(name))
            self.person.array_bytes += self.array_bytes

    def check_invariants(self) -> None:
        queued = [item.request.number for item in self.queue if isinstance(item.request, StepRequested)]
        numbers = [*self.outcomes, *self.running, *queued]
        assert len(set(numbers)) == len(numbers), "a step number is in one place only"
        assert all(0 < number <= self.last_number for number in numbers)
        assert queued == sorted(queued), "steps wait in the order of their numbers"
        oldest = self.last_number - self.limits.pending_steps
        assert all(number in numbers for number in range(max(self.first_number, oldest), self.last_number + 1)), (
            "no number is lost"
        )
        assert self.array_bytes == sum(self.arrays.values())
        assert not self.arrays.keys() & self.drop_reasons.keys(), "an array is there or gone"
        assert self.arriving.keys() <= self.arrays.keys()
        assert self.being_read <= self.arrays.keys()
        assert bool(self.being_read) <= bool(self.running)
        assert bool(self.running) <= self.is_open


def _order(request: StepRequested | ReleaseRequested) -> tuple[int, int]:
    return (request.number, 0) if isinstance(request, StepRequested) else (request.after_step, 1)


def unknown_session(session_id: str, reasons: Mapping[str, str] = MappingProxyType({})) -> SessionError:
    """reasons: why sessions of a master before are not there, by id."""
    if session_id in reasons:
        return lost_session(reasons[session_id])
    return SessionError(
        f"no session {session_id[:8] or '(empty)'}: it was closed, expired, or belongs to a server that was restarted",
        remedy="open a new session",
    )


def lost_session(why: str) -> SessionError:
    """Of one whose row in the store was damaged."""
    return SessionError(
        f"the session is lost: the server's state was damaged ({why})",
        remedy="connect again, which opens a new session, and restore a checkpoint",
    )


def cancelled_in_time(number: int, by: str = "") -> StepCancelledError:
    """Of one that had not."""
    return StepCancelledError(
        f"step {number} was cancelled {by}before it ran",
        remedy="its arguments are as they were, if no handle was donated",
    )
