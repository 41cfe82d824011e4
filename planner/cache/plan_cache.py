"""Plan cache: an equal program, options and cluster are answered without a search.

Programs are equal when they have the same instructions in the same order; names of instructions, arguments and scopes,
and source lines, do not count. A plan cached under other names is relabeled (`relabel`), checked again, and replanned
when relabeling is uncertain.

An entry holds the plan's JSON, its program's names and the hash of its text. The text hash leads to the entry as well:
an identical text is answered without parsing. Pipelines, with names from the whole text in their programs, are answered
on identical text only.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Callable
from hashlib import sha256
from typing import Any

from shardwright.clusters.cluster import Cluster
from shardwright.errors import ShardwrightError
from shardwright.hlo import Module
from shardwright.options.plan_options import PlanOptions
from shardwright.planner import PlanProgress
from shardwright.planner.cache.keys import cluster_digest, hash_json, options_digest, planner_version, program_digest
from shardwright.planner.cache.relabel import ProgramNames, Relabeler, RelabelError
from shardwright.planner.cache.store import Store
from shardwright.planner.clock import Clock
from shardwright.planner.graph.dataflow import build_dataflow
from shardwright.planner.graph.names import argument_names, output_names
from shardwright.planner.graph.source import Source
from shardwright.planner.invalid_programs import raise_typed_errors
from shardwright.planner.planning import plan_step
from shardwright.planner.plans.verify import check_plan
from shardwright.planner.reuse import run_again
from shardwright.planner.tuning import CUT_SHORT_FRACTION
from shardwright.planner.warm_start.search_records import SearchHistory
from shardwright.plans.pipeline_plan import PipelinePlan
from shardwright.plans.plan import Plan
from shardwright.plans.plan_json import decode
from shardwright.plans.plan_text import plan_from_json, plan_to_json


def plan_with_cache(
    hlo: str | Source,
    cluster: Cluster,
    options: PlanOptions | None = None,
    *,
    store: Store | None,
    progress: Callable[[PlanProgress], None] | None = None,
    clock: Clock | None = None,
) -> Plan | PipelinePlan:
    """`plan_step(...)`, or its cached answer; `planning_s` is the time of this call.

    store: holds plans and search records (`store.default_store("plans")`); None: no cache.
    clock: of the deadline; None starts one now.

    A plan that the options bring along is run again (`reuse`). Plans cut short, by a deadline, an interruption or
    because the first one was asked for, are not cached. Raises the errors of `plan_step`, and PlanError on a program
    that XLA rejects.
    """
    options = options or PlanOptions()
    clock = clock or Clock(options.deadline_s)
    source = Source(hlo) if isinstance(hlo, str) else hlo
    with raise_typed_errors(source.text):
        if options.plan_json:
            plan = run_again(source, cluster, options, progress=progress, clock=clock)
        elif store is None:
            plan = plan_step(source, cluster, options, progress=progress, clock=clock)
        else:
            return _recall_or_plan(source, cluster, options, store, progress, clock)
        return _name_program(plan, source)


def _recall_or_plan(
    source: Source,
    cluster: Cluster,
    options: PlanOptions,
    store: Store,
    progress: Callable[[PlanProgress], None] | None,
    clock: Clock,
) -> Plan | PipelinePlan:
    cache = _PlanCache(store, cluster, options)
    cached_plan = cache.recall(source)
    if cached_plan is not None:
        elapsed_s = clock.elapsed_s
        if progress is not None:
            step_s, bound_s = _step_and_bound_s(cached_plan)
            progress(PlanProgress(phase="cache", incumbent_s=step_s, lower_bound_s=bound_s, elapsed_s=elapsed_s))
        return dataclasses.replace(cached_plan, planning_s=elapsed_s)
    plan = plan_step(source, cluster, options, progress=progress, history=SearchHistory(store), clock=clock)
    plan = _name_program(plan, source)
    if not (clock.takes_first or clock.is_interrupted or _is_cut_short(plan, options)):
        cache.store(source, plan)
    return plan


def _name_program(plan: Plan | PipelinePlan, source: Source) -> Plan | PipelinePlan:
    return dataclasses.replace(plan, program_sha256=program_digest(source.module).hex())


def _is_cut_short(plan: Plan | PipelinePlan, options: PlanOptions) -> bool:
    return options.deadline_s is not None and plan.planning_s >= CUT_SHORT_FRACTION * options.deadline_s


class _PlanCache:
    """The entries of one cluster and one set of options."""

    def __init__(self, store: Store, cluster: Cluster, options: PlanOptions) -> None:
        self._store = store
        self._options = options
        self._context = planner_version() + cluster_digest(cluster) + options_digest(options)

    def recall(self, source: Source) -> Plan | PipelinePlan | None:
        text = source.text
        direct = self._store.get(self._text_key(text))
        entry = self._load_entry(direct) if direct is not None else None
        if entry is not None and self._is_same(entry, text):
            return entry.plan(text)
        entry = self._load_entry(self._program_key(source.module))
        if entry is None:
            return None
        if self._is_same(entry, text):
            return entry.plan(text)
        return self._relabel(entry, source.module, text)

    def store(self, source: Source, plan: Plan | PipelinePlan) -> None:
        text, module = source.text, source.module
        header: dict[str, Any] = {"sha256": _digest(text), "given": self._names_given()}
        if isinstance(plan, Plan):
            names = [variable.name for variable in plan.parameters], [variable.name for variable in plan.outputs]
            header["labels"] = ProgramNames.of(module, *names).encode()
        key = self._program_key(module)
        self._store.put(key, zlib.compress(f"{json.dumps(header)}\n{plan_to_json(plan)}".encode(), level=1))
        self._store.put(self._text_key(text), key)

    # ---- entries ---------------------------------------------------------------
    def _load_entry(self, key: bytes) -> _Entry | None:
        data = self._store.get(key)
        try:
            return None if data is None else _Entry(*zlib.decompress(data).decode().split("\n", 1))
        except (ValueError, TypeError, zlib.error):
            return None

    def _is_same(self, entry: _Entry, text: str) -> bool:
        return bool(entry.header["sha256"] == _digest(text) and entry.header["given"] == self._names_given())

    def _names_given(self) -> list[list[str]]:
        return [list(self._options.argument_names), list(self._options.output_names)]

    def _relabel(self, entry: _Entry, module: Module, text: str) -> Plan | None:
        if "labels" not in entry.header:
            return None
        flow = build_dataflow(module)
        arguments = argument_names(flow, self._options.argument_names)
        outputs = output_names(flow, self._options.output_names)
        try:
            relabelling = Relabeler(
                ProgramNames.decode(entry.header["labels"]), ProgramNames.of(module, arguments, outputs)
            )
            plan, planned = relabelling.relabel(decode(entry.plan_json), module, text)
            check_plan(planned, plan)
        except (RelabelError, ShardwrightError):
            return None
        return plan

    # ---- keys --------------------------------------------------------------------
    def _text_key(self, text: str) -> bytes:
        return sha256(b"text" + self._context + hash_json(self._names_given()) + text.encode()).digest()

    def _program_key(self, module: Module) -> bytes:
        return sha256(b"program" + self._context + program_digest(module)).digest()


class _Entry:
    """A stored plan: a header, and the plan as JSON. Raises ValueError on other data."""

    def __init__(self, header: str, plan_json: str) -> None:
        self.header: dict[str, Any] = json.loads(header)
        self.plan_json = plan_json

    def plan(self, text: str) -> Plan | PipelinePlan:
        """The plan of an identical text."""
        plan = plan_from_json(self.plan_json)
        if isinstance(plan, PipelinePlan):
            return dataclasses.replace(plan, hlo_text=text)
        return plan if plan.original_sha256 else dataclasses.replace(plan, hlo_text=text)


def _step_and_bound_s(plan: Plan | PipelinePlan) -> tuple[float, float]:
    """Seconds of a step, and its lower bound; 0 without one."""
    return (plan.step_s, 0.0) if isinstance(plan, PipelinePlan) else (plan.cost.step_s, plan.cost.lower_bound_s)


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()
