"""A training program of elastic ranks, as a user writes it: a fixed global batch, a state, and a line a step.

    python -m tests.ranks.elastic_training STEPS SECONDS_A_STEP [--jit] [--sleep RANK STEP SECONDS]…
        [--wait RANK STEP FILE]… [--die RANK STEP] [--hurry FILE]

`--sleep`, `--wait` (until the file is there) and `--die` are of the first generation, ahead of a step's collective.
With `--hurry`, steps have no pauses once the file is there. Prints `begin` at first,
`up GENERATION RANK SIZE STEP` when it trains, `step …` after each, and at the end the losses as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardwright import ranks

GLOBAL_BATCH = 12  # divides among 1, 2, 3 and 4 ranks


def batch_of(step: int) -> np.ndarray:
    return np.random.default_rng(step).normal(size=(GLOBAL_BATCH, 6)).astype("f")


def loss_of(params, batch):
    """The share of the batch's mean loss that these rows have."""
    hidden = jnp.tanh(batch[:, :5] @ params["a"])
    return ((hidden @ params["b"] - batch[:, 5:]) ** 2).sum() / GLOBAL_BATCH


def init_params(seed: int):
    draw = np.random.default_rng(seed)
    return {"a": draw.normal(size=(5, 8)).astype("f") / 2, "b": draw.normal(size=(8, 1)).astype("f") / 2}


optimizer = optax.adam(3e-2)
local = jax.jit(jax.value_and_grad(loss_of))


def update(params, opt_state, loss, grads):
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


@ranks.jit
def jitted_step(params, opt_state, batch):
    loss, grads = ranks.allreduce(jax.value_and_grad(loss_of)(params, batch), "sum")
    return update(params, opt_state, loss, grads)


def eager_step(params, opt_state, batch):
    loss, grads = ranks.allreduce(local(params, batch), "sum", name="gradients")
    return update(params, opt_state, loss, grads)


def curve(steps: int) -> list[float]:
    """What one process computes, with no ranks at all."""
    params = init_params(0)
    opt_state, losses = optimizer.init(params), []
    for step in range(steps):
        loss, grads = local(params, batch_of(step))
        params, opt_state, _ = update(params, opt_state, loss, grads)
        losses.append(float(loss))
    return losses


def say(*words: object) -> None:
    print(*words, f"{time.time():.3f}", os.getpid(), flush=True)


def misbehave(rank: int, step: int) -> None:
    words = sys.argv
    for at, word in enumerate(words):
        if word in ("--sleep", "--wait", "--die") and words[at + 1 : at + 3] == [str(rank), str(step)]:
            if word == "--die":
                os.kill(os.getpid(), 9)
            elif word == "--sleep":
                time.sleep(float(words[at + 3]))
            while word == "--wait" and not os.path.exists(words[at + 3]):
                time.sleep(0.05)


def main() -> None:
    steps, pause_s = int(sys.argv[1]), float(sys.argv[2])
    step_of = jitted_step if "--jit" in sys.argv else eager_step
    hurry = sys.argv[sys.argv.index("--hurry") + 1] if "--hurry" in sys.argv else ""
    say("begin")
    ranks.init()
    params = init_params(ranks.rank())  # sync makes them rank 0's
    if ranks.rank() == 0:
        params = init_params(0)
    state = ranks.elastic.State(params=params, opt_state=optimizer.init(params), step=0, losses=[])
    state.register_reset_callbacks([lambda: say("reset", ranks.generation())])

    @ranks.elastic.run
    def train(state):
        say("up", ranks.generation(), ranks.rank(), ranks.size(), state.step)
        while state.step < steps:
            if ranks.generation() == 0:
                misbehave(ranks.rank(), state.step)
            batch = batch_of(state.step)[ranks.rank() :: ranks.size()]
            state.params, state.opt_state, loss = step_of(state.params, state.opt_state, batch)
            state.losses.append(float(loss))
            state.step += 1
            say("step", ranks.generation(), ranks.rank(), ranks.size(), state.step)
            time.sleep(0 if os.path.exists(hurry) else pause_s)
            state.commit()
        return state.losses

    losses = train(state)
    say("done", json.dumps(losses))


if __name__ == "__main__":
    main()
