"""Published sizes: as many parameters as published, and plans without a server."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import optax
import pytest

import shardwright as sw
from examples.cnn import train as cnn
from examples.gpt2 import model as gpt2
from examples.llama import model as llama
from examples.moe import model as moe
from examples.wide_resnet import model as wide_resnet
from tests.examples.test_examples import output_of, run
from tests.tables import list_failing_rows

CLUSTERS = Path(__file__).resolve().parent.parent.parent / "cluster_configs"
PUBLISHED = [
    (model, preset)
    for model in (gpt2, llama, moe, wide_resnet)
    for preset in model.PRESETS
    if preset not in ("tiny", "small")
]


def parameter_count(params: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))


@pytest.mark.dear
def test_a_published_size_has_as_many_parameters() -> None:
    def check(model: Any, preset: str) -> None:
        params = jax.eval_shape(lambda key: model.init_params(model.PRESETS[preset], key), jax.random.key(0))
        billions = float(preset[:-1]) / (1000 if preset.endswith("M") else 1)
        assert parameter_count(params) / 1e9 == pytest.approx(billions, rel=0.08)

    assert list_failing_rows(check, PUBLISHED) == []


@pytest.mark.dear
def test_layers_in_a_scan_compute_what_layers_one_by_one_do() -> None:
    key = jax.random.key(0)
    tokens = jax.random.randint(key, (2, 9), 0, 256)

    def check(model: Any, **sizes: Any) -> None:
        @partial(jax.jit, static_argnums=1)
        def loss(key: jax.Array, config: Any) -> jax.Array:
            return model.loss_of(model.init_params(config, key), tokens, config)

        config = model.Config(layers=2, width=16, heads=2, context=8, batch=2, **sizes)
        assert float(loss(key, replace(config, scan=True))) == pytest.approx(float(loss(key, config)), abs=1e-5)

    check(gpt2)
    check(llama, kv_heads=1, hidden=24)


top_two = jax.jit(moe.top_two, static_argnames="capacity")


@pytest.mark.dear
def test_an_expert_takes_no_more_than_its_capacity_of_a_sequence() -> None:
    gates = jax.nn.softmax(jax.random.normal(jax.random.key(0), (3, 16, 4)))
    combine, _ = top_two(gates, capacity=5)
    assert combine.shape == (3, 16, 4, 5)
    assert int((combine > 0).sum((1, 3)).max()) == 5  # some expert is full,
    assert int((combine > 0).sum(1).max()) == 1  # no slot is taken twice,
    assert int((combine > 0).sum((2, 3)).max()) == 2  # and a token has two experts at most


@pytest.mark.dear
def test_other_sequences_do_not_change_what_an_expert_takes() -> None:
    gates = jax.nn.softmax(jax.random.normal(jax.random.key(0), (4, 16, 4)))
    together, _ = top_two(gates, capacity=5)
    apart, _ = top_two(gates[2:3], capacity=5)
    assert (together[2:3] == apart).all()


@pytest.mark.dear
@pytest.mark.parametrize(
    ("script", "options", "expected"),
    [
        (
            "gpt2/train.py",
            "--preset 345M --batch 64 --cluster {}/a100_2x8.json --mesh 16",
            "gradient of params['blocks']",
        ),
        ("gpt2/train.py", "--preset 175B --layers 8 --batch 512 --cluster {}/a100_64x8.json --mesh 64x8", "512 dev"),
        (
            "llama/train.py",
            "--preset 8B --layers 4 --batch 64 --cluster {}/h100_64x8.json --mesh 64x8 --annotate",
            "['gate']",
        ),
        (
            "moe/train.py",
            "--preset 380M --batch 64 --cluster {}/a100_2x8.json --mesh 2x8 --annotate",
            "['experts']['up']",
        ),
        ("wide_resnet/train.py", "--preset 250M --depth 14 --cluster {}/h100_64x8.json --mesh 512", "['kernel']"),
    ],
    ids=["gpt2-345M", "gpt2-175B", "llama-8B", "moe-380M", "wide_resnet-250M"],
)
def test_a_published_size_plans_without_a_server(script: str, options: str, expected: str) -> None:
    output = output_of(script, f"--plan-only {options.format(CLUSTERS)}")
    assert expected in output
    assert "memory per device" in output


@pytest.mark.dear
def test_what_cannot_be_planned_ends_in_one_message() -> None:
    child = run("gpt2/train.py", "--preset tiny --batch 2 --plan-only --cluster 1 --memory-budget 50KB")
    assert child.returncode == 1
    assert "Traceback" not in child.stderr
    assert "memory_budget: no plan" in child.stderr
    assert "--plan-only needs --cluster" in run("gpt2/train.py", "--plan-only").stderr
    assert "do not fit together" in run("gpt2/train.py", "--width 30").stderr


def test_lowered_text_keeps_annotations_and_unused_arguments() -> None:
    def step(x: jax.Array, unused: jax.Array, scale: float) -> jax.Array:
        return sw.annotate(x, {0: "data"}) * scale

    x = jax.ShapeDtypeStruct((8, 4), "float32")
    program = sw.lower(step, x, x, 2.0, donate_argnums=0, static_argnums=2, platform="cuda")
    assert [argument.name for argument in program.arguments] == ["x", "unused"]
    assert program.aliases == {0: 0}
    assert "shardwright.annotate" in program.as_text()
    with pytest.raises(sw.OptionError, match="has 3 positional parameters"):
        sw.lower(step, x, x, 2.0, donate_argnums=-5)


@pytest.mark.dear
@pytest.mark.parametrize("model", [gpt2, moe, wide_resnet], ids=["gpt2", "moe", "wide_resnet"])
def test_a_batch_of_an_example_may_be_cut_into_micro_batches(model: Any) -> None:
    config = model.PRESETS["tiny"]
    types = wide_resnet.batch_types(config) if model is wide_resnet else gpt2.batch_types(config)
    init, train_step, _ = model.make_steps(config, optax.sgd(0.1))
    program = sw.lower(train_step, *jax.eval_shape(init, jax.random.key(0)), *types, donate_argnums=(0, 1))
    plan = sw.plan(program.as_text(), 2, mesh="2", micro_batches=4, cache=False)
    assert plan.micro_batches == 4


def test_batch_norm_is_not_cut_and_the_line_is_named() -> None:
    program = sw.lower(cnn.train_step, *cnn.example_arguments(), donate_argnums=(0, 1, 2))
    line = next(n for n, text in enumerate(Path(cnn.__file__).read_text().splitlines(), 1) if "x.mean(" in text)
    with pytest.raises(sw.MicroBatchError, match=rf"train\.py:({line}|{line + 1})\b"):
        sw.plan(program.as_text(), 2, micro_batches=2, cache=False)
