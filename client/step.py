"""One parallelized function: calls become programs planned around the arrays, then numbered steps."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import jax

from shardwright.builders.base import Builder
from shardwright.builders.choices import PlanChoice, list_choices
from shardwright.client.arrays import RemoteArray
from shardwright.client.checks import checks_from_settings, raise_not_finite, warn_of_settings
from shardwright.client.frontends.program import FrontEnd, Program
from shardwright.client.placement import Placement
from shardwright.client.programs import StepProgram, describe_difference, donated_leaves
from shardwright.client.resharding import fits, pin_layouts, place
from shardwright.client.stream import STEPS_AHEAD, StepResult
from shardwright.errors import AnnotationError, ArrayError, OptionError, PlanError
from shardwright.hlo import parse
from shardwright.options.plan_options import PlanOptions
from shardwright.options.user_options import name_matches
from shardwright.plans.layouts import Layout
from shardwright.plans.shardings import Mesh
from shardwright.progress import PlanProgress
from shardwright.protocol import wire
from shardwright.user_plans import PipelinePlan, Plan

if TYPE_CHECKING:
    import os

    from shardwright.client.checkpoints import Save
    from shardwright.client.connection import Preparation
    from shardwright.client.session_state import SessionState
    from shardwright.client.step_trace import StepTrace
    from shardwright.proto.v1 import master_pb2

_log = logging.getLogger("shardwright")

#: Programs of one signature that differ in the layout of the arrays they take; then arrays are moved instead.
PROGRAMS_OF_A_SIGNATURE = 2


class Step:
    """A function running on the servers; made by `Session.parallelize`, called like the function.

    The first call traces, plans, compiles and loads a program; later calls with arguments of the same types run it. A
    call with other types (a last, smaller batch) plans another program around the state's layouts.
    """

    def __init__(
        self,
        state: SessionState,
        function: FrontEnd,
        options: PlanOptions,
        progress: Callable[[PlanProgress], None] | None = None,
        builder: Builder | None = None,
        *,
        timeout_s: float = 0.0,
        snapshot_every: int = 0,
    ) -> None:
        self._state = state
        self._snapshot_every = snapshot_every
        self._builder = builder
        self._timeout_s = timeout_s
        self._under_way: deque[StepResult] = deque(maxlen=STEPS_AHEAD)  # so many, at most, are unfinished
        self._preparing: set[Preparation] = set()
        self._function = function
        self._options = options
        self._progress = progress
        self._lowered: dict[Hashable, Program] = {}
        self._programs: dict[Hashable, list[StepProgram]] = {}
        self._main: StepProgram | None = None

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Runs the function on the servers; returns its result with a RemoteArray in place of each array.

        Does not wait for the result: an error of the step is raised when a result is read, or by the next call.
        Arguments: pytrees of handles, numpy and JAX arrays, numbers.

        Handles captured by the function at tracing are arguments of every call. With `jax_debug_nans` or
        `jax_debug_infs` the call waits, and raises NonFiniteError when a result holds such values.
        """
        return self._run(args, kwargs)[1]

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
        node_of = {device: node.index for node in self._state.info.nodes for device in node.devices}
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
        warn_of_settings(self._state)
        if self._snapshot_every:
            self._state.protect(self._snapshot_every)
        signature, leaves, dynamic = self._function.describe(args, kwargs)
        leaves = self._lower(signature).with_captured(leaves)
        program = self._find_program(signature, leaves)
        if program is None:
            program = self._prepare_program(signature, leaves, dynamic)
            leaves = place(self._state, leaves, program, program.donated)
        if program.lowered.changed:
            self._function.check_arguments(dynamic)
        self._check_donated(program, leaves)
        checks = checks_from_settings()
        results = self._state.run(program, leaves, is_traced=is_traced, checks=checks, timeout_s=self._timeout_s)
        self._under_way.extend(handle._result for handle in results[:1] if handle is not None and handle._result)
        self._transfer_donated(program, leaves, results)
        result = program.lowered.build_result(results)
        self._function.write_back(dynamic, program.lowered, results)
        if checks:
            raise_not_finite(program.lowered, results, result)
        return program, result

    def cancel(self) -> int:
        """Ends the unfinished calls; may be called from another thread. Returns how many there were.

        A call that is being planned, compiled or loaded raises StepCancelledError, and the servers stop that work.
        A call that waits fails with StepCancelledError at once. One that runs keeps its results if it ends within the
        server's grace: 10 seconds, or twice what it took before. After that the executors are replaced; then every
        array on the servers is gone, of other sessions too (WorkerLostError there). Ctrl-C in a wait does the same.
        """
        preparing = list(self._preparing)
        for preparation in preparing:
            preparation.cancel()
        numbers = [result.number for result in self._under_way if not result.is_done]
        return len(preparing) + (self._state.master.cancel_steps(numbers) if numbers else 0)

    def init(self, init_fn: Callable[..., Any], *args: Any) -> Any:
        """`init_fn(*args)`, run on the servers in the layouts of this step's arguments.

        Returns handles at once; it runs when the step is first called with them, or when one of them is read. Raises
        UnsupportedProgramError on host callbacks in `init_fn`.
        """
        from shardwright.client.initializer import PendingInit

        self._state.require_open()
        return PendingInit(self._state, init_fn, args).handles()

    def save(
        self, state: Any, directory: str | os.PathLike[str], *, step: int | None = None, max_to_keep: int | None = None
    ) -> Save:
        """Writes `state`, a pytree of handles, to a checkpoint; see `Session.save`."""
        return self._state.save(state, directory, step=step, max_to_keep=max_to_keep)

    def restore(self, directory: str | os.PathLike[str], *, step: int | None = None, like: Any = None) -> Any:
        """A checkpoint in handles, laid out by this step's plan when the step is called; see `Session.restore`."""
        return self._state.restore(directory, step=step, like=like)

    def lower(self, /, *args: Any, **kwargs: Any) -> Program:
        """The HLO text of the call, with names of arguments and outputs; nothing is sent or run.

        Arguments may be `jax.ShapeDtypeStruct`s.
        """
        signature, _, _ = self._function.describe(args, kwargs, takes_types=True)
        return self._lower(signature)

    def compile(self, /, *args: Any, **kwargs: Any) -> Plan | PipelinePlan:
        """Plans, compiles and loads the program of a call without running it."""
        signature, leaves, dynamic = self._function.describe(args, kwargs, takes_types=True)
        leaves = self._lower(signature).with_captured(leaves)
        program = self._find_program(signature, leaves) or self._prepare_program(signature, leaves, dynamic)
        return program.plan

    @property
    def plan(self) -> Plan | PipelinePlan:
        """The plan of the first program. Raises PlanError before the first call."""
        return self._require_program().plan

    @property
    def report(self) -> str:
        """The plan's expectation beside XLA's result, in text: collectives, and memory of a device."""
        from shardwright.report.collectives import explain_collectives
        from shardwright.report.memory import explain_memory

        program = self._require_program()
        load, plan = program.load, program.plan
        if isinstance(plan, PipelinePlan):
            return self._report_of_parts(plan, load)
        memory = explain_memory(
            plan,
            arguments_bytes=load.arguments_bytes,
            outputs_bytes=load.outputs_bytes,
            aliased_bytes=load.aliased_bytes,
            temporaries_bytes=load.temporaries_bytes,
        )
        return f"{explain_collectives(plan, wire.collectives_from_result(load))}\n{memory}"

    @staticmethod
    def _report_of_parts(plan: PipelinePlan, load: master_pb2.LoadResult) -> str:
        from shardwright.report.collectives import explain_collectives

        return "\n".join(
            f"{part.name} (stage {part.stage})\n"
            f"{explain_collectives(plan.program[part.name].plan, wire.collectives_from_result(part.result))}"
            for part in load.parts
        )

    def dump(self, directory: str | os.PathLike[str]) -> tuple[Path, ...]:
        """Writes the servers' form of the first program into a folder, which is made; returns the files.

        Per program (one, or a pipeline's stages): `NAME.mlir`, the StableHLO with the plan in Shardy constraints;
        `NAME.hlo`, the output of XLA's partitioner on each device. Of a pipeline also `tasks.dot`, the task graph.
        Raises PlanError before the first call, OptionError when files cannot be written.
        """
        from shardwright.client.dumps import dump

        return dump(self._state, self._require_program(), Path(directory))

    def __repr__(self) -> str:
        return f"Step({self._function.name}, {'not planned yet' if self._main is None else _shape_of(self._main.plan)})"

    # ---- which program ---------------------------------------------------------------

    def _find_program(self, signature: Hashable, leaves: list[Any]) -> StepProgram | None:
        for program in self._programs.get(signature, ()):
            if fits(leaves, program.leaf_places):
                return program
        return None

    def _prepare_program(self, signature: Hashable, leaves: list[Any], dynamic: Any) -> StepProgram:
        """A program for the call; handles may have to be resharded. `cancel` ends it."""
        with self._state.master.preparation() as preparation:
            self._preparing.add(preparation)
            try:
                return self._make_program(signature, leaves, dynamic)
            finally:
                self._preparing.discard(preparation)

    def _make_program(self, signature: Hashable, leaves: list[Any], dynamic: Any) -> StepProgram:
        programs = self._programs.setdefault(signature, [])
        has_placed = any(isinstance(leaf, RemoteArray) and self._may_stay(leaf._place) for leaf in leaves)
        if programs and (not has_placed or len(programs) >= PROGRAMS_OF_A_SIGNATURE):
            return programs[-1]
        for leaf in leaves:
            if isinstance(leaf, RemoteArray) and leaf._pending is None:
                self._state.usable_ids(leaf)
        self._function.check_arguments(dynamic)
        lowered = self._lower(signature)
        if self._main is not None:
            _log.info("%s: another program: %s", self._function.name, describe_difference(self._main.lowered, lowered))
        program = self._plan_program(lowered, leaves)
        programs.append(program)
        self._main = self._main or program
        return program

    def _plan_program(self, lowered: Program, leaves: Sequence[Any]) -> StepProgram:
        """A program for the arrays' present layouts; where the user's force forbids those, one after moves."""
        choices = self._choices(lowered)
        placed = [replace(choice, options=self._plan_options(choice.options, lowered, leaves)) for choice in choices]
        try:
            return self._state.prepare_fastest(lowered, placed, self._progress)
        except (AnnotationError, PlanError):
            if not any(_is_pinned_twice(choice.options) for choice in placed):
                raise
            free = [
                replace(choice, options=pin_layouts(replace(each.options, mesh=choice.options.mesh), {}, {}))
                for choice, each in zip(choices, placed, strict=True)
            ]
            return self._state.prepare_fastest(lowered, free, self._progress)

    def _choices(self, lowered: Program) -> list[PlanChoice]:
        """The ways to plan a program: the user's options, or what the builder makes of its variables.

        Further programs of the step follow the builder that the first one's plan is of.
        """
        choices = list_choices(
            self._builder,
            self._options,
            self._state.info.cluster,
            lambda: (parse(lowered.hlo_text), lowered.argument_names, lowered.aliases),
        )
        main = self._main
        return [choice for choice in choices if main is None or choice.name == main.choice]

    def _lower(self, signature: Hashable) -> Program:
        try:
            lowered = self._lowered.get(signature)
        except ValueError as error:  # of comparing static fields, such as arrays
            raise OptionError(
                f"calls of {self._function.name} cannot be told apart by static fields of their arguments: {error}",
                remedy="register its arrays as leaves (data_fields), not as static fields (meta_fields, aux data)",
            ) from None
        if lowered is None:
            lowered = self._function.lower(signature, platform=self._state.info.platform)
            self._lowered[signature] = lowered
        return lowered

    def _plan_options(self, options: PlanOptions, lowered: Program, leaves: Sequence[Any]) -> PlanOptions:
        """The options, plus pinned layouts of the arrays that stay in place."""
        options = replace(options, argument_names=lowered.argument_names, output_names=lowered.output_names)
        pinned = self._layouts_to_pin(options, lowered, leaves)
        mesh = _common_mesh(options, list(pinned.values()))
        if mesh is None:
            return options
        numbers = lowered.leaf_numbers
        arguments = {numbers[n]: layout for n, layout in pinned.items() if layout.mesh == mesh}
        outputs = {output: arguments[argument] for output, argument in lowered.aliases.items() if argument in arguments}
        return pin_layouts(
            replace(options, mesh=mesh.sizes), arguments, self._main_output_layouts(lowered, mesh) | outputs
        )

    def _layouts_to_pin(self, options: PlanOptions, lowered: Program, leaves: Sequence[Any]) -> dict[int, Layout]:
        """Leaf number → pinned layout.

        A step that updates arrays in place chooses mesh and layouts once: at its first plan, unless another such step
        has chosen before. Steps that only read arrays accept their layouts.
        """
        is_choosing = self._main is None
        donated = set(donated_leaves(lowered))
        has_wishes = options.mesh is not None or options.force is not None
        pinned: dict[int, Layout] = {}
        for number, (leaf, argument) in enumerate(zip(leaves, lowered.leaf_numbers, strict=True)):
            if not isinstance(leaf, RemoteArray) or not self._may_stay(leaf._place):
                continue
            is_mine = number in donated
            if is_choosing and donated and ((is_mine and has_wishes) or not leaf._is_owned):
                continue
            if not is_mine and _is_forced(options, lowered.arguments[argument].name):
                continue
            pinned[number] = leaf._place
        if not is_choosing:
            settled = self._main_argument_layouts(lowered)
            pinned = {n: layout for n, layout in settled.items() if n in donated} | pinned
        return pinned

    def _may_stay(self, place: Placement | None) -> TypeGuard[Layout]:
        """Whether a program can be planned around the placement: a layout over the whole cluster."""
        return isinstance(place, Layout) and self._state.part_of_cluster(place) is None

    def _main_argument_layouts(self, lowered: Program) -> dict[int, Layout]:
        """Leaf number → layout of the argument of the same name and type in this step's first program."""
        main = self._require_program()
        layout_by_argument = dict(zip(main.lowered.arguments, main.arguments, strict=True))
        numbers = enumerate(lowered.leaf_numbers)
        places = {
            n: layout_by_argument[lowered.arguments[a]]
            for n, a in numbers
            if lowered.arguments[a] in layout_by_argument
        }
        return {n: place for n, place in places.items() if self._may_stay(place)}

    def _main_output_layouts(self, lowered: Program, mesh: Mesh) -> dict[int, Layout]:
        """Layouts of outputs shared with this step's first program: state that is not donated keeps its own."""
        if self._main is None:
            return {}
        main_layouts = dict(zip(self._main.lowered.outputs, self._main.outputs, strict=True))
        places = {n: main_layouts[output] for n, output in enumerate(lowered.outputs) if output in main_layouts}
        return {n: place for n, place in places.items() if self._may_stay(place) and place.mesh == mesh}

    def _require_program(self) -> StepProgram:
        if self._main is None:
            raise PlanError(
                f"{self._function.name} has no plan yet",
                remedy="call it once, or step.compile(*args) to plan without running",
            )
        return self._main

    # ---- donation ----------------------------------------------------------------------

    def _check_donated(self, program: StepProgram, leaves: Sequence[Any]) -> None:
        """Each donated handle stands once among the arguments."""
        if not program.donated:
            return
        handles = [id(leaf) for leaf in leaves if isinstance(leaf, RemoteArray)]
        if len(set(handles)) == len(handles):
            return
        for number in program.donated:
            if handles.count(id(leaves[number])) > 1:
                name = program.lowered.argument_names[program.leaf_numbers[number]]
                is_captured = any(leaves[number] is handle for handle in program.lowered.captured.values())
                fault = f"is closed over by {program.name}" if is_captured else f"is passed to {program.name} twice"
                raise ArrayError(
                    f"the donated array {name} {fault}",
                    where=name,
                    remedy="pass a copy in one of the places, or do not donate it",
                )

    def _transfer_donated(
        self, program: StepProgram, leaves: Sequence[Any], results: Sequence[RemoteArray | None]
    ) -> None:
        """Marks donated handles deleted, and the results in their place owners of the layout."""
        if not program.donated:
            return
        aliases = program.lowered.aliases
        reused = set(aliases.values())
        for number in program.donated:
            leaf = leaves[number]
            if isinstance(leaf, RemoteArray):
                leaf._donate(program.name, is_reused=program.leaf_numbers[number] in reused)
        for output in aliases:
            result = results[output]
            if result is not None:
                result._is_owned = True


def _is_pinned_twice(options: PlanOptions) -> bool:
    """Whether both the user and arrays on the servers say how arguments lie."""
    return options.force is not None and bool(options.argument_axes or options.output_axes)


def _is_forced(options: PlanOptions, name: str) -> bool:
    """Whether the user's force or rest pins this very argument; then the array is moved when needed."""
    if options.rest != "search":
        return True
    force = options.force
    return not isinstance(force, str | None) and any(name_matches(pattern, name) for pattern in force)


def _common_mesh(options: PlanOptions, pinned: Sequence[Layout]) -> Mesh | None:
    """The mesh with most bytes of `pinned`; None when the user wants another, or nothing is pinned."""
    sizes: dict[Mesh, int] = {}
    for layout in pinned:
        sizes[layout.mesh] = sizes.get(layout.mesh, 0) + layout.size_bytes
    if not sizes:
        return None
    mesh = max(sizes, key=lambda candidate: sizes[candidate])
    is_wanted = options.mesh is None or dict(options.mesh) == mesh.sizes
    return mesh if is_wanted else None


def _shape_of(plan: Plan | PipelinePlan) -> str:
    return f"{len(plan.stages)} stages" if isinstance(plan, PipelinePlan) else str(plan.mesh)
