"""Training steps whose pipelines must do nothing in a micro-batch that once a step would do: tied tables, mixed types.

Small models of `workloads.models`, each with what makes its pipelines particular. Shapes only; `arguments_of` makes
arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from workloads.cases import Case, Leaf, is_leaf, training_case
from workloads.models import gpt2, layers, llama, moe, t5, vit

Tree = Any

#: Sequences, or images, of one step.
BATCH = 16

_GPT2 = gpt2.Config(layers=2, width=64, heads=4, context=32, vocabulary=256, batch_per_device=BATCH)


def build_gpt2(*, is_tied: bool = True, is_mixed: bool = False, config: gpt2.Config = _GPT2) -> Case:
    """GPT-2, its table tied to the head or not; mixed: float32 weights, all of it computed in bfloat16."""
    params = gpt2.parameters(config)
    if not is_tied:
        params["head"] = params["token_embedding"]
    batch = {name: layers.tokens(config.batch_per_device, config.context) for name in ("inputs", "labels")}

    def loss(params: Tree, batch: Tree) -> jax.Array:
        if is_mixed:
            params = jax.tree.map(lambda weight: weight.astype(jnp.bfloat16), params)
        if is_tied:
            logits = gpt2.logits_of(params, batch["inputs"], config)
        else:
            logits = gpt2.logits_of(params, batch["inputs"], config, head=params["head"])
        return layers.cross_entropy(logits.astype(jnp.float32), batch["labels"])

    return training_case(loss, params, batch, optax.sgd(0.1, momentum=0.9))


MODELS: dict[str, Callable[[], Case]] = {
    "gpt2": build_gpt2,
    "t5": lambda: t5.build(
        "base", 1, layers=2, width=64, heads=4, hidden=128, vocabulary=256, inputs=32, targets=16,
        batch_per_device=BATCH,
    ),
    "moe": lambda: moe.build(
        "8e", 1, experts=4, layers=2, width=64, heads=4, vocabulary=256, context=32, batch_per_device=BATCH,
    ),
    "llama": lambda: llama.build(
        "1B", 1, layers=2, width=64, heads=4, kv_heads=2, hidden=128, vocabulary=256, context=32,
        batch_per_device=BATCH,
    ),
    "vit": lambda: vit.build(
        "B16", 1, layers=2, width=64, heads=4, patch=8, image=32, classes=16, batch_per_device=BATCH,
    ),
    "mixed": lambda: build_gpt2(is_mixed=True),
}  # fmt: skip


def arguments_of(case: Case) -> tuple[Tree, Tree, Tree]:
    """Arrays for a case: small weights, zero optimizer state, a batch of whole numbers below 16 and of floats."""
    random = np.random.default_rng(0)

    def weight(leaf: Leaf) -> np.ndarray:
        return (0.1 * random.standard_normal(leaf.shape)).astype(leaf.dtype)

    def data(leaf: Leaf) -> np.ndarray:
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return random.integers(0, 16, leaf.shape).astype(leaf.dtype)
        return random.standard_normal(leaf.shape).astype(leaf.dtype)

    def made(make: Callable[[Leaf], np.ndarray], tree: Tree) -> Tree:
        return jax.tree.map(make, tree, is_leaf=is_leaf)

    state = made(lambda leaf: np.zeros(leaf.shape, leaf.dtype), case.opt_state)
    return made(weight, case.params), state, made(data, case.batch)
