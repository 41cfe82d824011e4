"""Train a byte-level Llama on the sources of Python's standard library.

    python examples/llama/train.py --explain
    python examples/llama/train.py --preset 8B --plan-only --cluster cluster_configs/h100_64x8.json

Uses the server at SERVER_IP/SERVER_PORT, or starts an embedded one with eight CPU devices.
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
from examples.gpt2.model import batch_types
from examples.llama.model import PRESETS, make_steps

_EVALUATION_BATCHES = 4

#: What `--annotate` pins, the layout of Megatron-LM (Shoeybi et al., 2019): heads and hidden units.
MEGATRON = {
    "['q']": {-2: "model"},
    "['o']": {-3: "model"},
    "['gate']": {-1: "model"},
    "['up']": {-1: "model"},
    "['down']": {-2: "model"},
}


def main() -> None:
    parser = example_parser(__doc__, PRESETS, default="small", steps=200)
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="default: 0.002")
    arguments = parse_arguments(parser)
    config = select_config(PRESETS, arguments)
    init, train_step, eval_step = make_steps(config, optax.adamw(arguments.learning_rate))
    if arguments.annotate:
        train_step = annotate_step(train_step, MEGATRON)
    if arguments.plan_only:
        show_plan(train_step, init, batch_types(config), arguments)
        return

    training, validation = split(standard_library_text())
    data = batches(training, config.batch, config.context, arguments.seed)
    with sw.connect(devices=arguments.devices) as session:
        step = session.parallelize(train_step, donate_argnums=(0, 1), **planning_options(arguments))
        params = train(
            session, step, init, data, arguments, examples_per_step=config.batch * config.context, unit="tokens"
        )
        evaluate = session.parallelize(eval_step)
        held_out = batches(validation, config.batch, config.context, seed=1)
        scores = [float(evaluate(params, tokens)) for (tokens,) in islice(held_out, _EVALUATION_BATCHES)]
        print(f"validation loss {np.mean(scores):.3f} nats a byte (guessing: {np.log(config.vocabulary):.3f})")
        if arguments.explain:
            print(f"\n{step.plan.explain()}\n\nWhat XLA made of it\n{step.report}")


if __name__ == "__main__":
    run_example(main)
