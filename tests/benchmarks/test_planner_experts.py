"""The experts' side of the planner benchmark: what is frozen, and how an expert lays parameters out."""

from __future__ import annotations

import json
import math
from math import prod

import jax
import numpy as np
import pytest

from benchmarks.planner import frozen
from benchmarks.planner.experts.plans import build_experts
from benchmarks.planner.experts.rules import DoesNotApply, Expert, lower, parameter_spec, spec_of
from benchmarks.planner.judge import MACHINES
from benchmarks.planner.rank import spearman
from benchmarks.planner.report import misses_the_bar
from benchmarks.planner.suite import JUDGED, QUICK, UNSEEN, cluster_json, entries, matches_name
from shardwright.clusters.cluster import Cluster
from workloads.cases import Leaf
from workloads.every_model import EVERY_MODEL
from workloads.models import gpt2
from workloads.models.registry import MODELS

FROZEN = [entry for entry in entries() if frozen.is_frozen(entry)]
TINY = {"layers": 1, "width": 64, "heads": 4, "context": 16, "vocabulary": 65}


@pytest.mark.parametrize("entry", FROZEN, ids=lambda entry: entry.name)
def test_frozen_experts_are_of_the_slice_that_is_judged(entry):
    experts = frozen.read(entry)
    assert experts.keys() <= build_experts(MODELS[entry.model], entry.devices).keys()
    for figures in experts.values():
        assert figures["memory_bytes"] > 0
        assert frozen.step_s(figures) > 0
        sent = sum(sent for _, sent in figures["collectives"].values())
        assert sent == pytest.approx(figures["wire_bytes"], abs=99)


@pytest.mark.parametrize("machine", sorted({entry.machine for entry in FROZEN}))
def test_writing_what_was_read_gives_the_same_bytes(machine):
    result = frozen.machine_path(machine).read_bytes()
    cases = frozen.read_machine(machine)
    assert frozen.compress_cases(dict(reversed(cases.items()))) == result
    assert cases == {name: json.loads(frozen.format_case(case)) for name, case in cases.items()}


def test_every_quick_case_is_a_case_with_experts():
    assert {entry.name for entry in entries()} >= set(QUICK)
    unfrozen = [entry for entry in entries() if entry.name in QUICK and entry not in FROZEN]
    for entry in unfrozen:
        with pytest.raises(frozen.NotFrozen, match=entry.name):
            frozen.read(entry)


def test_cases_have_names_of_their_own():
    names = [entry.name for entry in entries()]
    assert len(set(names)) == len(names)
    assert {"gpt2-124M-8", "gpt2-124M-8-b32", "gpt2-124M-8-h100", "gpt2-124M-8-cpu", "llama-7B-64"} < set(names)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("gpt2-124M-8", 1), ("gpt2-124M-8-b", 3), ("lstm", 5), ("mixtral", 0)],
    ids=["a case", "several", "a model", "of another suite"],
)
def test_a_name_is_a_case_or_how_cases_begin(name, expected):
    assert sum(matches_name(entry, name) for entry in entries()) == expected


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([1, 2, 3, 4], [10, 20, 30, 40], 1.0),
        ([1, 2, 3, 4], [4, 3, 2, 1], -1.0),
        ([1, 2, 3], [1, 3, 2], 0.5),
        ([1, 1, 2, 3], [1, 2, 3, 4], 0.9486832980505138),  # ranks 1.5, 1.5, 3, 4
    ],
)
def test_rank_correlation(first, second, expected):
    assert spearman(first, second) == pytest.approx(expected)


def test_every_model_has_a_case():
    assert {model for model, _ in JUDGED} == set(MODELS)


@pytest.mark.dear
@pytest.mark.parametrize("entry", UNSEEN, ids=lambda entry: entry.name)
def test_an_unseen_model_is_a_step_that_hands_its_state_on(entry):
    case = EVERY_MODEL[entry.model].build(entry.size, entry.devices)
    params, opt_state, _ = jax.eval_shape(case.step, *case.avals)
    results = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves((params, opt_state))]
    assert results == [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(case.avals[:2])]


@pytest.mark.parametrize("entry", UNSEEN, ids=lambda entry: entry.name)
def test_experts_use_all_devices(entry):
    result = build_experts(EVERY_MODEL[entry.model], entry.devices)
    assert {"data", "zero1", "zero3"} < result.keys()
    assert {prod(expert.mesh.values()) for expert in result.values()} == {entry.devices}


def test_gpt2_experts_move_the_bytes_that_were_measured_elsewhere():
    """Ring sums by hand: 498 MB of parameters, 154 MB of them embedding, whose two gradients are reduced apart.

    All but the embedding's are combined, up to 30 MiB each.
    """
    (entry,) = [entry for entry in entries() if entry.name == "gpt2-124M-8"]
    parameters, embedding = 124_439_808 * 4, 50257 * 768 * 4
    wire = {name: figures["wire_bytes"] for name, figures in frozen.read(entry).items()}
    assert wire["data"] == pytest.approx(2 * 7 / 8 * (parameters + embedding), rel=0.001)
    assert wire["zero1"] == pytest.approx(2 * 7 / 8 * parameters, rel=0.01)
    issued = {name: frozen.count_collectives(figures) for name, figures in frozen.read(entry).items()}
    assert issued["data"] <= 2 + math.ceil((parameters - embedding) / (28 * 2**20))
    assert issued["zero1"] < 20


def test_the_planners_input_has_no_shardings():
    text = gpt2.build("124M", 8, **TINY).lower().as_text("hlo")
    assert "harding" not in text


def test_an_experts_program_has_them():
    data = Expert(mesh={"data": 8}, activations={"batch": ("data",)})
    text = lower(gpt2.build("124M", 8, **TINY), data, jax.devices()).as_text()
    assert text.count("sdy.sharding_constraint") >= 5


def test_the_same_step_whatever_the_layout_of_its_projections():
    """Stacked q, k and v are the fused ones reshaped: the expert computes what the planner's input does."""
    fused, apart = (gpt2.Config(layers=1, width=64, heads=4, context=16, vocabulary=65, fused=f) for f in (True, False))
    random = np.random.default_rng(0)
    leaves, tree = jax.tree.flatten(gpt2.parameters(fused), is_leaf=lambda leaf: isinstance(leaf, Leaf))
    params = jax.tree.unflatten(tree, [random.normal(size=leaf.shape).astype("float32") for leaf in leaves])
    tokens = random.integers(0, 65, (2, 16))
    logits_of = jax.jit(gpt2.logits_of, static_argnums=2)
    expected = logits_of(params, tokens, fused)
    qkv = params["blocks"][0]["attention"]["qkv"]
    params["blocks"][0]["attention"]["qkv"] = {
        "weight": qkv["weight"].reshape(64, 3, 64),
        "bias": qkv["bias"].reshape(3, 64),
    }
    assert np.allclose(logits_of(params, tokens, apart), expected, rtol=1e-4, atol=1e-4)


def test_a_rule_that_must_divide_and_does_not_is_refused():
    with pytest.raises(DoesNotApply, match="heads of 25"):
        spec_of((8, 25), ("batch", "heads"), {"heads": ("model",)}, {"data": 4, "model": 2})


def test_a_vocabulary_stays_whole_in_a_parameter_and_is_padded_inside():
    rules, mesh = {"vocabulary": ("model",)}, {"model": 2}
    assert spec_of((65,), ("vocabulary",), rules, mesh) == [()]
    assert spec_of((65,), ("vocabulary",), rules, mesh, padded=("vocabulary",)) == [("model",)]


@pytest.mark.parametrize(
    ("leaf", "expected"),
    [
        (Leaf((1024, 4096), ("embed", "mlp")), [("data",), ("model",)]),
        (Leaf((12, 1024, 4096), ("layers", "embed", "mlp")), [(), ("data",), ("model",)]),
        (Leaf((4096,), ("mlp",)), [("model",)]),
        (Leaf((3, 5), (None, None)), [(), ()]),
        (Leaf((64, 512), (None, None)), [(), ("data",)]),
    ],
)
def test_state_is_sharded_over_one_dimension_more(leaf, expected):
    expert = Expert(mesh={"data": 4, "model": 2}, activations={}, parameters={"mlp": ("model",)})
    assert parameter_spec(leaf, expert, ("data",)) == expected


@pytest.mark.parametrize("machine", MACHINES)
def test_the_planner_is_told_of_the_judges_links(machine):
    cluster = Cluster.from_json(cluster_json(16, machine))
    assert [node.device_count for node in cluster.nodes] == [8, 8]
    assert cluster.hardware == machine
    assert cluster.inter_node is not None
    assert 8 * cluster.inter_node.bandwidth_bytes_per_s == MACHINES[machine].node_ports


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, False), ({"ours_s": 1.02}, True), ({"ours_s": 0.5}, False), ({"fits": False}, True), ({"error": "x"}, True)],
)
def test_what_misses_the_bar(changes, expected):
    seconds = changes.pop("ours_s", 1.005)
    outcome = {
        "machine": "a100",
        "ours": {"product_s": 0.5, "memory_s": 0.0, "communication_s": seconds - 0.5},
        "expert": {"product_s": 0.5, "memory_s": 0.2, "communication_s": 0.3},
        "fits": True,
        **changes,
    }
    assert misses_the_bar(json.loads(json.dumps(outcome))) is expected
