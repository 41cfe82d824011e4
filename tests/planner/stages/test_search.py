"""The joint search, end to end: what it chooses, that it can be run, and what can be forced."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.clusters.cluster import Cluster
from shardwright.errors import MemoryBudgetError, MicroBatchError, OptionError, PlanError
from shardwright.options.plan_options import PlanOptions
from shardwright.planner.pipeline.build import build_pipeline, choose_pipeline
from shardwright.planner.planning import plan_step, single_program_options
from shardwright.planner.search.program import Program
from shardwright.planner.stages.choose import search_pipeline
from shardwright.planner.stages.device_groups import device_groups, enumerate_groupings
from shardwright.planner.stages.types import PipelineChoice, PipelineRequest
from shardwright.planner.stages.weight_gradients import find_weight_gradients
from tests.planner.pipeline.planned import assert_follows_jax
from tests.planner.programs import lower
from tests.planner.stages.stage_programs import (
    BATCH,
    bare_scan,
    branches,
    dense,
    program,
    scanned,
    split_and_parts,
    typed_scan,
)


def nodes(*devices: int, slow: bool = True) -> Cluster:
    """CPU nodes of so many devices; between them a link that is as slow as Ethernet."""
    text: dict[str, Any] = {"master": {"ip": "127.0.0.1", "port": 1000, "devices": devices[0]}}
    text["workers"] = [{"ip": "127.0.0.1", "port": 1001 + i, "devices": n} for i, n in enumerate(devices[1:])]
    if slow:
        text["links"] = {"inter_node": {"bandwidth_gb_per_s": 1.0, "latency_us": 50}}
    return Cluster.from_json(json.dumps(text))


def choose_plan(name: str, cluster: Cluster, **request: Any) -> PipelineChoice:
    return search_pipeline(program(name), cluster, PipelineRequest(**request))


# ---- it runs --------------------------------------------------------------------


@pytest.mark.dear
@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("remat", "1f1b"), ("scanned", "interleaved"), ("branches", "gpipe"), ("bare scan", "1f1b"),
        ("dense", "zero-bubble"),
    ],
)  # fmt: skip
def test_chosen_pipelines_follow_jax(name: str, schedule: str) -> None:
    outcome = {
        "dense": lambda: dense(2),
        "remat": lambda: dense(2, remat=True),
        "scanned": scanned,
        "branches": branches,
        "bare scan": bare_scan,
    }[name]()
    options = PlanOptions(stages=2, micro_batches=4, schedule=schedule)
    text, cluster = lower(outcome), Cluster.local(4)
    searched = choose_pipeline(text, cluster, options)
    result, plan = searched.choice, build_pipeline(text, cluster, options, searched)
    assert len(plan.stages) == 2
    assert_follows_jax(outcome, plan, steps=2)
    # What was counted before there were programs.
    assert result.step_s == pytest.approx(plan.step_s, rel=0.25)
    for counted, stage in zip(result.memory_bytes, plan.stages, strict=True):
        assert counted == pytest.approx(stage.memory.peak_bytes, rel=0.35)


def test_scanned_layers_are_cut_by_rows() -> None:
    result = choose_plan("scanned", Cluster.local(6), stages=3, micro_batches=4, schedule="1f1b")
    loops = [i for i in result.module.entry if i.opcode == "while"]
    assert sorted(result.chunk_of[loop.name] for loop in loops) == [0, 0, 1, 1, 2, 2]
    rows = {(piece.start, piece.stop) for piece in result.arguments if piece.start is not None}
    ends = sorted(stop for _, stop in rows if stop is not None)
    assert len(rows) == 3
    assert ends[-1] == 6
    assert result.imbalance < 0.5


def test_rows_of_layers_are_not_split_over_an_axis() -> None:
    """A stage has some of them only, however many devices the axis has."""
    result = choose_plan("bare scan", Cluster.local(4), stages=2, micro_batches=2, mesh={"data": 2}, schedule="1f1b")
    stacked = [v for v in result.stage_plans[0].parameters if v.shape[:1] == (6,)]
    assert len(stacked) == 6
    assert all(variable.sharding.dims[0] == () for variable in stacked)


@pytest.mark.dear
def test_the_same_choice_whatever_the_hash_seed(tmp_path: Path) -> None:
    (tmp_path / "step.hlo").write_text(lower(dense(2, tied=True)))
    script = (
        "import sys; from shardwright.options.plan_options import PlanOptions\n"
        "from shardwright.clusters.cluster import Cluster\n"
        "from shardwright.planner.pipeline.build import choose_pipeline\n"
        "options = PlanOptions(stages=2, micro_batches=4)\n"
        "found = choose_pipeline(open(sys.argv[1]).read(), Cluster.local(4), options).choice\n"
        "print(sorted(found.chunk_of.items()), found.step_s, found.memory_bytes, found.candidates)"
    )
    answers = {
        subprocess.run(
            [sys.executable, "-c", script, str(tmp_path / "step.hlo")],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(answers) == 1


# ---- what is chosen ----------------------------------------------------------------


def test_the_fastest_candidate_is_taken_and_all_are_told() -> None:
    result = choose_plan("dense", Cluster.local(8))
    priced = [each for each in result.candidates if each.step_s is not None and each.note == ""]
    assert result.step_s == min(each.step_s for each in priced)
    assert {each.stages for each in result.candidates} == {2, 4, 8}
    assert {each.schedule for each in result.candidates} == {"1f1b", "interleaved", "zero-bubble", "2f2b", "gpipe"}
    assert len({each.micro_batches for each in result.candidates}) > 1
    assert result.step_s >= max(result.stage_s)
    assert result.bubble_fraction == pytest.approx(1 - sum(result.stage_s) / len(result.stage_s) / result.step_s)


def test_zero_bubble_is_taken_where_it_pays() -> None:
    """Gradients of variables are a good part of the backward pass here."""
    result = choose_plan("dense", Cluster.local(2), stages=2, micro_batches=4)
    seconds = {each.schedule: each.step_s for each in result.candidates if each.note == "" and each.step_s is not None}
    assert seconds["zero-bubble"] < seconds["1f1b"] * 0.98
    assert result.schedule == min(seconds, key=lambda schedule: seconds[schedule])
    (compared,) = (note for note in result.notes if note.startswith("schedules of this cut"))
    assert all(f"{schedule} " in compared for schedule in seconds)


def test_a_loop_over_layers_is_not_delayed() -> None:
    _, coarse = split_and_parts("scanned")
    later = find_weight_gradients(coarse)
    names = {coarse.flow.nodes[i].instruction.opcode for i in later.nodes}
    assert "dot" in names  # the head's
    assert "while" not in names
    assert {leaf[0] for leaf in later.read}.isdisjoint(later.nodes)


def test_groups_lie_inside_nodes() -> None:
    cluster = nodes(4, 4)
    groups = {count: device_groups(cluster, count) for count in (2, 3, 4, 8)}
    assert groups[3] is None
    assert groups[4] is not None
    assert groups[4].first_devices == (0, 2, 4, 6)
    assert groups[4].nodes == ((2,),) * 4
    within, between = groups[4].link(0, 1), groups[4].link(1, 2)
    assert within.bandwidth_bytes_per_s > between.bandwidth_bytes_per_s == 1e9
    result = choose_plan("dense", cluster, stages=2, micro_batches=4)
    assert [group.first_device for group in result.groups] == [0, 4]


def test_unequal_nodes_are_stages_of_their_own() -> None:
    result = choose_plan("dense", nodes(4, 2, slow=False), stages=2, micro_batches=4, mesh=None)
    assert [group.mesh.device_count for group in result.groups] == [4, 2]
    assert len(set(result.chunk_of.values())) == 2


def mixed() -> Cluster:
    """Two A100 nodes of eight and one H100 node of four GPUs."""
    node = {"ip": "127.0.0.1", "gpu_ids": list(range(8))}
    last = {**node, "port": 3, "gpu_ids": [0, 1, 2, 3], "hardware": "h100"}
    return Cluster.from_json(json.dumps({"master": {**node, "port": 1}, "workers": [{**node, "port": 2}, last]}))


def test_groups_of_nodes_that_differ() -> None:
    entries = {count: device_groups(mixed(), count) for count in (1, 2, 3, 4, 5, 6)}
    assert entries[1] is None
    assert {count: groups.nodes for count, groups in entries.items() if groups is not None} == {
        2: ((8, 8), (4,)),
        3: ((8,), (8,), (4,)),
        4: ((8,), (8,), (2,), (2,)),
        5: ((4,), (4,), (4,), (4,), (4,)),
        6: ((4,), (4,), (4,), (4,), (2,), (2,)),
    }
    assert entries[5] is not None
    assert [kind.hardware for kind in entries[5].kinds] == ["a100", "h100"]
    assert entries[5].kind(4) == 1
    assert [part.hardware for part in entries[5].parts] == ["a100"] * 4 + ["h100"]
    assert entries[5].link(0, 1).bandwidth_bytes_per_s > entries[5].link(3, 4).bandwidth_bytes_per_s


def test_work_follows_the_speed_of_what_stages_have() -> None:
    """Twelve equal layers: an H100 has twice the speed of an A100 and gets twice as many."""
    node = {"ip": "127.0.0.1", "port": 1, "gpu_ids": [0]}
    nodes = {"master": node, "workers": [{**node, "port": 2, "hardware": "h100"}]}
    searched = Program(lower(typed_scan(layers=12, width=2048, batch=8192)), PlanOptions())
    result = search_pipeline(
        searched, Cluster.from_json(json.dumps(nodes)), PipelineRequest(stages=2, micro_batches=4, schedule="1f1b")
    )
    assert {(piece.start, piece.stop) for piece in result.arguments if piece.start is not None} == {(0, 4), (4, 12)}
    slow_s, fast_s = (plan.cost.compute_s for plan in result.stage_plans)
    assert slow_s > 1.9 * fast_s


def test_nodes_that_do_not_suit_are_left_over() -> None:
    result = enumerate_groupings(nodes(*[1] * 10), 9, batch=16)
    assert all(each.devices >= 9 for each in result)
    assert all(16 % len(each.nodes[0]) == 0 for each in result)


def test_memory_is_a_constraint_of_every_stage() -> None:
    free = choose_plan("scanned", Cluster.local(4), stages=2, micro_batches=4, schedule="gpipe")
    limit = int(max(free.memory_bytes) * 0.98)
    tight = search_pipeline(
        replace_budget(limit), Cluster.local(4), PipelineRequest(stages=2, micro_batches=4, schedule="1f1b")
    )
    assert max(tight.memory_bytes) <= limit
    with pytest.raises(MemoryBudgetError, match="no pipeline fits the memory"):
        search_pipeline(replace_budget(1000), Cluster.local(4), PipelineRequest(stages=2, micro_batches=4))


def replace_budget(limit: int) -> Any:
    result = program("scanned").rewrite_variant(None, 1)
    result.options = replace(result.options, memory_budget=limit)
    return result


@pytest.mark.dear
def test_why_a_pipeline_does_not_pay() -> None:
    cluster = Cluster.local(4)
    result = search_pipeline(program("dense"), cluster, PipelineRequest(stages=2, micro_batches=4), whole_s=1e-9)
    assert result.notes[0].startswith("no pipeline pays: the best one, of 2 stages")
    result = search_pipeline(program("dense"), cluster, PipelineRequest(stages=2, micro_batches=4), whole_s=1.0)
    assert "one program on all devices" in result.notes[0]
    assert "% of the time stages wait" in result.notes[0]


def test_one_program_on_very_many_devices_is_planned_on_one_mesh() -> None:
    many, few = nodes(*[8] * 32), nodes(*[8] * 31)
    result = single_program_options(many, PlanOptions())
    assert (result.mesh, result.remat, result.micro_batches) == ({"data": 32, "model": 8}, "none", 1)
    assert single_program_options(few, PlanOptions()) == PlanOptions()
    assert (
        single_program_options(Cluster.local(512), PlanOptions()) == PlanOptions()
    )  # no pipeline is looked for on one node
    for asked in (PlanOptions(stages=1), PlanOptions(effort="best"), PlanOptions(mesh={"data": 256})):
        assert single_program_options(many, asked) is asked


# ---- what can be forced ----------------------------------------------------------------


def test_everything_can_be_forced() -> None:
    result = choose_plan(
        "dense", Cluster.local(8), stages=2, micro_batches=2, schedule="gpipe", mesh={"a": 2, "b": 2}, imbalance=0.6
    )
    assert (result.stages, result.micro_batches, result.schedule) == (2, 2, "gpipe")
    assert {str(group.mesh) for group in result.groups} == {"a=2 × b=2"}
    assert result.imbalance <= 0.6


@pytest.mark.dear
def test_arrays_that_lie_already_are_kept_where_they_lie() -> None:
    result = dense(2)
    text, weight, batch = lower(result), 0, 26
    options = PlanOptions(stages=2, micro_batches=2, mesh={"data": 2}, schedule="1f1b")
    for axes in ((("data",), ()), ((), ("data",))):
        plan = plan_step(text, Cluster.local(4), replace(options, argument_axes={weight: axes}))
        assert [e.variable.sharding.dims for e in plan.arguments if e.argument == weight] == [axes]
    with pytest.raises(OptionError, match="carries the batch"):
        plan_step(text, Cluster.local(4), replace(options, argument_axes={batch: (("data",),)}))
    stacked = replace(options, argument_axes={2: (("data",), (), ())})
    with pytest.raises(OptionError, match="row for every layer"):
        plan_step(lower(scanned()), Cluster.local(4), stacked)
    with pytest.raises(OptionError, match="needs mesh"):
        plan_step(text, Cluster.local(4), replace(options, mesh=None, argument_axes={weight: ((), ())}))


def test_an_evaluation_is_cut_too() -> None:
    weights = [np.ones((16, 16), np.float32)] * 4

    def loss(weights: Any, x: Any) -> Any:
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2), x.sum(-1)

    text = jax.jit(loss).lower(weights, np.ones((64, 16), np.float32)).as_text("hlo", debug_info=True)
    result = search_pipeline(Program(text, PlanOptions()), Cluster.local(2), PipelineRequest(stages=2, micro_batches=2))
    assert sorted(chunk for name, chunk in result.chunk_of.items() if name.startswith("dot")) == [0, 0, 1, 1]
    without = (
        jax.jit(lambda *arguments: loss(*arguments)[1]).lower(weights, np.ones((64, 16), np.float32)).as_text("hlo")
    )
    with pytest.raises(PlanError, match="no pass to cut"):
        search_pipeline(Program(without, PlanOptions()), Cluster.local(2), PipelineRequest(stages=2))


def test_what_cannot_be() -> None:
    with pytest.raises(OptionError, match="make no 3 groups"):
        choose_plan("dense", Cluster.local(8), stages=3)
    with pytest.raises(MicroBatchError, match="do not divide"):
        choose_plan("dense", Cluster.local(8), stages=2, micro_batches=BATCH + 1)
    with pytest.raises(OptionError, match="a stage 4"):
        choose_plan("dense", Cluster.local(8), stages=2, mesh={"a": 8})
    with pytest.raises(PlanError, match="as balanced as imbalance=0 asks"):
        choose_plan("dense", Cluster.local(8), stages=2, micro_batches=2, schedule="1f1b", imbalance=0.0)
