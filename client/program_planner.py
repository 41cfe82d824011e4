"""How a program of a step is planned: around the arrays that there are, under the user's options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwright.builders.choices import PlanChoice, list_choices
from shardwright.builders.runner_ups import change_choice
from shardwright.client.announcement import Announcement
from shardwright.client.cluster_view import ClusterView
from shardwright.client.frontends.program import Program
from shardwright.client.pins import is_pinned_twice, pin_arrays, pin_layouts
from shardwright.client.plan_changes import PlanHistory
from shardwright.client.plan_set import PlanSet
from shardwright.client.program_cache import ProgramCache
from shardwright.client.programs import StepProgram
from shardwright.client.tuning_record import read_record, record_path
from shardwright.errors import AnnotationError, PlanError
from shardwright.hlo import parse
from shardwright.options.plan_options import MEASURED, PlanOptions


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Planned:
    """A program, and the ways to plan it that it is the fastest of.

    is_remembered: whether its plan was measured the fastest by an earlier run.
    """

    program: StepProgram
    choices: Sequence[PlanChoice]
    is_remembered: bool = False


class ProgramPlanner:
    """Of one step. name: the step's. is_measured: whether plans are compared by measurement."""

    def __init__(
        self,
        programs: ProgramCache,
        cluster: ClusterView,
        name: str,
        options: PlanOptions,
        announcement: Announcement,
        history: PlanHistory,
    ) -> None:
        self.name = name
        self.is_measured = options.effort == MEASURED
        self._is_in_background = options.background
        self._programs = programs
        self._cluster = cluster
        self._announcement = announcement
        self._history = history

    def for_options(self, options: PlanOptions) -> ProgramPlanner:
        """The planner of the same step under other options."""
        return ProgramPlanner(self._programs, self._cluster, self.name, options, self._announcement, self._history)

    def plan(self, plans: PlanSet, lowered: Program, leaves: Sequence[Any]) -> Planned:
        """A program for the arrays' present layouts; where the user's force forbids those layouts, one after moves."""
        main, choices = plans.main, self._list_choices(plans, lowered)
        if any(choice.options.plan_json for choice in choices):  # arrays move to where the plan has them
            return self._load(main, lowered, choices)
        device_count = self._cluster.info.device_count
        placed = [
            replace(choice, options=pin_arrays(choice.options, lowered, leaves, main, device_count))
            for choice in choices
        ]
        try:
            return self._load(main, lowered, placed)
        except (AnnotationError, PlanError):
            if not any(is_pinned_twice(choice.options) for choice in placed):
                raise
            free = [
                replace(choice, options=pin_layouts(replace(placed_choice.options, mesh=choice.options.mesh), {}, {}))
                for choice, placed_choice in zip(choices, placed, strict=True)
            ]
            return self._load(main, lowered, free)

    def _list_choices(self, plans: PlanSet, lowered: Program) -> list[PlanChoice]:
        """The ways to plan a program: the user's options, or what the builder makes of its variables.

        Further programs of the step follow the builder that the first one's plan is of. A given plan is the first one's
        alone.
        """
        options, main = plans.options.without_trials(), plans.main
        choices = list_choices(
            plans.builder,
            options if main is None else replace(options, plan_json=""),
            self._cluster.info.cluster,
            lambda: (parse(lowered.hlo_text), lowered.argument_names, lowered.aliases),
        )
        return [choice for choice in choices if main is None or choice.name == main.choice]

    def _load(self, main: StepProgram | None, lowered: Program, choices: Sequence[PlanChoice]) -> Planned:
        """The first program of a step takes the plan that was measured the fastest earlier, if there is one.

        With a search in the background it takes the first plan that fits.
        """
        if main is None and (remembered := self._load_remembered(lowered, choices)) is not None:
            return Planned(program=remembered, choices=choices, is_remembered=True)
        return Planned(program=self._prepare(main, lowered, choices), choices=choices)

    def _prepare(self, main: StepProgram | None, lowered: Program, choices: Sequence[PlanChoice]) -> StepProgram:
        if not self._is_in_background or main is not None:
            return self._programs.prepare(lowered, choices, self._announcement)
        try:
            return self._programs.prepare(lowered, choices, self._announcement, takes_first=True)
        except PlanError:
            if any(choice.options.deadline_s is not None for choice in choices):
                raise
            return self._programs.prepare(lowered, choices, self._announcement)

    def _load_remembered(self, lowered: Program, choices: Sequence[PlanChoice]) -> StepProgram | None:
        """The program of the plan that an earlier run measured the fastest; None where there was none."""
        if not self.is_measured:
            return None
        rows = read_record(record_path(self.name, lowered.identity, choices, self._cluster.info.cluster))
        for row in rows:
            if row.is_kept:
                try:
                    choice = change_choice(choices, row.changes)
                    program = self._programs.prepare(lowered, [choice], self._announcement)
                except (KeyError, TypeError, AnnotationError, PlanError):
                    return None  # of another version: it is measured again
                self._history.add("remembered", row.plan, predicted_s=row.predicted_s, after_s=row.measured_s)
                return program
        return None
