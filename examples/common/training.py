"""Training loop of the larger examples: state on the servers, progress, checkpoints, a trace."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import jax

import shardwright as sw
from examples.common.progress import TrainingProgress

#: The step of `--trace`: the first ones include compilation and initialization.
_TRACED_STEP = 3


def train(
    session: sw.Session,
    step: Any,
    init: Callable[[jax.Array], tuple[Any, Any]],
    data: Iterator[tuple[Any, ...]],
    arguments: argparse.Namespace,
    *,
    examples_per_step: int,
    unit: str,
) -> Any:
    """Run `params, opt_state, loss = step(params, opt_state, *batch)` up to `--steps`; returns the parameters.

    `--checkpoint-dir` saves the state; `--resume` continues from it, also on other devices or under another plan.
    """
    folder, traced = arguments.checkpoint_dir, arguments.trace
    with TrainingProgress(arguments.steps, examples_per_step, unit) as progress:
        params, opt_state = step.init(init, jax.random.key(arguments.seed))  # born on the servers, sharded
        done = max(session.checkpoints(folder), default=0) if arguments.resume else 0
        if done:
            params, opt_state = step.restore(folder, like=(params, opt_state))  # then they are never made
            progress.go_on_after(done)
        for number, batch in enumerate(islice(data, done, arguments.steps), done + 1):
            if traced and number == min(done + _TRACED_STEP, arguments.steps):
                params, opt_state, loss = step.trace(traced, params, opt_state, *batch)
            else:
                params, opt_state, loss = step(params, opt_state, *batch)  # the first call plans and compiles
            progress.step(loss)
            if folder and (number % arguments.checkpoint_every == 0 or number == arguments.steps):
                step.save((params, opt_state), folder, step=number, max_to_keep=2)  # written while it trains
    if done >= arguments.steps:
        print(f"the checkpoint in {folder} is of step {done}: nothing was left to train")
    elif traced:
        print(f"trace of a step: {traced}, for ui.perfetto.dev")
    return params
