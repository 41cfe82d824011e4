"""Three small models with momentum: what they train, their batches, and five steps on one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardwright as sw
from examples.gpt2 import model as gpt2

OPTIMIZER = optax.sgd(0.1, momentum=0.9)
STEPS = 5


@dataclass(frozen=True, eq=False)
class Model:
    """loss: of (params, *batch). params: initial ones. batches: one a step."""

    loss: Callable[..., Any]
    params: Any
    batches: tuple[tuple[Any, ...], ...]

    def step(self, params: Any, opt_state: Any, *batch: Any) -> tuple[Any, Any, Any]:
        value, gradients = jax.value_and_grad(self.loss)(params, *batch)
        updates, opt_state = OPTIMIZER.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    @property
    def state(self) -> tuple[Any, Any]:
        return self.params, OPTIMIZER.init(self.params)

    def text(self, step: Callable[..., Any] | None = None, state: Any = None) -> str:
        """HLO text of a step, with its state donated."""
        types = jax.eval_shape(lambda: (*(state or self.state), *self.batches[0]))
        return sw.lower(step or self.step, *types, donate_argnums=(0, 1)).hlo_text

    def trained(self) -> tuple[Any, list[float]]:
        """Parameters and losses of five steps of single-device JAX."""
        step, state, losses = jax.jit(self.step), self.state, []
        for batch in self.batches:
            *state, loss = step(*state, *batch)
            losses.append(float(loss))
        return state[0], losses


def _normal(random: np.random.Generator, *shape: int, scale: float = 1.0) -> np.ndarray:
    return (random.normal(size=shape) * scale).astype(np.float32)


def _mlp() -> Model:
    random = np.random.default_rng(0)
    sizes = (2, 256, 256, 2)
    params = [
        {"weight": _normal(random, m, n, scale=(2 / m) ** 0.5), "bias": _normal(random, n, scale=0.1)}
        for m, n in pairwise(sizes)
    ]

    def loss(params: Any, points: Any, labels: Any) -> Any:
        x = points
        for layer in params[:-1]:
            x = jax.nn.relu(x @ layer["weight"] + layer["bias"])
        logits = x @ params[-1]["weight"] + params[-1]["bias"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    batches = [(_normal(random, 64, 2), random.integers(0, 2, 64).astype(np.int32)) for _ in range(STEPS)]
    return Model(loss, params, tuple(batches))


def _embedding() -> Model:
    random = np.random.default_rng(1)
    params = {"table": _normal(random, 1000, 32), "w": _normal(random, 32, 8, scale=0.2)}

    def loss(params: Any, ids: Any, y: Any) -> Any:
        return jnp.mean((params["table"][ids].mean(1) @ params["w"] - y) ** 2)

    batches = [(random.integers(0, 1000, (64, 5)).astype(np.int32), _normal(random, 64, 8)) for _ in range(STEPS)]
    return Model(loss, params, tuple(batches))


def _gpt2() -> Model:
    config = gpt2.Config(vocabulary=64, context=16, layers=1, heads=2, width=32, batch=16)
    params = jax.device_get(gpt2.init_params(config, jax.random.key(0)))

    def loss(params: Any, tokens: Any) -> Any:
        return gpt2.loss_of(params, tokens, config)

    random = np.random.default_rng(2)
    tokens = [random.integers(0, config.vocabulary, (config.batch, config.context + 1)) for _ in range(STEPS)]
    return Model(loss, params, tuple((each.astype(np.int32),) for each in tokens))


@cache
def model(name: str) -> Model:
    """A model by name: mlp, embedding or gpt2."""
    return {"mlp": _mlp, "embedding": _embedding, "gpt2": _gpt2}[name]()


@cache
def text_of(name: str) -> str:
    return model(name).text()


@cache
def trained(name: str) -> tuple[Any, list[float]]:
    return model(name).trained()
