"""The programs of one step: its calls are lowered, planned and loaded, once for each signature and layout."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from typing import Any

from shardwright.builders.base import Builder
from shardwright.client.alternatives import describe_plan
from shardwright.client.announcement import Announcement
from shardwright.client.arrays import RemoteArray
from shardwright.client.connection import Preparation
from shardwright.client.expert_rows import RowsOver
from shardwright.client.frontends.program import FrontEnd, Program
from shardwright.client.limits import MANY_PROGRAMS
from shardwright.client.pins import list_batch_leaves, may_stay
from shardwright.client.placement import Placement
from shardwright.client.plan_changes import PlanHistory
from shardwright.client.plan_set import PlanSet
from shardwright.client.program_planner import Planned, ProgramPlanner
from shardwright.client.programs import StepProgram, describe_difference
from shardwright.client.step_queue import StepQueue
from shardwright.errors import AnnotationError, OptionError, PlanError
from shardwright.options.plan_options import PlanOptions
from shardwright.plans.plan import TAKEN_OVER

_log = logging.getLogger("shardwright")


class StepPrograms:
    """Of one step.

    plans: those that run. unexplored: the first program, while others are to be looked for beside it. rows_over: of
    mixtures, as the options allow.
    """

    def __init__(
        self,
        steps: StepQueue,
        function: FrontEnd,
        planner: ProgramPlanner,
        plans: PlanSet,
        announcement: Announcement,
        history: PlanHistory,
    ) -> None:
        self.plans = plans
        self.planner = planner
        self.unexplored: Planned | None = None
        self.rows_over = RowsOver(plans.options.expert_capacity)
        self._steps = steps
        self._function = function
        self._announcement = announcement
        self._history = history
        self._lowered: dict[Hashable, Program] = {}
        self._preparing: set[Preparation] = set()
        self._is_remembered = False  # whether its plan is that of an earlier measurement
        self._batch_leaves: dict[Hashable, tuple[int, ...]] = {}  # leaves that workers read themselves, by signature
        self._read_handles: dict[Hashable, tuple[int, ...]] = {}  # leaves that are other steps' state, by signature
        self._left_places: set[Placement] = set()  # where plans that were replaced have left arrays
        self._layout_changes = 0  # of the session, when the programs were made

    def lower(self, signature: Hashable, *, announces: bool = False) -> Program:
        try:
            lowered = self._lowered.get(signature)
        except ValueError as error:  # of comparing static fields, such as arrays
            raise OptionError(
                f"calls of {self._function.name} cannot be told apart by static fields of their arguments: {error}",
                remedy="register its arrays as leaves (data_fields), not as static fields (meta_fields, aux data)",
            ) from None
        if lowered is None:
            if announces:
                self._announcement.begin("lower")
            lowered = self.rows_over.count_in(self._steps.cluster.lower(self._function, signature))
            self._lowered[signature] = lowered
            if announces:  # what comes until the planner's first report is no lowering
                self._announcement.begin("plan")
        return lowered

    def require_main(self) -> StepProgram:
        if self.plans.main is None:
            raise PlanError(
                f"{self._function.name} has no plan yet",
                remedy="call it once, or step.compile(*args) to plan without running",
            )
        return self.plans.main

    # ---- making them -----------------------------------------------------------------

    def prepare(self, signature: Hashable, leaves: list[Any], dynamic: Any) -> StepProgram:
        """A program for the call; handles may have to be resharded. `cancel` ends it."""
        with self._steps.cluster.master.preparation() as preparation:
            self._preparing.add(preparation)
            try:
                return self._find_or_make(signature, leaves, dynamic)
            finally:
                self._preparing.discard(preparation)

    def cancel(self) -> int:
        """Ends what is being planned, compiled or loaded; how many there were."""
        preparing = list(self._preparing)
        for preparation in preparing:
            preparation.cancel()
        return len(preparing)

    def _find_or_make(self, signature: Hashable, leaves: list[Any], dynamic: Any) -> StepProgram:
        plans = self.plans
        if self._layout_changes != self._steps.layout_changes:
            self._layout_changes = self._steps.layout_changes
            plans.keep_newest(signature)
        has_placed = any(
            isinstance(leaf, RemoteArray) and leaf._place not in self._left_places and self._may_stay(leaf)
            for leaf in leaves
        )
        programs = plans.programs.setdefault(signature, [])
        if programs and (not has_placed or plans.is_full(signature)):
            return programs[-1]
        for leaf in leaves:
            if isinstance(leaf, RemoteArray) and leaf._pending is None:
                self._steps.arrays.usable_ids(leaf)
        self._function.check_arguments(dynamic)
        lowered = self.lower(signature)
        if plans.main is not None:
            self._tell_of_another(describe_difference(plans.main.lowered, lowered))
        return self.add(signature, lowered, leaves)

    def _tell_of_another(self, difference: str) -> None:
        """Log that a call takes a program of its own; warn of the fourth, and whenever their number has doubled."""
        count = len(self.plans.programs)
        if count < MANY_PROGRAMS or count & (count - 1):
            _log.info("%s: another program: %s", self._function.name, difference)
            return
        _log.warning(
            "%s: %d programs so far, each traced, planned and compiled: %s; pad batches to few shapes, pass numbers "
            "that change as arrays or tensors",
            self._function.name, count, difference,
        )  # fmt: skip

    def add(self, signature: Hashable, lowered: Program, leaves: Sequence[Any]) -> StepProgram:
        """A new program of a signature."""
        is_main = self.plans.main is None
        if is_main:
            self._history.begin()
        planned = self.planner.plan(self.plans, lowered, leaves)
        program = planned.program
        self.rows_over.note_plan(lowered, program.plan)
        donated = set(program.donated)
        self._read_handles[signature] = tuple(
            number
            for number, leaf in enumerate(leaves)
            if isinstance(leaf, RemoteArray) and leaf._is_owned and number not in donated
        )
        self._batch_leaves[signature] = list_batch_leaves(leaves)
        self.plans.add(signature, program)
        if is_main:
            for note in (note for note in program.plan.notes if note.startswith(TAKEN_OVER)):
                _log.warning("%s: %s", self._function.name, note)
            self._is_remembered = self._is_remembered or planned.is_remembered
            has_trials = program.is_first or (self.planner.is_measured and not self._is_remembered)
            self.unexplored = planned if has_trials else None
        return program

    def _may_stay(self, handle: RemoteArray) -> bool:
        return may_stay(handle._place, self._steps.cluster.info.device_count)

    # ---- other plans -----------------------------------------------------------------

    def plan_under(self, options: PlanOptions, builder: Builder | None) -> StepPrograms:
        """The same programs under other options, planned and loaded; they do not run yet."""
        plans = PlanSet(options=options, builder=builder)
        planner = self.planner.for_options(options)
        others = StepPrograms(self._steps, self._function, planner, plans, self._announcement, self._history)
        others.rows_over = self.rows_over.under(options.expert_capacity)
        if options.expert_capacity == self.rows_over.capacity:
            others._lowered, others.rows_over = self._lowered, self.rows_over
        for signature in self.plans.list_signatures():
            others.add(signature, self.lower(signature), self._stand_ins(signature))
        return others

    def _stand_ins(self, signature: Hashable) -> list[Any]:
        """Leaves of a call for planning: of other steps' state, and of batches, handles without arrays."""
        lowered, newest, arrays = self.lower(signature), self.plans.of(signature)[-1], self._steps.arrays
        leaves: list[Any] = [None] * len(lowered.leaf_numbers)
        for number in self._read_handles.get(signature, ()):
            leaves[number] = RemoteArray(arrays, lowered.leaf_specs[number], place=newest.leaf_places[number])
            leaves[number]._is_owned = True
        for number in self._batch_leaves.get(signature, ()):
            leaves[number] = RemoteArray(arrays, lowered.leaf_specs[number])
            leaves[number]._is_batch = True
        return leaves

    def run_plans(self, plans: PlanSet) -> None:
        """Runs other plans from now on. Arrays that still lie as under those before are moved when they are used."""
        self._left_places |= self.plans.list_places()
        self.plans = plans
        capacity = plans.options.expert_capacity
        if capacity != self.rows_over.capacity:
            self.rows_over = self.rows_over.under(capacity)
            self._lowered = {signature: plans.of(signature)[-1].lowered for signature in plans.list_signatures()}
        if plans.main is not None and plans.main.donated:
            self._steps.layout_changes += 1
        self._layout_changes = self._steps.layout_changes

    def leave_other_nodes(self) -> bool:
        """Forgets plans for nodes of before; whether there were any."""
        main, cluster = self.plans.main, self._steps.cluster
        if main is None or main.epoch == cluster.epoch:
            return False
        self.plans = self.plans.without_programs()
        self.unexplored = None
        self._read_handles.clear()
        self._left_places.clear()
        self._history.begin()
        count = cluster.info.device_count
        self._history.add("other nodes", f"{count} devices; before: {describe_plan(main.plan)}")
        return True

    def plan_again(self, signature: Hashable, leaves: Sequence[Any]) -> StepProgram:
        """A program for a call that is made again on other nodes. Raises the planner's error, with what to change."""
        program = self.plans.find(signature, leaves)
        if program is not None:
            return program
        programs = self.plans.of(signature)
        if programs and not any(isinstance(leaf, RemoteArray) and self._may_stay(leaf) for leaf in leaves):
            return programs[-1]
        try:
            return self.add(signature, self.lower(signature), leaves)
        except (AnnotationError, OptionError, PlanError) as error:
            count = self._steps.cluster.info.device_count
            raise type(error)(
                f"{self._function.name} cannot be planned for the {count} devices that are left: {error.message}",
                where=error.where,
                remedy="leave mesh, devices and pins that need more devices out, or start the missing nodes; then run "
                "init again, or restore a checkpoint",
            ) from error
