"""From the best candidate to the choice: the program, its loops split at stage borders, and its notes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from shardwright.hlo import Module
from shardwright.planner.microbatch import StepSplit
from shardwright.planner.rewrites.loop_parts import Rows
from shardwright.planner.rewrites.split_loops import Parts, split_loops
from shardwright.planner.stages.clustering import Clustering
from shardwright.planner.stages.imbalance import why_uneven
from shardwright.planner.stages.types import PipelineChoice, StageGroup
from shardwright.plans.pipeline_plan import PipelineCandidate
from shardwright.units import format_seconds

if TYPE_CHECKING:
    from shardwright.planner.stages.choose import Pipeline


def realize_choice(
    coarse: Clustering,
    split: StepSplit,
    best: Pipeline,
    alike: Sequence[Pipeline],
    candidates: Sequence[PipelineCandidate],
    whole_s: float | None,
    why_not: str,
) -> PipelineChoice:
    """The choice. alike: the same stages under every schedule. whole_s, why_not: see `search_pipeline`."""
    cut, groups = best.cut, best.groups
    split_module = split_loops(split.module, _rows(coarse, cut.chunk_of))
    assert best.pace is not None
    return PipelineChoice(
        module=split_module.module,
        arguments=split_module.arguments,
        outputs=split_module.outputs,
        groups=tuple(
            StageGroup(first_device=groups.first_devices[stage], mesh=best.meshes[groups.kind(stage)])
            for stage in range(groups.stages)
        ),
        chunks=best.problem.chunks,
        micro_batches=best.micro_batches,
        schedule=str(best.schedule),
        chunk_of=_chunks(coarse, split_module.module, split_module.label_of, cut.chunk_of),
        step_s=best.step_s,
        bubble_fraction=best.pace.bubble_fraction,
        stage_s=best.pace.busy_s,
        memory_bytes=tuple(int(size) for size in cut.memory_bytes),
        crossing_bytes=cut.crossing_bytes,
        imbalance=cut.imbalance,
        candidates=tuple(dict.fromkeys(candidates)),
        notes=(*_notes(best, whole_s, why_not), *_schedules(alike), *split.notes),
        whole=best.whole,
        whole_split=split,
        stage_plans=tuple(best.plans[groups.kind(stage)] for stage in range(groups.stages)),
    )


def _rows(coarse: Clustering, chunk_of: Sequence[int]) -> dict[str, Parts]:
    """The row ranges of each loop over layers, one per chunk."""
    loop_parts = {}
    for node, stack in coarse.stacks.items():
        chunks = [chunk_of[part] for part in coarse.members(node)]
        parts, start = [], 0
        for chunk, rows in groupby(chunks):
            stop = start + len(list(rows))
            parts.append(Rows(start, stop, chunk))
            start = stop
        loop_parts[stack.loop.name] = tuple(parts)
    return loop_parts


def _chunks(coarse: Clustering, module: Module, label_of: Mapping[str, int], chunk_of: Sequence[int]) -> dict[str, int]:
    """The chunk of every entry instruction in one."""
    parts: dict[str, int] = {}
    for node in coarse.flow.nodes:
        if coarse.first[node.index] >= 0 and node.instruction.opcode != "parameter":
            parts.setdefault(node.instruction.name, coarse.part(node.index))
    chunks = {}
    for instruction in module.entry:
        name = instruction.name
        if name in label_of:
            chunks[name] = label_of[name]
        elif name in parts:
            chunks[name] = chunk_of[parts[name]]
    return chunks


def _schedules(alike: Sequence[Pipeline]) -> list[str]:
    """A note: times of the same stages under each schedule."""
    times = [
        f"{pipeline.schedule} {format_seconds(pipeline.step_s)} ({100 * pipeline.pace.bubble_fraction:.0f} % idle)"
        for pipeline in sorted(alike, key=lambda pipeline: pipeline.step_s)
        if pipeline.pace is not None
    ]
    return [f"schedules of this cut into stages: {', '.join(times)}"] if len(times) > 1 else []


def _notes(best: Pipeline, whole_s: float | None, why_not: str) -> list[str]:
    """Notes: reasons to use or not to use a pipeline, and its limits."""
    assert best.pace is not None
    bubble = f"{100 * best.pace.bubble_fraction:.1f} % of the time stages wait"
    notes = []
    if whole_s is None:
        because = f": {why_not}" if why_not else ""
        notes.append(f"a pipeline of {best.groups.stages} stages{because}; {bubble}")
    elif best.step_s < whole_s:
        notes.append(
            f"a pipeline of {best.groups.stages} stages takes {format_seconds(best.step_s)} a step, one program on all "
            f"devices {format_seconds(whole_s)}; {bubble}"
        )
    else:
        notes.append(
            f"no pipeline pays: the best one, of {best.groups.stages} stages, takes {format_seconds(best.step_s)} a "
            f"step, one program on all devices {format_seconds(whole_s)}; {bubble}"
        )
    uneven = why_uneven(best.problem, best.cut)
    notes += [uneven] if uneven else []
    used, there = best.groups.devices, best.groups.cluster.device_count
    if used < there:
        notes.append(f"{there - used} of {there} devices are not used")
    if not best.cut.is_optimal:
        notes.append("the cut into stages is the best that was found, not proven to send least")
    return notes
