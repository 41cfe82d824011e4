"""Train a byte-level GPT-2 on the sources of Python's standard library.

    python examples/gpt2/train.py --explain
    python examples/gpt2/train.py --checkpoint-dir runs/gpt2 --resume
    python examples/gpt2/train.py --preset 175B --plan-only --cluster cluster_configs/a100_64x8.json

With SERVER_IP and SERVER_PORT set, the step runs on that server; else an embedded
server with eight CPU devices is started for the run. The model (model.py) is written
for one device; only the numbered lines below, and the loop in common/training.py, know
about Shardwright.
"""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path

import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that a script finds the other examples

import shardwright as sw
from examples.common.annotated import annotate_step
from examples.common.options import (
    example_parser,
    parse_arguments,
    planning_options,
    run_example,
    select_config,
    show_plan,
)
from examples.common.text import batches, split, standard_library_text
from examples.common.training import train
from examples.gpt2.model import PRESETS, batch_types, make_steps

_EVALUATION_BATCHES = 4

#: What `--annotate` pins, the layout of Megatron-LM (Shoeybi et al., 2019): columns of the projections into heads and
#: hidden units, rows of those back. All else is searched.
MEGATRON = {
    "['qkv']['weight']": {-1: "model"},
    "['attention']['output']['weight']": {-2: "model"},
    "['up']['weight']": {-1: "model"},
    "['down']['weight']": {-2: "model"},
}


def main() -> None:
    parser = example_parser(__doc__, PRESETS, default="small", steps=200)
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="default: 0.002")
    arguments = parse_arguments(parser)
    config = select_config(PRESETS, arguments)
    init, train_step, eval_step = make_steps(config, adamw(arguments.learning_rate, arguments.steps))
    if arguments.annotate:
        train_step = annotate_step(train_step, MEGATRON)
    if arguments.plan_only:
        show_plan(train_step, init, batch_types(config), arguments)
        return

    training, validation = split(standard_library_text())
    data = batches(training, config.batch, config.context, arguments.seed)
    with sw.connect(devices=arguments.devices) as session:  # Shardwright 1: a server
        step = session.parallelize(train_step, donate_argnums=(0, 1), **planning_options(arguments))  # 2: was jax.jit
        params = train(  # 3: the loop; parameters are born on the servers, sharded
            session, step, init, data, arguments, examples_per_step=config.batch * config.context, unit="tokens"
        )
        evaluate = session.parallelize(eval_step)  # 4: another function over the same parameters
        held_out = batches(validation, config.batch, config.context, seed=1)
        scores = [float(evaluate(params, tokens)) for (tokens,) in islice(held_out, _EVALUATION_BATCHES)]
        print(f"validation loss {np.mean(scores):.3f} nats a byte (guessing: {np.log(config.vocabulary):.3f})")
        if arguments.explain:
            print(f"\n{step.plan.explain()}\n\nWhat XLA made of it\n{step.report}")


def adamw(learning_rate: float, steps: int) -> optax.GradientTransformation:
    """AdamW, its learning rate warmed up and then decayed along a cosine to a tenth."""
    warmup = max(1, min(20, steps // 4))
    return optax.adamw(
        optax.warmup_cosine_decay_schedule(0.0, learning_rate, warmup, steps, end_value=learning_rate / 10)
    )


if __name__ == "__main__":
    run_example(main)
