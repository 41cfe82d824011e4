"""The published runs predicted: each row's own plan forced, its step and memory, and the order of a sweep's plans."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Any

import shardwright as sw
from benchmarks.published.rows import PublishedRow
from benchmarks.published.steps import make_step
from shardwright.cost import hardware_profile
from shardwright.plans.pipeline_plan import PipelinePlan

#: Memory of one device while a row is planned: the row ran, whatever memory is predicted.
_NO_LIMIT_BYTES = 10**15

#: Runs whose device-seconds a token differ by less are not told apart (repeats of one run differ by 3 %).
APART = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A row's plan; all but `id`, `group` and `plan_s` are None where there is none, for the reason in `refusal`."""

    id: str
    group: str
    plan_s: float = 0.0
    layout: str | None = None
    step_s: float | None = None
    peak_bytes: int | None = None
    device_bytes: int | None = None
    refusal: str = ""


def predict(row: PublishedRow, **more: Any) -> Prediction:
    """The row planned as it was run. more: options besides those of the row, or instead of them."""
    start_s = time.monotonic()
    if row.why_not:
        return Prediction(id=row.id, group=row.group, refusal=row.why_not)
    try:
        plan = plan_row(row, **more)
    except sw.ShardwrightError as error:
        return Prediction(id=row.id, group=row.group, plan_s=time.monotonic() - start_s, refusal=str(error))
    plan_s = time.monotonic() - start_s
    profile = hardware_profile(row.cluster().hardware)
    known: dict[str, Any] = {
        "id": row.id,
        "group": row.group,
        "plan_s": plan_s,
        "device_bytes": row.cluster().memory_bytes_per_device or profile.memory_bytes,
    }
    if isinstance(plan, PipelinePlan):
        layout = f"{len(plan.stages)} × {plan.stages[0].mesh}, {plan.micro_batches} micro-batches, {plan.schedule}"
        peak = max(stage.memory.peak_bytes for stage in plan.stages)
        return Prediction(**known, layout=layout, step_s=plan.step_s, peak_bytes=peak)
    return Prediction(**known, layout=str(plan.mesh), step_s=plan.cost.step_s, peak_bytes=plan.memory.peak_bytes)


def plan_row(row: PublishedRow, **more: Any) -> sw.Plan | sw.PipelinePlan:
    """The row's plan, within a memory without limit. Raises the errors of `sw.plan`."""
    cluster = row.cluster(_NO_LIMIT_BYTES)
    return sw.plan(lower(row), cluster, cache=False, **{**row.options(), **more})


def lower(row: PublishedRow) -> str:
    """The HLO text of the row's step."""
    step, types = make_step(row.model())
    return sw.lower(step, *types, donate_argnums=(0, 1), platform=row.cluster().platform).as_text()


# ---- the order of plans -----------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Pairs of runs of one sweep, of those that differ by more than `APART` in device-seconds a token."""

    group: str
    right: int
    pairs: int


def rank(rows: Sequence[PublishedRow], predictions: Sequence[Prediction]) -> list[Order]:
    """For each sweep, how many of its pairs are predicted in the order in which they were measured."""
    predicted = {one.id: one.step_s for one in predictions if one.step_s is not None}
    sweeps: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        measured_s, tokens = row.measured.step_s, (row.sequences or 0) * row.seq
        if measured_s is not None and tokens and row.id in predicted:
            share = row.devices / tokens
            sweeps[row.group].append((measured_s * share, predicted[row.id] * share))
    return [_rank_sweep(group, costs) for group, costs in sweeps.items()]


def _rank_sweep(group: str, costs: Sequence[tuple[float, float]]) -> Order:
    apart = [
        (first, second)
        for first, second in combinations(costs, 2)
        if max(first[0] / second[0], second[0] / first[0]) > 1 + APART
    ]
    right = sum((first[0] < second[0]) == (first[1] < second[1]) for first, second in apart)
    return Order(group=group, right=right, pairs=len(apart))


def errors(rows: Sequence[PublishedRow], predictions: Sequence[Prediction]) -> Iterator[float]:
    """|predicted / measured − 1| of each step that was measured."""
    predicted = {one.id: one.step_s for one in predictions}
    for row in rows:
        step_s = predicted.get(row.id)
        if row.measured.step_s is not None and step_s is not None:
            yield abs(step_s / row.measured.step_s - 1)


def summarize(rows: Sequence[PublishedRow], predictions: Sequence[Prediction]) -> str:
    """Rows planned, mean and median error, order of pairs, reasons of those not planned."""
    planned = [one for one in predictions if one.step_s is not None]
    off, orders = list(errors(rows, predictions)), rank(rows, predictions)
    right, pairs = sum(order.right for order in orders), sum(order.pairs for order in orders)
    lines = [f"{len(planned)} of {len(predictions)} rows planned as they were run"]
    if off:
        lines.append(f"steps off by {sum(off) / len(off):.1%} on average, {median(off):.1%} in the median")
    lines.append(f"{right} of {pairs} pairs of a sweep that are {APART:.0%} apart ordered right")
    reasons: dict[str, list[str]] = defaultdict(list)
    for one in predictions:
        if one.step_s is None:
            reasons[one.refusal].append(one.id)
    lines += [
        f"not planned: {len(ids)} × {reason}: {ids[0]}{', …' if ids[1:] else ''}" for reason, ids in reasons.items()
    ]
    return "\n".join(lines)
