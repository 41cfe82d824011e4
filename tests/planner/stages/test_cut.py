"""Cuts against exhaustive search, whose costs are counted here once more, and what the constraints mean."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Sequence
from itertools import product

import pytest

from shardwright.errors import PlanError
from shardwright.planner.stages import cut_ilp
from shardwright.planner.stages.cut import cut
from shardwright.planner.stages.intervals import Intervals, is_exact
from shardwright.planner.stages.stage_graph import (
    CutProblem,
    NodeCost,
    SharedState,
    StageGraph,
    StageNode,
    StageSlot,
    StageValue,
    of_kind,
)
from shardwright.planner.stages.tuning import SLACK
from tests.planner.busy_machine import others_have_the_machine

GRAPHS = int(os.environ.get("SHARDWRIGHT_STAGE_GRAPHS", "200"))


# ---- the oracle -----------------------------------------------------------------


def every_cut(problem: CutProblem) -> Iterator[tuple[int, ...]]:
    for chunk_of in product(range(problem.chunk_count), repeat=len(problem.graph.nodes)):
        if len(set(chunk_of)) < problem.chunk_count:
            continue
        ends = [
            (v.producer, r) if v.direction == "forward" else (r, v.producer)
            for v in problem.graph.values
            for r in v.readers
        ]
        if all(chunk_of[a] <= chunk_of[b] for a, b in ends):
            yield chunk_of


def seconds(problem: CutProblem, chunk_of: Sequence[int]) -> list[float]:
    total = [0.0] * problem.chunk_count
    for node, chunk in enumerate(chunk_of):
        work = problem.graph.nodes[node].costs[problem.stage_slots[chunk % len(problem.stage_slots)].kind]
        total[chunk] += work.forward_s + work.backward_s + work.update_s / problem.micro_batches
    return total


def crossing(problem: CutProblem, chunk_of: Sequence[int]) -> float:
    stages = [chunk % len(problem.stage_slots) for chunk in chunk_of]
    total = 0.0
    for value in problem.graph.values:
        for stage in range(len(problem.stage_slots)):
            if stage != stages[value.producer] and stage in [stages[r] for r in (*value.readers, *value.saved_by)]:
                total += value.bytes
    for shared in problem.graph.shared:
        for stage in range(len(problem.stage_slots)):
            if stage != stages[shared.owner] and stage in [stages[r] for r in shared.readers]:
                total += 2 * shared.bytes / problem.micro_batches
    return total


def fits(problem: CutProblem, chunk_of: Sequence[int]) -> bool:
    count = len(problem.stage_slots)
    for stage, place in enumerate(problem.stage_slots):
        mine = [n for n, chunk in enumerate(chunk_of) if chunk % count == stage]
        works = [problem.graph.nodes[n].costs[place.kind] for n in mine]
        fixed = sum(w.state_bytes + place.delayed * w.delayed_bytes for w in works) + max(
            w.workspace_bytes for w in works
        )
        for shared in problem.graph.shared:
            if shared.owner not in mine and set(shared.readers) & set(mine):
                fixed += of_kind(shared.shard_bytes, place.kind)
        for moment in place.in_flight:
            result = 0.0
            for position, alive in enumerate(moment):
                members = [n for n in mine if chunk_of[n] == stage + position * count]
                result += alive * sum(problem.graph.nodes[n].costs[place.kind].saved_bytes for n in members)
                result += alive * sum(
                    of_kind(v.shard_bytes, place.kind) for v in problem.graph.values if set(v.saved_by) & set(members)
                )
            if fixed + result > place.memory_bytes * (1 + 1e-9):
                return False
    return True


# ---- random problems --------------------------------------------------------------


def problem_of(seed: int) -> CutProblem:
    draw = random.Random(seed)
    kinds = draw.choice([1, 1, 2])
    stages, chunks = draw.choice([(2, 1), (2, 1), (3, 1), (2, 2), (4, 1)])
    count = draw.randint(stages * chunks, 7 if stages * chunks < 4 else 6)
    nodes = tuple(
        StageNode(
            name=f"n{i}",
            costs=tuple(
                NodeCost(
                    forward_s=draw.randint(1, 9),
                    backward_s=draw.randint(0, 9),
                    update_s=draw.randint(0, 4),
                    state_bytes=draw.randint(0, 50),
                    saved_bytes=draw.randint(0, 9),
                    delayed_bytes=draw.randint(0, 9),
                    workspace_bytes=draw.randint(0, 20),
                )
                for _ in range(kinds)
            ),
        )
        for i in range(count)
    )
    density = draw.choice([0.2, 0.4, 0.7])
    values = []
    for maker in range(count):
        readers = tuple(r for r in range(maker + 1, count) if draw.random() < density)
        saved = tuple(n for n in range(count) if draw.random() < 0.2)
        if readers or saved:
            values.append(
                StageValue(
                    bytes=draw.randint(1, 30),
                    producer=maker,
                    readers=readers,
                    saved_by=saved,
                    shard_bytes=tuple(draw.randint(0, 9) for _ in range(kinds)),
                )
            )
        back = tuple(r for r in range(maker) if draw.random() < density / 2)
        if back:
            values.append(StageValue(bytes=draw.randint(1, 30), producer=maker, readers=back, direction="backward"))
    shared = ()
    if draw.random() < 0.4:
        owner, other = draw.sample(range(count), 2)
        shared = (
            SharedState(
                bytes=draw.randint(1, 60),
                owner=owner,
                readers=(owner, other),
                shard_bytes=tuple(draw.randint(0, 20) for _ in range(kinds)),
            ),
        )
    limit = draw.choice([float("inf"), draw.randint(60, 260)])
    places = tuple(
        StageSlot(
            kind=stage % kinds,
            memory_bytes=limit,
            delayed=draw.choice([0, 0, stage + 1]),
            in_flight=tuple(tuple(draw.randint(1, 4) for _ in range(chunks)) for _ in range(draw.randint(1, 2))),
        )
        for stage in range(stages)
    )
    graph = StageGraph(nodes=nodes, values=tuple(values), shared=shared)
    return CutProblem(graph=graph, stage_slots=places, chunks=chunks, micro_batches=draw.choice([1, 4]))


@pytest.mark.dear
def test_cuts_are_the_best_of_all() -> None:
    infeasible = chains = 0
    for seed in range(GRAPHS):
        problem = problem_of(seed)
        chains += is_exact(problem)
        legal = [each for each in every_cut(problem) if fits(problem, each)]
        arguments = {"chunks": problem.chunks, "micro_batches": problem.micro_batches}
        if not legal:
            infeasible += 1
            with pytest.raises(PlanError, match="fits the memory"):
                cut(problem.graph, problem.stage_slots, **arguments)
            continue
        best_s = min(max(seconds(problem, each)) for each in legal)
        allowed = [each for each in legal if max(seconds(problem, each)) <= best_s * (1 + SLACK)]
        stage_cut = cut(problem.graph, problem.stage_slots, **arguments)
        assert stage_cut.chunk_of in legal, seed
        assert stage_cut.is_optimal, seed
        assert max(seconds(problem, stage_cut.chunk_of)) <= best_s * (1 + SLACK) + 1e-6, seed
        assert stage_cut.crossing_bytes == pytest.approx(crossing(problem, stage_cut.chunk_of)), seed
        assert stage_cut.chunk_s == pytest.approx(seconds(problem, stage_cut.chunk_of)), seed
        assert stage_cut.crossing_bytes == pytest.approx(min(crossing(problem, each) for each in allowed)), seed
    assert infeasible < GRAPHS / 4
    assert chains < GRAPHS / 2


def test_any_balance_that_is_asked_for() -> None:
    for seed in range(1000, 1000 + GRAPHS // 10):
        problem = problem_of(seed)
        legal = [each for each in every_cut(problem) if fits(problem, each)]
        arguments = {"chunks": problem.chunks, "micro_batches": problem.micro_batches, "imbalance": 0.25}
        allowed = [each for each in legal if max(seconds(problem, each)) <= 1.25 * problem.average_s]
        if not allowed:
            with pytest.raises(PlanError):
                cut(problem.graph, problem.stage_slots, **arguments)
            continue
        stage_cut = cut(problem.graph, problem.stage_slots, **arguments)
        assert stage_cut.crossing_bytes == pytest.approx(min(crossing(problem, each) for each in allowed)), seed


# ---- what it means ------------------------------------------------------------------


def chain(costs: Sequence[float], *, skips: Sequence[tuple[int, int, float]] = (), **work: float) -> StageGraph:
    nodes = tuple(
        StageNode(name=f"layer {i}", costs=(NodeCost(forward_s=s, backward_s=2 * s, **work),))
        for i, s in enumerate(costs)
    )
    steps = [StageValue(bytes=1.0, producer=i, readers=(i + 1,)) for i in range(len(costs) - 1)]
    return StageGraph(
        nodes=nodes, values=(*steps, *(StageValue(bytes=b, producer=i, readers=(j,)) for i, j, b in skips))
    )


def test_a_heavy_head_gets_fewer_layers_beside_it() -> None:
    stage_cut = cut(chain([1, 1, 1, 1, 1, 1, 1, 3]), [StageSlot()] * 2)
    assert stage_cut.chunk_of == (0, 0, 0, 0, 0, 1, 1, 1)
    assert stage_cut.imbalance == pytest.approx(0)


def test_a_skip_connection_is_sent_straight_to_its_reader() -> None:
    graph = chain([1, 1, 1, 1], skips=[(0, 3, 10.0)])
    assert cut(graph, [StageSlot()] * 4).crossing_bytes == 13.0
    # two stages cross it once, wherever the cut is
    assert cut(graph, [StageSlot()] * 2).crossing_bytes == 11.0


def test_memory_moves_layers_to_stages_that_keep_fewer_micro_batches() -> None:
    graph = chain([1] * 6, saved_bytes=10.0)
    free = [StageSlot(in_flight=((3 - s,),)) for s in range(3)]
    assert cut(graph, free).chunk_of == (0, 0, 1, 1, 2, 2)
    tight = [StageSlot(in_flight=((3 - s,),), memory_bytes=40.0) for s in range(3)]
    assert cut(graph, tight).chunk_of == (0, 1, 1, 2, 2, 2)
    with pytest.raises(PlanError, match="fits the memory"):
        cut(graph, [StageSlot(in_flight=((3 - s,),), memory_bytes=25.0) for s in range(3)])


def test_slower_groups_get_less() -> None:
    nodes = tuple(
        StageNode(name=f"{i}", costs=(NodeCost(forward_s=1, backward_s=1), NodeCost(forward_s=3, backward_s=3)))
        for i in range(8)
    )
    values = tuple(StageValue(bytes=1, producer=i, readers=(i + 1,)) for i in range(7))
    stage_cut = cut(StageGraph(nodes=nodes, values=values), [StageSlot(kind=0), StageSlot(kind=1)])
    assert stage_cut.chunk_of == (0,) * 6 + (1,) * 2


def test_chunks_of_a_stage_lie_round_the_ring() -> None:
    graph = chain([1] * 8)
    stage_cut = cut(graph, [StageSlot(in_flight=((1, 1),))] * 2, chunks=2)
    assert stage_cut.chunk_of == (0, 0, 1, 1, 2, 2, 3, 3)
    assert stage_cut.crossing_bytes == 3.0


def test_branches_go_side_by_side() -> None:
    """Two towers of unlike cost that meet in a head: no order of the nodes is given, balance decides."""
    works = [2, 2, 2, 1, 1, 1, 3]
    nodes = tuple(StageNode(name=f"{i}", costs=(NodeCost(forward_s=s, backward_s=0),)) for i, s in enumerate(works))
    edges = [(0, 1), (1, 2), (2, 6), (3, 4), (4, 5), (5, 6)]
    values = tuple(StageValue(bytes=1, producer=a, readers=(b,)) for a, b in edges)
    stage_cut = cut(StageGraph(nodes=nodes, values=values), [StageSlot()] * 2)
    assert sorted(stage_cut.chunk_s) == [6, 6]
    assert stage_cut.chunk_of == (0, 0, 0, 1, 1, 1, 1)


def test_refusals_say_what_would_do() -> None:
    with pytest.raises(PlanError, match="can be cut into 3 at most"):
        cut(chain([1, 1, 1]), [StageSlot()] * 4)
    with pytest.raises(PlanError, match=r"20\.0 % more than the average"):
        cut(chain([1, 1, 3]), [StageSlot()] * 2, imbalance=0.1)
    assert cut(chain([1, 1, 3]), [StageSlot()] * 2, imbalance=0.21).chunk_of == (0, 0, 1)


def test_intervals_and_the_integer_program_agree_on_chains() -> None:
    draw = random.Random(5)
    for _ in range(8):
        graph = chain([draw.randint(1, 9) for _ in range(9)], skips=[(0, 5, draw.randint(1, 4))], saved_bytes=2.0)
        places = [StageSlot(in_flight=((3 - s,),), memory_bytes=40.0) for s in range(3)]
        problem = CutProblem(graph=graph, stage_slots=tuple(places), chunks=1, micro_batches=2)
        assert is_exact(problem)
        fastest = cut_ilp.fastest(problem, most_cpu_s=20)
        assert fastest is not None
        assert Intervals(problem).fastest_s() == pytest.approx(max(fastest.chunk_s))
        solved = cut_ilp.min_crossing(problem, max(fastest.chunk_s) * 1.2, most_cpu_s=20)
        straight = Intervals(problem).min_crossing(max(fastest.chunk_s) * 1.2)
        assert solved is not None
        assert straight is not None
        assert solved.crossing_bytes == pytest.approx(straight.crossing_bytes)


def test_the_integer_program_ends_by_cpu_time_however_busy_the_machine_is() -> None:
    draw = random.Random(7)
    skips = [(i, draw.randint(i + 2, 19), draw.randint(1, 4)) for i in range(16)]
    graph = chain([draw.randint(1, 9) for _ in range(20)], skips=skips)
    problem = CutProblem(graph=graph, stage_slots=(StageSlot(),) * 4, chunks=1, micro_batches=2)
    short = cut_ilp.fastest(problem, most_cpu_s=0.0)
    assert short is None or not short.is_optimal
    begun_s = time.perf_counter()
    with others_have_the_machine():
        solved = cut_ilp.fastest(problem, most_cpu_s=2.0)
    assert time.perf_counter() - begun_s > 2.0
    assert solved is not None
    assert solved.is_optimal


def test_a_hundred_layers_over_sixty_four_stages() -> None:
    stage_cut = cut(
        chain([3.0, *[1.0] * 96, 4.0], saved_bytes=1.0),
        [StageSlot(in_flight=((64 - s,),), memory_bytes=200.0) for s in range(64)],
    )
    assert len(set(stage_cut.chunk_of)) == 64
    assert max(stage_cut.chunk_s) == pytest.approx(12.0)
