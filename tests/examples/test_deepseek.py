"""The model like DeepSeek's: both forms of its experts agree, its bias balances, and it trains through a session."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import islice

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples.common import text
from examples.moe import deepseek
from tests.examples.example_runs import losses_in, output_of

TINY = deepseek.PRESETS["tiny"]
STEPS = 6


@pytest.mark.dear
def test_published_sizes_have_their_parameters() -> None:
    """15.7 and 671 billion, as DeepSeek-AI counts them."""
    counts = {}
    for name in ("16B", "671B"):
        config = deepseek.PRESETS[name]
        params = jax.eval_shape(lambda key, config=config: deepseek.init_params(config, key), jax.random.key(0))
        counts[name] = sum(leaf.size for leaf in jax.tree.leaves(params)) / 1e9
    assert counts == pytest.approx({"16B": 15.7, "671B": 671.0}, rel=1e-3)


@pytest.mark.dear
def test_onehot_experts_with_room_for_all_are_ragged_ones() -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    params = deepseek.init_params(TINY, keys[0])
    tokens = jax.random.randint(keys[1], (4, TINY.context + 1), 0, TINY.vocabulary)

    def gradients(config: deepseek.Config) -> object:
        return jax.jit(jax.grad(lambda params: deepseek.losses_of(params, tokens, config)[0]))(params)

    roomy = replace(TINY, form="onehot", capacity_factor=TINY.experts / TINY.active)
    assert roomy.capacity == TINY.context
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6), gradients(TINY), gradients(roomy))


@pytest.mark.dear
def test_ragged_experts_are_each_token_through_its_own() -> None:
    """Against a loop over pairs of token and expert."""
    keys = jax.random.split(jax.random.key(0), 4)
    p = deepseek.init_params(TINY, keys[0])["blocks"][0]
    x = jax.random.normal(keys[1], (1, 8, TINY.width))
    chosen, weights = deepseek.route(p, jnp.zeros(TINY.experts), x, TINY)
    expected = jnp.zeros((8, TINY.width))
    for token in range(8):
        for slot in range(TINY.active):
            e, row = chosen[0, token, slot], x[0, token]
            hidden = jax.nn.silu(row @ p["gate"][e]) * (row @ p["up"][e])
            expected = expected.at[token].add(weights[0, token, slot] * (hidden @ p["down"][e]))
    assert jnp.allclose(deepseek.ragged_experts(p, x, chosen, weights, TINY)[0], expected, atol=1e-6)


@pytest.mark.dear
def test_the_bias_moves_toward_experts_with_few_tokens_and_weighs_nothing() -> None:
    init, train_step, _ = deepseek.make_steps(TINY, optax.sgd(0.0))
    params, state = init(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (4, TINY.context + 1), 0, TINY.vocabulary)
    _, loads = deepseek.losses_of(params, tokens, TINY)
    assert loads.sum() == 4 * TINY.context * TINY.active
    new, _, _ = train_step(params, state, tokens)
    assert jnp.array_equal(jnp.sign(new["routing_bias"]), jnp.sign(loads.mean() - loads))
    x = jax.random.normal(jax.random.key(2), (1, 4, TINY.width))
    p = params["blocks"][0]
    chosen, weights = deepseek.route(p, jnp.zeros(TINY.experts), x, TINY)
    moved, same = deepseek.route(p, jnp.full(TINY.experts, 3.0), x, TINY)
    assert jnp.array_equal(chosen, moved)
    assert jnp.array_equal(weights, same)


@pytest.mark.cluster
@pytest.mark.parametrize("form", deepseek.FORMS)
def test_it_trains_through_a_session_as_on_one_device(form: str) -> None:
    options = f"--preset tiny --form {form} --steps {STEPS} --learning-rate 1e-2 --devices 4 --stages 1"
    output = output_of("moe/train_deepseek.py", f"{options} --micro-batches 1")
    init, train_step, _ = deepseek.make_steps(replace(TINY, form=form), optax.adamw(1e-2))
    step, state, losses = jax.jit(train_step), jax.jit(init)(jax.random.key(0)), []
    training, _ = text.split(text.standard_library_text())
    for (tokens,) in islice(text.batches(training, TINY.batch, TINY.context), STEPS):
        *state, loss = step(*state, tokens)
        losses.append(float(loss))
    assert losses[-1] < 0.95 * losses[0]
    assert losses_in(output) == pytest.approx([losses[0], losses[-1]], abs=2e-3)
