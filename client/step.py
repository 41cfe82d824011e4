"""One parallelized function: calls become programs planned around the arrays, then numbered steps."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import jax

from shardwright.builders.base import Builder
from shardwright.builders.choices import change_options, predicted_step_s
from shardwright.client.alternatives import describe_plan
from shardwright.client.announcement import Announcement
from shardwright.client.arrays import RemoteArray
from shardwright.client.checks import checks_from_settings, raise_not_finite, warn_of_settings
from shardwright.client.donation import donate, require_donated_once
from shardwright.client.frontends.program import ExportingFrontEnd, FrontEnd, Program
from shardwright.client.limits import STEPS_AHEAD
from shardwright.client.placement import Placement
from shardwright.client.plan_changes import PlanChange, PlanHistory
from shardwright.client.plan_set import PlanSet
from shardwright.client.plan_switcher import PlanSwitcher
from shardwright.client.program_planner import ProgramPlanner
from shardwright.client.programs import StepProgram
from shardwright.client.resharding import is_unread_batch, move_leaves, place
from shardwright.client.step_programs import StepPrograms
from shardwright.client.step_result import StepResult
from shardwright.errors import (
    OptionError,
    UnsupportedProgramError,
)
from shardwright.options.plan_options import PlanOptions
from shardwright.options.user_options import UserOptions, show_options
from shardwright.progress import PlanProgress
from shardwright.user_plans import PipelinePlan, Plan
from shardwright.xla.cudnn_checks import lowering_for

if TYPE_CHECKING:
    import os

    from shardwright.client.checkpoints import Save
    from shardwright.client.session_state import SessionState
    from shardwright.client.step_trace import StepTrace


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
        self._steps, self._cluster, self._saves = session.steps, session.cluster, session.saves
        self._function = function
        self._timeout_s = timeout_s
        self._snapshot_every = snapshot_every
        self._history = PlanHistory(function.name, progress)
        self._announcement = Announcement(function.name, session.info, progress)
        self._programs = self._make_programs(options, builder)
        self._switcher = PlanSwitcher(self._steps, self._programs, self._history)
        self._under_way: deque[StepResult] = deque(maxlen=STEPS_AHEAD)  # so many, at most, are unfinished
        self._updated: dict[int, weakref.ref[RemoteArray]] = {}  # state after the last call, by flat argument number
        self._steps.add_user(self)

    def _make_programs(self, options: PlanOptions, builder: Builder | None) -> StepPrograms:
        steps, history, announcement = self._steps, self._history, self._announcement
        planner = ProgramPlanner(steps.programs, steps.cluster, self._function.name, options, announcement, history)
        plans = PlanSet(options=replace(options, background=False), builder=builder)
        return StepPrograms(steps, self._function, planner, plans, announcement, history)

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

    @contextmanager
    def announce(self, phase: str) -> Iterator[None]:
        """Around work of a front end before the call that prepares a program: its lines begin here."""
        with self._announcement.end_on_errors():
            self._announcement.begin(phase)
            yield

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
        with self._announcement.end_on_errors():
            return self._steps.steadily(lambda: self._run_once(args, kwargs, is_traced=is_traced))

    def _run_once(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_traced: bool) -> tuple[StepProgram, Any]:
        self._steps.raise_earlier_error()  # rather than that there is no plan for the nodes that are left
        self._steps.debug_lines.raise_error()
        self._leave_other_nodes()
        signature, leaves, dynamic = self._function.describe(args, kwargs)
        leaves = self._programs.lower(signature, announces=True).with_captured(leaves)
        self._switcher.follow(signature, leaves)
        program = self._programs.plans.find(signature, leaves)
        is_new = program is None
        if program is None:
            with self._announcement:
                program = self._programs.prepare(signature, leaves, dynamic)
        require_donated_once(program, leaves)  # ahead of moves: their copies are other handles
        if is_new or any(map(is_unread_batch, leaves)):
            leaves = place(self._steps, leaves, program, program.donated)
        if is_new:
            self._switcher.start()
        if program.lowered.changed:
            self._function.check_arguments(dynamic)
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
        if not (is_traced or checks):
            self._switcher.record(program, ran, sent_s)
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
        self._switcher.cancel()
        count = self._programs.cancel()
        numbers = [result.number for result in self._under_way if not result.is_done]
        return count + (self._cluster.master.cancel_steps(numbers) if numbers else 0)

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
        return self._programs.lower(signature)

    def export(self, path: str | os.PathLike[str], /, *args: Any, **kwargs: Any) -> None:
        """Writes the step of a call for programs without this package; `jax.export.deserialize` reads the file.

        A function of one dict, argument name → array, that returns one dict, output name → array; the names are those
        of `lower(…)`. Handles and arrays that the function closes over are a part of it. Arguments may be
        `jax.ShapeDtypeStruct`s. It is compiled for the platform of the cluster. Attention is the function's own: what a
        plan runs as fused kernels stands in `step.plan.emit()`. Calls of `jax.debug` are left out.

        Raises UnsupportedProgramError where the step is HLO already, PlatformError without flatbuffers, OptionError
        where the file cannot be written.
        """
        signature, _, _ = self._function.describe(args, kwargs, takes_types=True)
        if not isinstance(self._function, ExportingFrontEnd):
            raise UnsupportedProgramError(
                f"{self._function.name} is a program already", remedy="keep its text: step.lower(…).hlo_text"
            )
        lowered = self._programs.lower(signature)
        names = lowered.output_names[: lowered.result_count]
        with lowering_for(self._cluster.info.attention_device):
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
            programs = self._programs
            return programs.plans.find(signature, leaves) or programs.prepare(signature, leaves, dynamic)

        with self._announcement.end_on_errors():
            leaves = self._programs.lower(signature, announces=True).with_captured(leaves)
            with self._announcement:
                program = self._steps.steadily(prepare)
        self._switcher.start()
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
        programs = self._programs
        programs.require_main()
        builder, changed = change_options(programs.plans.builder, programs.plans.options, options)
        others = programs.plan_under(changed, builder)
        main, state = others.require_main(), self.current_state()
        move_leaves(self._steps, [state.get(argument) for argument in main.leaf_numbers], main.leaf_places)
        self._switcher.end()
        programs.run_plans(others.plans)
        self._history.add("replanned", describe_plan(main.plan), predicted_s=predicted_step_s(main.plan))
        programs.unexplored, programs.planner.is_measured = others.unexplored, others.planner.is_measured
        self._switcher.start()
        self._history.tell()
        return main.plan

    @property
    def is_settled(self) -> bool:
        """Whether no other plan is looked for or tried any more."""
        return self._switcher.is_settled

    def wait_for_plans(self, timeout_s: float | None = None) -> bool:
        """Waits until no plan is searched for, compiled or loaded beside the step; returns whether that is so.

        timeout_s: seconds; None: as long as it takes. The plans that came of it are tried in the next calls.
        """
        return self._switcher.wait(timeout_s)

    @property
    def plan_changes(self) -> tuple[PlanChange, ...]:
        """What became of the step's plans: by `replan`, and in the background."""
        return self._history.changes

    @property
    def plan(self) -> Plan | PipelinePlan:
        """The plan of the first program, or what took its place. Raises PlanError before the first call."""
        return self._require_program().plan

    @property
    def rows_over(self) -> int:
        """Rows of mixtures that were over `expert_capacity`, and left out, in all calls so far; waits for these."""
        self._steps.debug_lines.wait()
        return self._programs.rows_over.total

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
        main = self._programs.plans.main
        plan = "not planned yet" if main is None else describe_plan(main.plan)
        return f"Step({self._function.name}, {plan})"

    def _require_program(self) -> StepProgram:
        return self._programs.require_main()

    # ---- other nodes ---------------------------------------------------------------------

    def _leave_other_nodes(self) -> None:
        """Forget plans for nodes of before."""
        if self._programs.leave_other_nodes():
            self._switcher.end()

    def _plan_again(self, signature: Hashable, leaves: Sequence[Any]) -> StepProgram:
        """A program for a call that is made again on other nodes. Raises the planner's error, with what to change."""
        self._leave_other_nodes()
        return self._programs.plan_again(signature, leaves)

    def plan_again_for_state(self) -> tuple[Placement | None, ...]:
        """Plans the step for other nodes; where its arguments lie then, by flat number."""
        signature = self._programs.plans.main_signature
        return self._plan_again(signature, [None] * len(self._programs.lower(signature).leaf_numbers)).arguments

    def current_state(self) -> dict[int, RemoteArray]:
        """The state after the last call, by flat argument number."""
        if self._programs.plans.main_signature is None:
            return {}
        return {argument: handle for argument, ref in self._updated.items() if (handle := ref()) is not None}
