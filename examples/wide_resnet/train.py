"""Train a Wide ResNet with group norm on scikit-learn's handwritten digits.

    python examples/wide_resnet/train.py --explain
    python examples/wide_resnet/train.py --preset 13B --plan-only --cluster cluster_configs/a100_64x8.json

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
from examples.common.digits import batches, digits
from examples.common.options import (
    example_parser,
    parse_arguments,
    planning_options,
    run_example,
    select_config,
    show_plan,
)
from examples.common.training import train
from examples.wide_resnet.model import PRESETS, batch_types, make_steps

_EVALUATION_BATCHES = 4

#: What `--annotate` pins: the wide convolutions' outputs and the next ones' inputs, as Megatron-LM splits an MLP.
WIDE_CHANNELS = {"['spatial']['kernel']": {-1: "model"}, "['expand']['kernel']": {-2: "model"}}


def main() -> None:
    parser = example_parser(__doc__, PRESETS, default="small", steps=100)
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="default: 0.003")
    arguments = parse_arguments(parser)
    config = select_config(PRESETS, arguments)
    init, train_step, eval_step = make_steps(config, optax.adam(arguments.learning_rate))
    if arguments.annotate:
        train_step = annotate_step(train_step, WIDE_CHANNELS)
    if arguments.plan_only:
        show_plan(train_step, init, batch_types(config), arguments)
        return

    training, validation = digits()
    shape = (config.image, config.image, config.image_channels)
    data = batches(*training, config.batch, shape, arguments.seed)
    with sw.connect(devices=arguments.devices) as session:
        step = session.parallelize(train_step, donate_argnums=(0, 1), **planning_options(arguments))
        params = train(session, step, init, data, arguments, examples_per_step=config.batch, unit="images")
        evaluate = session.parallelize(eval_step)
        held_out = batches(*validation, config.batch, shape, seed=1)
        scores = [float(evaluate(params, *batch)) for batch in islice(held_out, _EVALUATION_BATCHES)]
        print(f"{np.mean(scores):.1%} of held-out digits told right (guessing: {1 / 10:.1%})")
        if arguments.explain:
            print(f"\n{step.plan.explain()}\n\nWhat XLA made of it\n{step.report}")


if __name__ == "__main__":
    run_example(main)
