"""Explains, in a sentence, unequal times of a pipeline's stages, from the cut and its alternatives."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from shardwright.planner.stages.intervals import Intervals
from shardwright.planner.stages.stage_graph import CutProblem, StageCut
from shardwright.planner.stages.tuning import EQUAL_TIMES, EVEN, MIN_DECIDING_SHARE, MIN_GAIN_WITHOUT_LIMITS
from shardwright.plans.pipeline_plan import UNEVEN
from shardwright.units import format_bytes, format_percent


def why_uneven(problem: CutProblem, cut: StageCut) -> str:
    """The sentence; empty if the fastest stage takes at least 80 % of the slowest one's time."""
    stages = len(problem.stage_slots)
    stage_s = [sum(cut.chunk_s[stage::stages]) for stage in range(stages)]
    if min(stage_s) >= EVEN * max(stage_s):
        return ""
    slowest = max(range(problem.chunk_count), key=lambda chunk: cut.chunk_s[chunk])
    reason = _indivisible(problem, cut, slowest) or _layers(problem, cut, slowest) or _memory(problem, cut)
    return f"{UNEVEN}: {reason or _otherwise(problem, cut, slowest)}"


def _seconds(problem: CutProblem, node: int, chunk: int) -> float:
    return problem.node_cost(node, chunk).seconds(problem.micro_batches)


def _longest(problem: CutProblem, cut: StageCut, chunk: int) -> int:
    members = [node for node, at in enumerate(cut.chunk_of) if at == chunk]
    return max(members, key=lambda node: _seconds(problem, node, chunk))


def _indivisible(problem: CutProblem, cut: StageCut, slowest: int) -> str:
    """One part is most of the slowest chunk, and exceeds a chunk's share."""
    node = _longest(problem, cut, slowest)
    part_s = _seconds(problem, node, slowest)
    if part_s < EVEN * cut.chunk_s[slowest] or part_s <= problem.average_s:
        return ""
    name, stage = problem.graph.nodes[node].name, slowest % len(problem.stage_slots)
    part = format_percent(part_s / cut.chunk_s[slowest])
    return (
        f"{name} is one part that cannot be cut, and takes {part} of the slowest stage, "
        f"{stage}, {part_s / problem.average_s:.1f} times what a stage would take if all took the same"
    )


def _layers(problem: CutProblem, cut: StageCut, slowest: int) -> str:
    """Equal layers, not divisible by the chunks, are most of the slowest chunk; it has the minimum number of them."""
    chunks = problem.chunk_count
    one_s = _seconds(problem, _longest(problem, cut, slowest), slowest)
    nodes = range(len(problem.graph.nodes))
    equal = [node for node in nodes if abs(_seconds(problem, node, slowest) - one_s) <= EQUAL_TIMES * one_s]
    here = sum(1 for node in equal if cut.chunk_of[node] == slowest)
    is_least = here == ceil(len(equal) / chunks) and len(equal) % chunks > 0
    if not is_least or here * one_s < MIN_DECIDING_SHARE * cut.chunk_s[slowest] or len(equal) < chunks:
        return ""
    parts = f"{len(problem.stage_slots)} stages" + (f" of {problem.chunks} parts each" if problem.chunks > 1 else "")
    return (
        f"{len(equal)} equal layers do not divide over {parts}; in any cut one has {here} of them, and the others wait "
        "for it, however they share the rest"
    )


def _memory(problem: CutProblem, cut: StageCut) -> str:
    """Without memory limits the slowest chunk would be shorter."""
    free = replace(
        problem, stage_slots=tuple(replace(place, memory_bytes=float("inf")) for place in problem.stage_slots)
    )
    best_s = Intervals(free).fastest_s()
    if best_s is None or best_s >= (1 - MIN_GAIN_WITHOUT_LIMITS) * max(cut.chunk_s):
        return ""
    shorter = 1 - best_s / max(cut.chunk_s)
    used = [size / place.memory_bytes for size, place in zip(cut.memory_bytes, problem.stage_slots, strict=True)]
    fullest = max(range(len(used)), key=lambda stage: used[stage])
    return (
        f"memory: stage {fullest} has {format_bytes(int(cut.memory_bytes[fullest]))} of the "
        f"{format_bytes(int(problem.stage_slots[fullest].memory_bytes))} that it may fill; with more, the slowest "
        f"stage would take {format_percent(shorter)} less"
    )


def _otherwise(problem: CutProblem, cut: StageCut, slowest: int) -> str:
    kinds = {place.kind for place in problem.stage_slots}
    if len(kinds) > 1:
        return "their groups of devices are not alike, and parts of the model only go from earlier stages to later ones"
    share = _seconds(problem, _longest(problem, cut, slowest), slowest) / problem.average_s
    return (
        f"the model is cut between {len(problem.graph.nodes)} parts, the longest of stage "
        f"{slowest % len(problem.stage_slots)} taking {format_percent(share)} of an average stage; "
        "no better cut was found"
    )
