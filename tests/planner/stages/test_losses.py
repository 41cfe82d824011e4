"""The cut depends on neither the order of results, nor on which there are, nor on how the loss is written."""

from __future__ import annotations

from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shardwright.clusters.cluster import Cluster
from shardwright.hlo import parse
from shardwright.options.plan_options import PlanOptions
from shardwright.planner.microbatch import split_step
from shardwright.planner.pipeline.build import build_pipeline, choose_pipeline
from shardwright.planner.stages.clustering import Clustering, cluster_step
from tests.planner.pipeline.planned import assert_follows_jax
from tests.planner.programs import lower
from tests.planner.stages.losses import LAYERS, LOSSES, RESULTS, classifier, without_names
from tests.planner.stages.stage_programs import normal
from tests.planner.stages.test_coarse import assert_values_go_one_way
from tests.tables import list_failing_rows


def parts_of(text: str) -> Clustering:
    split = split_step(parse(text))
    once = {name for name, parts in split.parts.items() if parts == {"once"}}
    arguments = sum(len(parameter.shape.leaves) for parameter in split.module.entry.parameters)
    return cluster_step(split.module, set(range(arguments)).difference(split.batch), once)


def part_of_arguments(coarse: Clustering) -> list[int]:
    return [coarse.first[node] for node in coarse.flow.parameters]


def per_layer(coarse: Clustering) -> list[int]:
    """How many products each part holds, of parts that hold a layer."""
    dots = [node.index for node in coarse.flow.nodes if node.instruction.opcode == "dot"]
    counts = [sum(coarse.first[i] == part for i in dots) for part in range(len(coarse.parts))]
    return [count for count in counts if count]


def test_losses_leave_a_part_to_each_layer() -> None:
    """Its product, and the two of its gradients; the first layer's input has none."""

    def check(loss: str) -> None:
        coarse = parts_of(lower(classifier(loss)))
        assert_values_go_one_way(coarse)
        assert per_layer(coarse) == [2, *[3] * LAYERS]

    assert list_failing_rows(check, zip(LOSSES)) == []


@pytest.mark.dear
def test_results_decide_nothing() -> None:
    """Arguments lie where they lie for the loss alone, with JAX's name stack and without."""
    expected = part_of_arguments(parts_of(lower(classifier(results="loss, accuracy"))))
    labels = len(expected) - 1  # the loss reads them last, the accuracy not at all

    def check(results: str, has_names: bool) -> None:
        text = lower(classifier(results=results))
        coarse = parts_of(text if has_names else without_names(text))
        assert_values_go_one_way(coarse)
        assert per_layer(coarse) == [2, *[3] * LAYERS]
        assert part_of_arguments(coarse)[:labels] == expected[:labels]

    assert list_failing_rows(check, product(RESULTS, (True, False))) == []


def adversarial() -> Any:
    """The loss is made of a gradient itself: the forward pass is all that leads to it."""

    def loss(p: Any, x: Any) -> Any:
        return jnp.mean(jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]) ** 2)

    def step(p: Any, x: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(p, x + 0.01 * jnp.sign(jax.grad(loss, 1)(p, x)))
        return jax.tree.map(lambda a, g: a - 0.1 * g, p, gradients), norm(gradients), value

    return step, ({"a": normal(1, 16, 16), "b": normal(2, 16, 16)}, normal(3, 32, 16)), (0,)


def norm(tree: Any) -> Any:
    return jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree)))


@pytest.mark.dear
@pytest.mark.parametrize(
    ("case", "schedule"),
    [
        (classifier("optax", "many"), "1f1b"),
        (classifier("optax", "accuracy, loss"), "interleaved"),
        (classifier("take_along_axis", "gradient norm"), "zero-bubble"),
        (classifier("masked", "nothing"), "2f2b"),
        (adversarial(), "gpipe"),
    ],
    ids=["many", "accuracy first", "norm only", "no result", "adversarial"],
)
def test_pipelines_follow_jax(case: Any, schedule: str) -> None:
    text, cluster = lower(case), Cluster.local(2)
    options = PlanOptions(stages=2, micro_batches=4, schedule=schedule)
    plan = build_pipeline(text, cluster, options, choose_pipeline(text, cluster, options))
    assert_follows_jax(case, plan, steps=2)


@pytest.mark.parametrize("has_names", [True, False])
def test_the_stages_are_the_same_in_every_order_of_results(has_names: bool) -> None:
    result = []
    for results in ("gradient norm, loss", "loss, gradient norm"):
        text = lower(classifier(results=results))
        text = text if has_names else without_names(text)
        choice = choose_pipeline(text, Cluster.local(2), PlanOptions(stages=2, micro_batches=4)).choice
        chunks = sorted(
            (i.opcode, str(i.shape), choice.chunk_of[i.name]) for i in parse(text).entry if i.opcode == "dot"
        )
        result.append((chunks, choice.crossing_bytes, choice.memory_bytes))
    assert result[0] == result[1]
