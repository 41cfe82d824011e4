"""What is said of stages that take unequal time: the reason that holds, and none where they are even."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from shardwright.planner.stages.cut import cut
from shardwright.planner.stages.imbalance import why_uneven
from shardwright.planner.stages.stage_graph import CutProblem, NodeCost, StageGraph, StageNode, StageSlot, StageValue
from shardwright.plans.pipeline_plan import UNEVEN


def said(seconds: Sequence[float], places: Sequence[StageSlot], *, chunks: int = 1, state_bytes: float = 0.0) -> str:
    """Of a chain of parts that take so long, the backward pass twice the forward pass, cut as well as it can be."""
    count = len(seconds)
    kinds = 1 + max(place.kind for place in places)
    nodes = tuple(
        StageNode(
            name="embed" if number == 0 else f"layer {number}",
            costs=tuple(
                NodeCost(forward_s=s * (1 + kind) / 3, backward_s=2 * s * (1 + kind) / 3, state_bytes=state_bytes)
                for kind in range(kinds)
            ),
        )
        for number, s in enumerate(seconds)
    )
    values = tuple(StageValue(bytes=8.0, producer=n, readers=(n + 1,)) for n in range(count - 1))
    values += tuple(StageValue(bytes=8.0, producer=n + 1, readers=(n,), direction="backward") for n in range(count - 1))
    graph = StageGraph(nodes=nodes, values=values)
    stage_cut = cut(graph, places, chunks=chunks, micro_batches=8)
    problem = CutProblem(graph=graph, stage_slots=tuple(places), chunks=chunks, micro_batches=8)
    return why_uneven(problem, stage_cut)


def test_nothing_is_said_of_even_stages() -> None:
    assert said([1.0] * 8, [StageSlot()] * 4) == ""
    assert said([1.1, *[1.0] * 7], [StageSlot()] * 4) == ""


@pytest.mark.parametrize(("layers", "stages", "most"), [(10, 4, 3), (40, 16, 3), (5, 4, 2)])
def test_equal_layers_that_the_stages_do_not_divide(layers: int, stages: int, most: int) -> None:
    text = said([1.0] * layers, [StageSlot()] * stages)
    assert text.startswith(f"{UNEVEN}: {layers} equal layers do not divide over {stages} stages")
    assert f"one has {most} of them" in text


def test_a_small_embedding_and_head_do_not_hide_that() -> None:
    text = said([0.1, *[1.0] * 10, 0.3], [StageSlot()] * 4)
    assert "10 equal layers do not divide over 4 stages" in text


def test_one_part_that_cannot_be_cut() -> None:
    text = said([6.0, *[1.0] * 6], [StageSlot()] * 3)
    assert text == (
        f"{UNEVEN}: embed is one part that cannot be cut, and takes 100 % of the slowest stage, 0, 1.5 times what a "
        "stage would take if all took the same"
    )


def test_memory_of_a_stage() -> None:
    small, large = StageSlot(memory_bytes=2 << 20), StageSlot(memory_bytes=64 << 20)
    text = said([1.0] * 12, [small, large, large], state_bytes=1 << 20)
    assert text.startswith(f"{UNEVEN}: memory: stage 0 has 2.00 MiB of the 2.00 MiB that it may fill")
    assert "would take 20 % less" in text
    assert said([1.0] * 12, [replace(small, memory_bytes=1e9), large, large], state_bytes=1 << 20) == ""


def test_parts_of_interleaved_stages() -> None:
    text = said([1.0] * 10, [StageSlot(in_flight=((1, 1, 1),))] * 3, chunks=3)
    assert "10 equal layers do not divide over 3 stages of 3 parts each; in any cut one has 2" in text


def test_other_reasons_name_what_the_model_is_cut_between() -> None:
    assert said([2.0, 3.0, 3.5, 1.0, 3.0], [StageSlot()] * 3) == (
        f"{UNEVEN}: the model is cut between 5 parts, the longest of stage 0 taking 72 % of an average stage; no "
        "better cut was found"
    )
    mixed = said([1.0] * 4, [StageSlot(kind=0), StageSlot(kind=1)])
    assert mixed.startswith(f"{UNEVEN}: their groups of devices are not alike")
