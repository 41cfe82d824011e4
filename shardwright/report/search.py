"""The search's view: compared plans with their prices, and the independently solved segments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from shardwright.plans.kernel_note import KernelNote
from shardwright.plans.plan import Candidate, CostSummary, Plan, SegmentPlan
from shardwright.report.tables import plain_table, title
from shardwright.report.wrapping import Wrapped
from shardwright.units import format_bytes, format_percent, format_seconds

#: Candidates, kinds of segments and values at a boundary that are shown before the rest is counted.
_SHOWN_CANDIDATES = 16
_SHOWN_KINDS = 12
_SHOWN_VALUES = 3


def certificate(cost: CostSummary, kernels: Sequence[KernelNote] = ()) -> str:
    """`certified within 0.3 % of optimal: no plan takes less than 2.70 ms`; `bound_section` says of which plans.

    kernels: those that the plan knows too little of to certify anything.
    """
    if cost.lower_bound_s <= 0:
        return "none: nothing is known of how much faster another plan could be"
    if not cost.is_bounded:
        return _compare_with_bounded(cost)
    if kernels:
        return (
            f"of what is priced, with the kernels above as they are: no plan takes less than "
            f"{format_seconds(cost.lower_bound_s)}"
        )
    within = f"certified within {_percent(cost.gap)} of optimal" if cost.gap >= 1e-6 else "certified optimal"
    return f"{within}: no plan takes less than {format_seconds(cost.lower_bound_s)}"


def bound_section(plan: Plan) -> list[RenderableType]:
    """Which plans the bound is of."""
    scope = plan.cost.bound_scope
    if not scope:
        return []
    parts = [part for part in scope.split("; ") if part]
    heading = "What the bound covers" if plan.cost.lower_bound_s > 0 else "Why there is no bound"
    return [title(heading), *(Padding(Text(f"- {part}"), (0, 0, 0, 2)) for part in parts), Text()]


def _compare_with_bounded(cost: CostSummary) -> str:
    """Comparison of a plan outside its bound's scope with the plans inside."""
    part = 1.0 - cost.step_s / cost.lower_bound_s
    relation = f"{_percent(part)} less than" if part > 0 else f"at most {_percent(-part)} more than"
    least = format_seconds(cost.lower_bound_s)
    return f"not bounded on its own mesh; {relation} any plan on the mesh it was found from, {least}"


def _percent(part: float) -> str:
    """Two significant digits from a hundredth of a percent on: `0.034 %`, `0.34 %`, `12 %`."""
    percent = 100 * part
    digits = 3 if percent < 0.1 else 2 if percent < 1 else 1 if percent < 10 else 0
    return f"{percent:.{digits}f} %"


# ---- candidates ----------------------------------------------------------------


def rank_candidates(plan: Plan) -> list[tuple[Candidate, bool]]:
    """(candidate, whether it is the plan), the fastest first; unpriced ones last."""
    ranked = sorted(plan.candidates, key=lambda candidate: (candidate.step_s is None, candidate.step_s or 0.0))
    ours = [item for item in ranked if item.mesh == plan.mesh and item.step_s is not None]
    chosen = min(ours, key=lambda candidate: abs((candidate.step_s or 0.0) - plan.cost.step_s), default=None)
    return [(item, item is chosen) for item in ranked]


def candidates_section(plan: Plan) -> list[RenderableType]:
    """A row per compared plan; nothing if there was no choice."""
    if len(plan.candidates) < 2:
        return []
    ranked = rank_candidates(plan)
    is_named = any(candidate_of_plan.name for candidate_of_plan in plan.candidates)
    columns = [("plan", "left")] if is_named else []
    columns += [("mesh", "left"), ("predicted step", "right"), ("slower by", "right"), ("note", "left")]
    table = plain_table(columns, fold=("plan", "note"))
    for candidate, is_chosen in ranked[:_SHOWN_CANDIDATES]:
        cells: list[RenderableType] = [Wrapped(candidate.name)] if is_named else []
        cells += [Text(str(candidate.mesh)), *(Text(cell) for cell in _price(candidate, plan))]
        table.add_row(*cells, Wrapped("; ".join(filter(None, ("chosen" if is_chosen else "", candidate.note)))))
    hidden = len(ranked) - _SHOWN_CANDIDATES
    heading = "Plans considered" if is_named else "Meshes considered"
    more = [Padding(Text(f"and {hidden} more"), (0, 0, 0, 2))] if hidden > 0 else []
    return [title(heading), Padding(table, (0, 0, 0 if more else 1, 2)), *more, *([Text()] if more else [])]


def _price(candidate: Candidate, plan: Plan) -> tuple[str, str]:
    if candidate.step_s is None:
        return "left out", ""
    slower = candidate.step_s / plan.cost.step_s - 1 if plan.cost.step_s > 0 else 0.0
    return format_seconds(candidate.step_s), "" if abs(slower) < 5e-5 else format_percent(slower, "+.1%")


# ---- memory for time ------------------------------------------------------------


def recompute_section(plan: Plan) -> list[RenderableType]:
    """A row per kind of segment with rematerialized values; nothing if all values are kept."""
    if not plan.recomputed:
        return []
    columns = [("segment", "left"), ("equal ones", "right"), ("values of each", "right"), ("adds to a step", "right")]
    table = plain_table([*columns, ("need not be kept", "right")], fold=("segment",))
    for segment in plan.recomputed:
        cells = (str(segment.repeats), str(segment.values), format_seconds(segment.time_s))
        table.add_row(Wrapped(segment.name), *(Text(cell) for cell in (*cells, format_bytes(segment.saved_bytes))))
    seconds = format_seconds(sum(segment.time_s for segment in plan.recomputed))
    saved = format_bytes(sum(segment.saved_bytes for segment in plan.recomputed))
    heading = title(f"Computed again for the backward pass: {seconds} a step for {saved} of a device")
    return [heading, Padding(table, (0, 0, 1, 2))]


# ---- segments ------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentGroup:
    """Segments of one kind: `first` represents all of them."""

    first: SegmentPlan
    count: int


def group_segments(segments: Sequence[SegmentPlan]) -> list[SegmentGroup]:
    """One group per kind, in program order of their first segments."""
    kinds: dict[int, list[SegmentPlan]] = {}
    for segment in segments:
        kinds.setdefault(segment.kind, []).append(segment)
    return [
        SegmentGroup(first=members[0], count=sum(segment_of_kind.repeats for segment_of_kind in members))
        for members in kinds.values()
    ]


def segments_section(plan: Plan) -> list[RenderableType]:
    """A row per kind of segment: number of equal ones, and the boundary values of the first."""
    groups = group_segments(plan.segments)
    if not groups:
        return []
    columns = [("segment", "left"), ("instructions", "right"), ("equal ones", "right"), ("hands on", "left")]
    table = plain_table(columns, fold=("segment", "hands on"))
    arguments = frozenset(instruction.name for instruction in plan.instructions if instruction.opcode == "parameter")
    for group in groups[:_SHOWN_KINDS]:
        first = group.first
        cells = (str(first.instructions), str(group.count))
        table.add_row(Wrapped(first.name), *(Text(cell) for cell in cells), Wrapped(_boundary(first, arguments)))
    if len(groups) > _SHOWN_KINDS:
        table.add_row(Text(f"{len(groups) - _SHOWN_KINDS} more kinds"))
    count = sum(group.count for group in groups)
    heading = title(f"Segments: {count}, of {len(groups)} kinds, each kind solved once")
    return [heading, Padding(table, (0, 0, 1, 2))]


def _boundary(segment: SegmentPlan, arguments: frozenset[str]) -> str:
    """Boundary values: computed ones; arguments passing through are only counted, their layouts stand above."""
    computed = [f"{name} {sharding}" for name, sharding in segment.boundary if name not in arguments]
    shown, hidden = computed[:_SHOWN_VALUES], len(computed[_SHOWN_VALUES:])
    values = ", ".join([*shown, *([f"and {hidden} more"] if hidden else [])])
    passed = len(segment.boundary) - len(computed)
    return "; ".join(filter(None, (values, f"{passed} argument{'s' if passed > 1 else ''}" if passed else "")))
