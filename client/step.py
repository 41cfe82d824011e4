"""One parallelized function: calls become programs planned around the arrays, then numbered steps."""

from __future__ import annotations

import itertools
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import jax

from shardwright.builders.base import Builder
from shardwright.builders.choices import PlanChoice, change_options, list_choices, predicted_step_s
from shardwright.builders.runner_ups import change_choice
from shardwright.client.alternatives import Alternative, PlanSearch, describe_plan
from shardwright.client.announcement import Announcement
from shardwright.client.arrays import RemoteArray
from shardwright.client.checks import checks_from_settings, raise_not_finite, warn_of_settings
from shardwright.client.donation import donate, require_donated_once
from shardwright.client.frontends.program import ExportingFrontEnd, FrontEnd, Program
from shardwright.client.pins import is_pinned_twice, list_batch_leaves, may_stay, pin_arrays, pin_layouts
from shardwright.client.placement import Placement
from shardwright.client.plan_changes import PlanChange, PlanHistory
from shardwright.client.plan_trials import PlanTrials, Trial, start_trial
from shardwright.client.programs import StepProgram, describe_difference
from shardwright.client.resharding import fits, is_unread_batch, move_state, place
from shardwright.client.step_result import StepResult
from shardwright.client.step_times import StepTimes
from shardwright.client.stream import STEPS_AHEAD
from shardwright.client.tuning_record import read_record, record_path, write_record
from shardwright.errors import (
    AnnotationError,
    OptionError,
    PlanError,
    ShardwrightError,
    UnsupportedProgramError,
)
from shardwright.hlo import parse
from shardwright.options.plan_options import MEASURED, PlanOptions
from shardwright.options.user_options import UserOptions, show_options
from shardwright.plans.plan import TAKEN_OVER
from shardwright.progress import PlanProgress
from shardwright.user_plans import PipelinePlan, Plan

if TYPE_CHECKING:
    import os

    from shardwright.client.checkpoints import Save
    from shardwright.client.connection import Preparation
    from shardwright.client.session_state import SessionState
    from shardwright.client.step_trace import StepTrace

_log = logging.getLogger("shardwright")

#: Programs of one signature that differ in the layout of the arrays they take; then arrays are moved instead.
PROGRAMS_OF_A_SIGNATURE = 2

#: Programs of a step from which on it is told how many there are.
_MANY_PROGRAMS = 4


class Step:
    """A function running on the servers; made by `Session.parallelize`, called like the function.

    The first call traces, plans, compiles and loads a program; later calls with arguments of the same types run it. A
    call with other types (a last, smaller batch) plans another program around the state's layouts.
    """

    def __init__(
        self,
        session: SessionState,
        function: FrontEnd,
        options: PlanOptions,
        progress: Callable[[PlanProgress], None] | None = None,
        builder: Builder | None = None,
        *,
        timeout_s: float = 0.0,
        snapshot_every: int = 0,
    ) -> None:
        self._session = session
        self._steps = session.steps
        self._cluster = session.cluster
        self._saves = session.saves
        self._snapshot_every = snapshot_every
        self._builder = builder
        self._timeout_s = timeout_s
        self._is_in_background = options.background
        self._is_measured = options.effort == MEASURED
        self._is_remembered = False  # whether its plan is that of an earlier measurement
        self._first: tuple[StepProgram, Sequence[PlanChoice]] | None = None  # to look for others beside it
        self._trials: PlanTrials[_Plans] | None = None
        self._history = PlanHistory(function.name, progress)
        self._under_way: deque[StepResult] = deque(maxlen=STEPS_AHEAD)  # so many, at most, are unfinished
        self._preparing: set[Preparation] = set()
        self._function = function
        self._options = replace(options, background=False)
        self._listener = progress
        self._announcement = Announcement(function.name, session.info, progress)
        self._lowered: dict[Hashable, Program] = {}
        self._programs: dict[Hashable, list[StepProgram]] = {}
        self._main: StepProgram | None = None
        self._main_signature: Hashable = None
        self._batch_leaves: dict[Hashable, tuple[int, ...]] = {}  # leaves that workers read themselves, by signature
        self._read_handles: dict[Hashable, tuple[int, ...]] = {}  # leaves that are other steps' state, by signature
        self._updated: dict[int, weakref.ref[RemoteArray]] = {}  # state after the last call, by flat argument number
        self._left_places: set[Placement] = set()  # where plans that were replaced have left arrays
        self._layout_changes = 0  # of the session, when the programs were made
        session.steps.add_user(self)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Runs the function on the servers; returns its result with a RemoteArray in place of each array.

        Does not wait for the result: an error of the step is raised when a result is read, or by the next call.
        Arguments: pytrees of handles, numpy and JAX arrays, numbers.

        Handles captured by the function at tracing are arguments of every call. With `jax_debug_nans` or
        `jax_debug_infs` the call waits, and raises NonFiniteError when a result holds such values.
        """
        try:
            return self._run(args, kwargs)[1]
        except KeyboardInterrupt as interrupt:
            raise KeyboardInterrupt(*interrupt.args) from None  # the way down to where it came tells the user nothing

    def measure(self, /, *args: Any, **kwargs: Any) -> tuple[Any, StepTrace]:
        """A measured call, waited for: its result, and the times of each stage's tasks.

        Tasks wait for their results one by one: the step is a little slower than usual.
        """
        return self._run_measured(args, kwargs)[1:]

    def trace(self, path: str | os.PathLike[str], /, *args: Any, **kwargs: Any) -> Any:
        """A measured call, written to `path` in the trace format of ui.perfetto.dev: predicted times above measured
        ones, a track per device. Returns the call's result.
        """
        from shardwright.report.plan_trace import plan_trace
        from shardwright.report.trace import write_trace

        program, result, measured = self._run_measured(args, kwargs)
        node_of = {device: node.index for node in self._cluster.info.nodes for device in node.devices}
        trace = plan_trace(
            program.plan, measured=measured.tasks, measured_s=measured.run_s, node_of=node_of.__getitem__
        )
        write_trace(path, trace)
        return result

    def _run_measured(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[StepProgram, Any, StepTrace]:
        from shardwright.client.step_trace import StepTrace

        program, result = self._run(args, kwargs, is_traced=True)
        done = next((leaf._result for leaf in jax.tree.leaves(result) if leaf._result is not None), None)
        if done is None:
            return program, result, StepTrace(run_s=0.0, tasks=(), live=())
        done.wait()
        return program, result, StepTrace.of(done.traces, done.run_s)

    def _run(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_traced: bool = False
    ) -> tuple[StepProgram, Any]:
        warn_of_settings(self._cluster)
        if self._snapshot_every:
            self._steps.protect(self._snapshot_every)
        with self._announcement.ended_by_errors():
            return self._steps.steadily(lambda: self._run_once(args, kwargs, is_traced=is_traced))

    def _run_once(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_traced: bool) -> tuple[StepProgram, Any]:
        self._steps.raise_earlier_error()  # rather than that there is no plan for the nodes that are left
        self._leave_other_nodes()
        signature, leaves, dynamic = self._function.describe(args, kwargs)
        leaves = self._lower(signature, announces=True).with_captured(leaves)
        if self._trials is not None:
            self._follow_trials(self._trials, signature, leaves)
        program = self._find_program(signature, leaves)
        if program is None:
            with self._announcement:
                program = self._prepare_program(signature, leaves, dynamic)
            leaves = place(self._steps, leaves, program, program.donated)
            self._start_trials()
        elif any(map(is_unread_batch, leaves)):
            leaves = place(self._steps, leaves, program, program.donated)
        if program.lowered.changed:
            self._function.check_arguments(dynamic)
        require_donated_once(program, leaves)
        checks = checks_from_settings()
        sent_s = time.monotonic()
        results = self._steps.run(
            program,
            leaves,
            is_traced=is_traced,
            checks=checks,
            timeout_s=self._timeout_s,
            plan_again=partial(self._plan_again, signature),
        )
        self._history.calls += 1
        self._history.tell()
        ran = [handle._result for handle in results[:1] if handle is not None and handle._result]
        self._under_way.extend(ran)
        if self._trials is not None and program is self._main and not (is_traced or checks):
            for result in ran:
                self._trials.record(result, sent_s)
        if program.donated:
            self._updated = donate(program, leaves, results)
        result = program.lowered.build_result(results)
        self._function.write_back(dynamic, program.lowered, results)
        if checks:
            raise_not_finite(program.lowered, results, result)
        return program, result

    def cancel(self) -> int:
        """Ends the unfinished calls; may be called from another thread. Returns how many there were.

        A call that is being planned, compiled or loaded raises StepCancelledError, and the servers stop that work.
        A call that waits fails with StepCancelledError at once. One that runs keeps its results if it ends within the
        server's grace: 10 seconds, or twice what it took before where other sessions would lose arrays by its end.
        After that the executors are replaced, and arrays that no snapshot keeps are gone (WorkerLostError); the session
        goes on. Who waits is told. Ctrl-C in a wait does the same. A search in the background ends, too.
        """
        if self._trials is not None:
            self._trials.cancel()
        preparing = list(self._preparing)
        for preparation in preparing:
            preparation.cancel()
        numbers = [result.number for result in self._under_way if not result.is_done]
        return len(preparing) + (self._cluster.master.cancel_steps(numbers) if numbers else 0)

    def init(self, init_fn: Callable[..., Any], *args: Any) -> Any:
        """`init_fn(*args)`, run on the servers in the layouts of this step's arguments.

        Returns handles at once; it runs when the step is first called with them, or when one of them is read. Raises
        UnsupportedProgramError on host callbacks in `init_fn`.
        """
        from shardwright.client.initializer import PendingInit

        self._cluster.require_open()
        return PendingInit(self._steps, init_fn, args).handles()

    def save(
        self, state: Any, directory: str | os.PathLike[str], *, step: int | None = None, max_to_keep: int | None = None
    ) -> Save:
        """Writes `state`, a pytree of handles, to a checkpoint; see `Session.save`."""
        return self._saves.save(state, directory, step=step, max_to_keep=max_to_keep)

    def restore(self, directory: str | os.PathLike[str], *, step: int | None = None, like: Any = None) -> Any:
        """A checkpoint in handles, laid out by this step's plan when the step is called; see `Session.restore`."""
        return self._saves.restore(directory, step=step, like=like)

    def lower(self, /, *args: Any, **kwargs: Any) -> Program:
        """The HLO text of the call, with names of arguments and outputs; nothing is sent or run.

        Arguments may be `jax.ShapeDtypeStruct`s.
        """
        signature, _, _ = self._function.describe(args, kwargs, takes_types=True)
        return self._lower(signature)

    def export(self, path: str | os.PathLike[str], /, *args: Any, **kwargs: Any) -> None:
        """Writes the step of a call for programs without this package; `jax.export.deserialize` reads the file.

        A function of one dict, argument name → array, that returns one dict, output name → array; the names are those
        of `lower(…)`. Handles and arrays that the function closes over are a part of it. Arguments may be
        `jax.ShapeDtypeStruct`s. It is compiled for the platform of the cluster.

        Raises UnsupportedProgramError where the step is HLO already, PlatformError without flatbuffers, OptionError
        where the file cannot be written.
        """
        signature, _, _ = self._function.describe(args, kwargs, takes_types=True)
        if not isinstance(self._function, ExportingFrontEnd):
            raise UnsupportedProgramError(
                f"{self._function.name} is a program already", remedy="keep its text: step.lower(…).hlo_text"
            )
        names = self._lower(signature).output_names
        exported = self._function.export(signature, names, platform=self._cluster.info.platform)
        try:
            Path(path).write_bytes(exported)
        except OSError as error:
            raise OptionError(f"{path} cannot be written: {error.strerror}", where="path") from None

    def compile(self, /, *args: Any, **kwargs: Any) -> Plan | PipelinePlan:
        """Plans, compiles and loads the program of a call without running it."""
        signature, leaves, dynamic = self._function.describe(args, kwargs, takes_types=True)

        def prepare() -> StepProgram:
            self._leave_other_nodes()
            return self._find_program(signature, leaves) or self._prepare_program(signature, leaves, dynamic)

        with self._announcement.ended_by_errors():
            leaves = self._lower(signature, announces=True).with_captured(leaves)
            with self._announcement:
                program = self._steps.steadily(prepare)
        self._start_trials()
        self._history.tell()
        return program.plan

    @show_options
    def replan(self, **options: Unpack[UserOptions]) -> Plan | PipelinePlan:
        """Plans the step's programs again under changed options, and moves its state to the new plan's layouts.

        Options that are not given stay as they are; None leaves one to the planner. State moves from device to device
        between two calls. Handles stay valid. Other steps over the state are planned around its new layouts when they
        are next called, or read copies of it. Returns the new plan.

        Raises PlanError before the first call, OptionError on a wrong option, and the errors of planning, compiling and
        moving. After an error the plan before goes on.
        """
        return self._steps.steadily(lambda: self._replan(options))

    def _replan(self, options: UserOptions) -> Plan | PipelinePlan:
        self._leave_other_nodes()
        self._require_program()
        builder, changed = change_options(self._builder, self._options, options)
        successor = Step(self._session, self._function, changed, self._listener, builder, timeout_s=self._timeout_s)
        successor._history, successor._lowered = self._history, self._lowered
        signatures = [signature for signature, programs in self._programs.items() if programs]
        for signature in sorted(signatures, key=lambda each: each != self._main_signature):
            lowered, newest = self._lower(signature), self._programs[signature][-1]
            leaves: list[Any] = [None] * len(lowered.leaf_numbers)
            arrays, specs = self._steps.arrays, lowered.leaf_specs
            for number in self._read_handles.get(signature, ()):
                leaves[number] = RemoteArray(arrays, specs[number], place=newest.leaf_places[number])
                leaves[number]._is_owned = True
            for number in self._batch_leaves.get(signature, ()):
                leaves[number] = RemoteArray(arrays, specs[number])
                leaves[number]._is_batch = True
            successor._add_program(signature, lowered, leaves)
        main = successor._require_program()
        state = self.current_state()
        self._move_state(main, [state.get(argument) for argument in main.leaf_numbers])
        self._end_trials()
        self._run_plans_of(successor._plans)
        self._history.add("replanned", describe_plan(main.plan), predicted_s=predicted_step_s(main.plan))
        self._first, self._is_measured = successor._first, successor._is_measured
        self._start_trials()
        self._history.tell()
        return main.plan

    @property
    def is_settled(self) -> bool:
        """Whether no other plan is looked for or tried any more."""
        return self._main is not None and self._first is None and (self._trials is None or self._trials.is_over)

    def wait_for_plans(self, timeout_s: float | None = None) -> bool:
        """Waits until no plan is searched for, compiled or loaded beside the step; returns whether that is so.

        timeout_s: seconds; None: as long as it takes. The plans that came of it are tried in the next calls.
        """
        return self._trials is None or self._trials.wait(timeout_s)

    @property
    def plan_changes(self) -> tuple[PlanChange, ...]:
        """What became of the step's plans: by `replan`, and in the background."""
        return self._history.changes

    @property
    def plan(self) -> Plan | PipelinePlan:
        """The plan of the first program, or what took its place. Raises PlanError before the first call."""
        return self._require_program().plan

    @property
    def report(self) -> str:
        """The plan's expectation beside XLA's result, in text: collectives, memory of a device, changes of the plan."""
        from shardwright.client.step_report import report_program

        program = self._require_program()
        return "\n".join(filter(None, (report_program(program.plan, program.load), str(self._history))))

    def dump(self, directory: str | os.PathLike[str]) -> tuple[Path, ...]:
        """Writes the servers' form of the first program into a folder, which is made; returns the files.

        Per program (one, or a pipeline's stages): `NAME.mlir`, the StableHLO with the plan in Shardy constraints;
        `NAME.hlo`, the output of XLA's partitioner on each device. Of a pipeline also `tasks.dot`, the task graph.
        Raises PlanError before the first call, OptionError when files cannot be written.
        """
        from shardwright.client.dumps import dump

        return dump(self._cluster, self._require_program(), Path(directory))

    def __repr__(self) -> str:
        plan = "not planned yet" if self._main is None else describe_plan(self._main.plan)
        return f"Step({self._function.name}, {plan})"

    # ---- which program ---------------------------------------------------------------

    def _find_program(self, signature: Hashable, leaves: list[Any]) -> StepProgram | None:
        for program in self._programs.get(signature, ()):
            if fits(leaves, program.leaf_places):
                return program
        return None

    def _prepare_program(self, signature: Hashable, leaves: list[Any], dynamic: Any) -> StepProgram:
        """A program for the call; handles may have to be resharded. `cancel` ends it."""
        with self._cluster.master.preparation() as preparation:
            self._preparing.add(preparation)
            try:
                return self._make_program(signature, leaves, dynamic)
            finally:
                self._preparing.discard(preparation)

    def _make_program(self, signature: Hashable, leaves: list[Any], dynamic: Any) -> StepProgram:
        programs = self._programs.setdefault(signature, [])
        if self._layout_changes != self._steps.layout_changes:
            self._layout_changes = self._steps.layout_changes
            del programs[:-1]  # for layouts that are gone
        has_placed = any(
            isinstance(leaf, RemoteArray) and leaf._place not in self._left_places and self._may_stay(leaf)
            for leaf in leaves
        )
        if programs and (not has_placed or len(programs) >= PROGRAMS_OF_A_SIGNATURE):
            return programs[-1]
        for leaf in leaves:
            if isinstance(leaf, RemoteArray) and leaf._pending is None:
                self._steps.arrays.usable_ids(leaf)
        self._function.check_arguments(dynamic)
        lowered = self._lower(signature)
        if self._main is not None:
            self._tell_of_another(describe_difference(self._main.lowered, lowered))
        return self._add_program(signature, lowered, leaves)

    def _tell_of_another(self, difference: str) -> None:
        """Log that a call takes a program of its own; warn of the fourth, and whenever their number has doubled."""
        count = len(self._programs)
        if count < _MANY_PROGRAMS or count & (count - 1):
            _log.info("%s: another program: %s", self._function.name, difference)
            return
        _log.warning(
            "%s: %d programs so far, each traced, planned and compiled: %s; pad batches to few shapes, pass numbers "
            "that change as arrays or tensors",
            self._function.name, count, difference,
        )  # fmt: skip

    def _add_program(self, signature: Hashable, lowered: Program, leaves: Sequence[Any]) -> StepProgram:
        """A new program of a signature."""
        is_main = self._main is None
        if is_main:
            self._history.begin()
        program, choices = self._plan_program(lowered, leaves)
        donated = set(program.donated)
        self._read_handles[signature] = tuple(
            number
            for number, leaf in enumerate(leaves)
            if isinstance(leaf, RemoteArray) and leaf._is_owned and number not in donated
        )
        self._batch_leaves[signature] = list_batch_leaves(leaves)
        self._programs.setdefault(signature, []).append(program)
        if is_main:
            self._main, self._main_signature = program, signature
            for note in (note for note in program.plan.notes if note.startswith(TAKEN_OVER)):
                _log.warning("%s: %s", self._function.name, note)
            has_trials = program.is_first or (self._is_measured and not self._is_remembered)
            self._first = (program, choices) if has_trials else None
        return program

    def _plan_program(self, lowered: Program, leaves: Sequence[Any]) -> tuple[StepProgram, Sequence[PlanChoice]]:
        """A program for the arrays' present layouts, and the ways to plan it; where the user's force forbids those
        layouts, one after moves."""
        choices = self._choices(lowered)
        if any(choice.options.plan_json for choice in choices):  # arrays move to where the plan has them
            return self._load(lowered, choices), choices
        device_count = self._cluster.info.device_count
        placed = [
            replace(choice, options=pin_arrays(choice.options, lowered, leaves, self._main, device_count))
            for choice in choices
        ]
        try:
            return self._load(lowered, placed), placed
        except (AnnotationError, PlanError):
            if not any(is_pinned_twice(choice.options) for choice in placed):
                raise
            free = [
                replace(choice, options=pin_layouts(replace(placed_choice.options, mesh=choice.options.mesh), {}, {}))
                for choice, placed_choice in zip(choices, placed, strict=True)
            ]
            return self._load(lowered, free), free

    def _load(self, lowered: Program, choices: Sequence[PlanChoice]) -> StepProgram:
        """The first program of a step takes the plan that was measured the fastest earlier, if there is one.

        With a search in the background it takes the first plan that fits.
        """
        if self._main is None and (remembered := self._load_remembered(lowered, choices)) is not None:
            return remembered
        if not self._is_in_background or self._main is not None:
            return self._steps.programs.prepare(lowered, choices, self._announcement)
        try:
            return self._steps.programs.prepare(lowered, choices, self._announcement, takes_first=True)
        except PlanError:
            if any(choice.options.deadline_s is not None for choice in choices):
                raise
            return self._steps.programs.prepare(lowered, choices, self._announcement)

    def _load_remembered(self, lowered: Program, choices: Sequence[PlanChoice]) -> StepProgram | None:
        """The program of the plan that an earlier run measured the fastest; None where there was none."""
        if not self._is_measured:
            return None
        rows = read_record(self._record_path(lowered, choices))
        for row in rows:
            if row.is_kept:
                try:
                    choice = change_choice(choices, row.changes)
                    program = self._steps.programs.prepare(lowered, [choice], self._announcement)
                except (KeyError, TypeError, AnnotationError, PlanError):
                    return None  # of another version: it is measured again
                self._is_remembered = True
                self._history.add("remembered", row.plan, predicted_s=row.predicted_s, after_s=row.measured_s)
                return program
        return None

    def _record_path(self, lowered: Program, choices: Sequence[PlanChoice]) -> Path | None:
        return record_path(self._function.name, lowered.identity, choices, self._cluster.info.cluster)

    def _choices(self, lowered: Program) -> list[PlanChoice]:
        """The ways to plan a program: the user's options, or what the builder makes of its variables.

        Further programs of the step follow the builder that the first one's plan is of. A given plan is the first one's
        alone.
        """
        options = self._options.without_trials()
        choices = list_choices(
            self._builder,
            options if self._main is None else replace(options, plan_json=""),
            self._cluster.info.cluster,
            lambda: (parse(lowered.hlo_text), lowered.argument_names, lowered.aliases),
        )
        main = self._main
        return [choice for choice in choices if main is None or choice.name == main.choice]

    def _lower(self, signature: Hashable, *, announces: bool = False) -> Program:
        try:
            lowered = self._lowered.get(signature)
        except ValueError as error:  # of comparing static fields, such as arrays
            raise OptionError(
                f"calls of {self._function.name} cannot be told apart by static fields of their arguments: {error}",
                remedy="register its arrays as leaves (data_fields), not as static fields (meta_fields, aux data)",
            ) from None
        if lowered is None:
            if announces:
                self._announcement.begin()
            lowered = self._function.lower(signature, platform=self._cluster.info.platform)
            self._lowered[signature] = lowered
        return lowered

    def _may_stay(self, handle: RemoteArray) -> bool:
        return may_stay(handle._place, self._cluster.info.device_count)

    def _require_program(self) -> StepProgram:
        if self._main is None:
            raise PlanError(
                f"{self._function.name} has no plan yet",
                remedy="call it once, or step.compile(*args) to plan without running",
            )
        return self._main

    # ---- other nodes ---------------------------------------------------------------------

    def _leave_other_nodes(self) -> None:
        """Forget plans for nodes of before."""
        main = self._main
        if main is None or main.epoch == self._cluster.epoch:
            return
        self._end_trials()
        self._options = replace(self._options, plan_json="")  # it is for as many devices as there were
        self._first = self._main = None
        self._programs.clear()
        self._read_handles.clear()
        self._left_places.clear()
        self._history.begin()
        self._history.add(
            "other nodes", f"{self._cluster.info.device_count} devices; before: {describe_plan(main.plan)}"
        )

    def _plan_again(self, signature: Hashable, leaves: Sequence[Any]) -> StepProgram:
        """A program for a call that is made again on other nodes. Raises the planner's error, with what to change."""
        self._leave_other_nodes()
        program = self._find_program(signature, list(leaves))
        if program is not None:
            return program
        programs = self._programs.get(signature, ())
        if programs and not any(isinstance(leaf, RemoteArray) and self._may_stay(leaf) for leaf in leaves):
            return programs[-1]
        try:
            return self._add_program(signature, self._lower(signature), leaves)
        except (AnnotationError, OptionError, PlanError) as error:
            count = self._cluster.info.device_count
            raise type(error)(
                f"{self._function.name} cannot be planned for the {count} devices that are left: {error.message}",
                where=error.where,
                remedy="leave mesh, devices and pins that need more devices out, or start the missing nodes; then run "
                "init again, or restore a checkpoint",
            ) from error

    def plan_again_for_state(self) -> tuple[Placement | None, ...]:
        """Plans the step for other nodes; where its arguments lie then, by flat number."""
        signature = self._main_signature
        return self._plan_again(signature, [None] * len(self._lower(signature).leaf_numbers)).arguments

    def current_state(self) -> dict[int, RemoteArray]:
        """The state after the last call, by flat argument number."""
        if self._main_signature is None:
            return {}
        return {argument: handle for argument, ref in self._updated.items() if (handle := ref()) is not None}

    # ---- another plan while it runs ----------------------------------------------------

    def _start_trials(self) -> None:
        """Looks for other plans beside the first one: a better one where its search ended early, runners-up."""
        if self._first is None:
            return
        (first, choices), self._first = self._first, None
        self._history.add(
            "first plan",
            describe_plan(first.plan),
            planning_s=first.plan.planning_s,
            predicted_s=predicted_step_s(first.plan),
        )
        search = PlanSearch(
            hlo_text=first.lowered.hlo_text,
            choices=tuple(choices),
            running=first.plan,
            running_choice=first.choice,
            is_first=first.is_first,
            is_measured=self._is_measured,
            cluster=self._cluster.info.cluster,
        )
        self._trials = PlanTrials(
            self,
            self._cluster.master,
            search,
            Trial(
                name=first.choice,
                plan=describe_plan(first.plan),
                predicted_s=predicted_step_s(first.plan),
                plans=self._plans,
                times=StepTimes(skipped=1),
            ),
            self._history,
            signature=self._main_signature,
            layout_changes=self._steps.layout_changes,
        )

    def _end_trials(self) -> None:
        if self._trials is not None:
            self._trials.cancel()
            self._trials = None

    def _follow_trials(self, trials: PlanTrials[_Plans], signature: Hashable, leaves: Sequence[Any]) -> None:
        """Before a call: tries the next plan, or stays with the fastest, whatever is due."""
        if trials.is_over:
            self._end_trials()
        elif signature == trials.signature and trials.is_current_measured():
            if (alternative := trials.take_next()) is not None:
                self._try(trials, alternative, leaves)
            elif (near := trials.take_near()) is not None:
                if self._return_to(near.plans, leaves):
                    trials.begin(near, self._steps.layout_changes)
            else:
                self._settle(trials, leaves)

    def _try(self, trials: PlanTrials[_Plans], alternative: Alternative, leaves: Sequence[Any]) -> None:
        """The alternative runs from now on, and is measured."""
        main = self._require_program()
        if main.epoch != self._cluster.epoch:
            self._end_trials()
            return
        program = self._steps.programs.adopt(main.lowered, alternative.choices, alternative.loaded)
        if trials.layout_changes != self._steps.layout_changes:
            self._history.add("search ended", "the state lies otherwise by now, for another step")
            self._end_trials()
        elif self._move_or_stay(program, leaves):
            self._run_plans_of(replace(self._plans, programs={trials.signature: [program]}, main=program))
            trials.begin(start_trial(alternative, self._plans), self._steps.layout_changes)
            self._history.add("switched", describe_plan(program.plan), predicted_s=predicted_step_s(program.plan))

    def _return_to(self, plans: _Plans, leaves: Sequence[Any]) -> bool:
        """Whether plans that have run before run from now on."""
        assert plans.main is not None
        if plans.main is not self._main:
            if not self._move_or_stay(plans.main, leaves):
                return False
            self._run_plans_of(plans)
        return True

    def _settle(self, trials: PlanTrials[_Plans], leaves: Sequence[Any]) -> None:
        """The fastest plan by measurement runs from now on; where it is the first one, that comes back."""
        fastest, first = trials.fastest(), trials.first
        if not self._return_to(fastest.plans, leaves):
            return
        others = [trial for trial in trials.trials if trial is not first]
        if trials.is_measured:
            for trial in others:
                self._history.add("measured", trial.title, predicted_s=trial.predicted_s, after_s=trial.measured_s)
            lowered = self._require_program().lowered
            path = self._record_path(lowered, trials.choices)
            if path is not None:
                write_record(path, trials.rows())
        is_first = fastest is first
        after_s = min(trial.measured_s for trial in others) if is_first else fastest.measured_s
        self._history.add("went back" if is_first else "kept", fastest.plan, before_s=first.measured_s, after_s=after_s)
        self._end_trials()

    def _move_or_stay(self, program: StepProgram, leaves: Sequence[Any]) -> bool:
        """Whether the state of a call was moved to a program's layouts; else all stays as it is."""
        self._steps.raise_earlier_error()  # it is not the move's
        donated = set(program.donated)
        mine = [
            leaf if isinstance(leaf, RemoteArray) and (number in donated or not leaf._is_owned) else None
            for number, leaf in enumerate(leaves)
        ]
        try:
            self._move_state(program, mine)
        except ShardwrightError as error:
            self._history.add("search ended", f"the state cannot be moved to {describe_plan(program.plan)}: {error}")
            self._end_trials()
            return False
        return True

    def _move_state(self, program: StepProgram, leaves: Sequence[RemoteArray | None]) -> None:
        """Moves handles, one for each leaf or none, to a program's layouts."""
        wanted: dict[int, tuple[RemoteArray, Placement]] = {}
        for leaf, target in zip(leaves, program.leaf_places, strict=True):
            if leaf is None or target is None or leaf._pending is not None or leaf.is_deleted():
                continue
            if leaf._place is not target:
                wanted.setdefault(id(leaf), (leaf, target))
        move_state(self._steps, [leaf for leaf, _ in wanted.values()], [target for _, target in wanted.values()])

    @property
    def _plans(self) -> _Plans:
        return _Plans(
            options=self._options, builder=self._builder, programs=self._programs, main=self._main,
            main_signature=self._main_signature,
        )  # fmt: skip

    def _run_plans_of(self, plans: _Plans) -> None:
        """Runs other plans from now on. Arrays that still lie as under those before are moved when they are used."""
        for program in itertools.chain.from_iterable(self._programs.values()):
            self._left_places.update(filter(None, (*program.arguments, *program.outputs)))
        self._options, self._builder = plans.options, plans.builder
        self._programs, self._main, self._main_signature = plans.programs, plans.main, plans.main_signature
        if self._main is not None and self._main.donated:
            self._steps.layout_changes += 1
        self._layout_changes = self._steps.layout_changes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plans:
    """What a step runs."""

    options: PlanOptions
    builder: Builder | None
    programs: dict[Hashable, list[StepProgram]]
    main: StepProgram | None
    main_signature: Hashable
