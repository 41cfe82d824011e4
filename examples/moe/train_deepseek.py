"""Train a byte-level model with DeepSeek's latent attention and experts on the sources of Python's standard library.

    python examples/moe/train_deepseek.py --explain
    python examples/moe/train_deepseek.py --form onehot
    python examples/moe/train_deepseek.py --preset 16B --plan-only --cluster cluster_configs/h100_64x8.json

Uses the server at SERVER_IP/SERVER_PORT, or starts an embedded one with eight CPU devices.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that a script finds the other examples

import shardwright as sw
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
from examples.moe.deepseek import FORMS, PRESETS, make_steps

_EVALUATION_BATCHES = 4


def main() -> None:
    parser = example_parser(__doc__, PRESETS, default="small", steps=200)
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="default: 0.002")
    parser.add_argument("--form", choices=FORMS, default="ragged", help="of the routed experts (default: ragged)")
    parser.add_argument(
        "--expert-capacity", type=float, metavar="SHARE", help="most rows sent to a device's experts, of an even share"
    )
    arguments = parse_arguments(parser)
    config = replace(select_config(PRESETS, arguments), form=arguments.form)
    init, train_step, eval_step = make_steps(config, optax.adamw(arguments.learning_rate))
    if arguments.plan_only:
        show_plan(train_step, init, batch_types(config), arguments)
        return

    training, validation = split(standard_library_text())
    data = batches(training, config.batch, config.context, arguments.seed)
    options = planning_options(arguments) | {"expert_capacity": arguments.expert_capacity}
    with sw.connect(devices=arguments.devices) as session:
        step = session.parallelize(train_step, donate_argnums=(0, 1), **options)
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
