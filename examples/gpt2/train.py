"""Train a small byte-level GPT-2 on the sources of Python's standard library.

    python examples/gpt2/train.py --explain

With SERVER_IP and SERVER_PORT set, the step runs on that server; else an embedded
server with eight CPU devices is started for the run. The model (model.py) is written
for one device; only the four numbered lines below know about Shardwright.
"""

from __future__ import annotations

import argparse
from collections import deque

import jax
import numpy as np
import optax
from data import batches, split, standard_library_text
from model import Config, make_steps
from progress import TrainingProgress, preparation_shown

import shardwright as sw

#: Steps that may run before an older loss is read: reading each at once would wait for it.
_STEPS_AHEAD = 2
_EVALUATION_BATCHES = 4


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16, help="sequences a step, over all devices")
    parser.add_argument("--context", type=int, default=128, help="bytes a sequence")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--devices", type=int, default=8, help="CPU devices of the embedded server")
    parser.add_argument("--force", help="a strategy: data, tensor, mixed, fsdp, replicated (default: search)")
    parser.add_argument("--explain", action="store_true", help="print the plan at the end")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    config = Config(context=arguments.context, layers=arguments.layers, heads=arguments.heads, width=arguments.width)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0,
        arguments.learning_rate,
        max(1, min(20, arguments.steps // 4)),
        arguments.steps,
        arguments.learning_rate / 10,
    )
    init, train_step, eval_step = make_steps(config, optax.adamw(schedule))
    training, validation = split(standard_library_text())
    data = batches(training, arguments.batch, arguments.context, arguments.seed)

    with sw.connect(devices=arguments.devices) as session:  # Shardwright 1: a server
        step = session.parallelize(train_step, donate_argnums=(0, 1), force=arguments.force)  # 2: instead of jax.jit
        with preparation_shown():
            params, opt_state = step.init(init, jax.random.key(arguments.seed))  # 3: born on the servers, sharded
            params, opt_state, loss = step(params, opt_state, next(data))  # the first call plans and compiles
            losses = deque([loss])
        with TrainingProgress(arguments.steps, arguments.batch * arguments.context) as progress:
            for number in range(2, arguments.steps + 1):
                params, opt_state, loss = step(params, opt_state, next(data))
                losses.append(loss)
                if len(losses) > _STEPS_AHEAD:
                    progress.update(number - _STEPS_AHEAD, float(losses.popleft()))
            while losses:
                progress.update(arguments.steps - len(losses) + 1, float(losses.popleft()))
        evaluate = session.parallelize(eval_step)  # 4: another function over the same parameters
        held_out = batches(validation, arguments.batch, arguments.context, seed=1)
        scores = [float(evaluate(params, next(held_out))) for _ in range(_EVALUATION_BATCHES)]
        print(f"validation loss {np.mean(scores):.3f} nats a byte (guessing: {np.log(config.vocabulary):.3f})")
        if arguments.explain:
            print()
            print(step.plan.explain())
            print("\nWhat XLA made of it")
            print(step.report)


if __name__ == "__main__":
    main()
