"""Programs of a session: planned, compiled and loaded once for all equal functions."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from shardwright.builders.choices import PlanChoice, take_fastest, take_first
from shardwright.client.placement import (
    ExecutableEntry,
    Placement,
    RowParts,
    argument_entries,
    list_consumed_arguments,
    output_entries,
    part_of,
    placements_of,
)
from shardwright.client.programs import (
    ArgumentSource,
    LoadedPlan,
    StepProgram,
    choice_key,
    is_repeatable,
    list_donated_leaves,
    outputs_to_read_back,
    to_loaded_plan,
    with_trees,
)
from shardwright.options.plan_options import PlanOptions
from shardwright.progress import PlanProgress
from shardwright.protocol import wire
from shardwright.user_plans import PipelinePlan, Plan

if TYPE_CHECKING:
    from shardwright.client.array_store import ArrayStore
    from shardwright.client.frontends.program import Program

_log = logging.getLogger("shardwright")


class ProgramCache:
    """Makes programs ready to run. lock: is held while a program is prepared."""

    def __init__(self, arrays: ArrayStore, lock: threading.RLock) -> None:
        self._arrays = arrays
        self._cluster = arrays.cluster
        self._lock = lock
        self._loaded: dict[tuple[str, ...], LoadedPlan] = {}

    def prepare(
        self,
        lowered: Program,
        choices: Sequence[PlanChoice],
        progress: Callable[[PlanProgress], None] | None = None,
        devices: range | None = None,
        *,
        takes_first: bool = False,
    ) -> StepProgram:
        """A program ready to run; equal programs under the same plan are planned and loaded once.

        choices: the ways to plan it; the fastest plan by prediction is loaded. progress: called while the program is
        planned. devices: of the cluster, default all. takes_first: the first plan that fits will do.
        """
        self._cluster.require_open()
        with self._lock:
            epoch = self._cluster.epoch
            key = (*_key(lowered, choices, devices), str(epoch))
            if takes_first and key not in self._loaded:
                key = (*key, "first")
            if key not in self._loaded:
                self._loaded[key] = self._load_program(lowered, choices, progress, devices, takes_first=takes_first)
            loaded = self._loaded[key]
            return self._to_program(lowered, loaded, 0 if devices is None else devices.start, epoch)

    def prepare_freely(self, lowered: Program, options: PlanOptions, devices: range | None = None) -> StepProgram:
        """A program ready to run, planned under these options alone."""
        return self.prepare(lowered, (PlanChoice(options=options),), devices=devices)

    def adopt(self, lowered: Program, choices: Sequence[PlanChoice], loaded: LoadedPlan) -> StepProgram:
        """A program ready to run, of a plan that was made and loaded in the background."""
        with self._lock:
            epoch = self._cluster.epoch
            loaded = self._loaded.setdefault((*_key(lowered, choices, None), str(epoch)), loaded)
            return self._to_program(lowered, loaded, 0, epoch)

    def _to_program(self, lowered: Program, loaded: LoadedPlan, first_device: int, epoch: int) -> StepProgram:
        with self._lock:
            inputs = self._intern_layouts(argument_entries(loaded.plan, first_device))
            returns = self._intern_layouts(output_entries(loaded.plan, first_device))
            arguments = [self._intern(place) for place in placements_of(inputs, len(lowered.arguments))]
            outputs = [self._intern(place) for place in placements_of(returns, len(lowered.outputs))]
            sources = self._sources(lowered, inputs)
        numbers = lowered.leaf_numbers
        return StepProgram(
            lowered=lowered,
            plan=with_trees(loaded.plan, lowered),
            choice=loaded.choice,
            executable_id=loaded.load.executable_id,
            load=loaded.load,
            arguments=tuple(arguments),
            outputs=tuple(place for place in outputs if place is not None),
            leaf_numbers=numbers,
            leaf_places=tuple(arguments[number] for number in numbers),
            donated=list_donated_leaves(lowered),
            sources=sources,
            results=returns,
            consumed=list_consumed_arguments(loaded.plan),
            read_back=outputs_to_read_back(lowered),
            is_repeatable=is_repeatable(lowered),
            is_first=loaded.is_first,
            epoch=epoch,
        )

    @staticmethod
    def _sources(lowered: Program, entries: Sequence[ExecutableEntry]) -> tuple[ArgumentSource, ...]:
        """Sources of an executable's arguments."""
        leaves = {number: leaf for leaf, number in enumerate(lowered.leaf_numbers)}
        sources = []
        for entry in entries:
            constant = None
            if entry.number not in leaves:
                constant = part_of(lowered.constants[entry.number], entry)
            sources.append(
                ArgumentSource(
                    entry=entry,
                    leaf=leaves.get(entry.number, -1),
                    constant=constant,
                    proto=wire.layout_to_proto(entry.layout),
                )
            )
        return tuple(sources)

    def _load_program(
        self,
        lowered: Program,
        choices: Sequence[PlanChoice],
        progress: Callable[[PlanProgress], None] | None,
        devices: range | None,
        *,
        takes_first: bool = False,
    ) -> LoadedPlan:
        is_known = False
        started, master = time.monotonic(), self._cluster.master

        def planning(step: PlanProgress) -> None:
            nonlocal is_known
            is_known = step.phase == "cache"
            _log.info("%s: %s", lowered.name, step)
            if progress is not None:
                progress(step)

        def loading(phase: str, elapsed_s: float) -> None:
            _log.info("%s: %s (%.1f s)", lowered.name, phase, elapsed_s)
            if progress is not None:
                progress(PlanProgress(phase=phase, elapsed_s=time.monotonic() - started))

        program_id = master.upload_program(lowered.hlo_text)

        def make(options: PlanOptions) -> tuple[str, Plan | PipelinePlan]:
            return master.plan(program_id, lowered.hlo_text, options, planning, devices, takes_first=takes_first)

        choice, (plan_id, plan), others = (
            take_first(choices, make) if takes_first else take_fastest(choices, make, lambda planned: planned[1])
        )
        load = master.load(plan_id, loading)
        _log.info("%s: ready after %.1f s", lowered.name, time.monotonic() - started)
        return to_loaded_plan(choice, plan, others, load, is_first=takes_first and not is_known)

    def _intern_layouts(self, entries: Sequence[ExecutableEntry]) -> tuple[ExecutableEntry, ...]:
        """The entries, with equal layouts made identical."""
        return tuple(ExecutableEntry(entry.number, self._arrays.intern(entry.layout), entry.rows) for entry in entries)

    def _intern(self, place: Placement | None) -> Placement | None:
        return self._arrays.intern_rows(place) if isinstance(place, RowParts) else place


def _key(lowered: Program, choices: Sequence[PlanChoice], devices: range | None) -> tuple[str, ...]:
    return lowered.identity, f"{[*map(choice_key, choices)]} on {devices}"
