"""What a front end adds to a step: `model.fit` of Keras, and a step of PyTorch, beside the same step without them.

Keras: epochs of `fit` beside as many calls of the model's own `train_step` by `session.parallelize`. PyTorch: steps of
`shardwright.torch` beside calls of the program that they lower to, by `session.program`. Both sides run in one session
of four CPU devices, in turn; a round ends when its last loss is a Python float. Of the rounds the fastest counts, since
whatever else the machine does makes a round slower only.

    KERAS_BACKEND=jax build/frontends/keras/bin/python -m benchmarks.runtime.frontends keras
    build/frontends/torch/bin/python -m benchmarks.runtime.frontends torch

(`make test-frontends` makes the environments.)

Exit code 1 where the front end takes more than max(10 %, 3 ms) a step longer.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np

import shardwright as sw
from benchmarks.frontend_models import Sizes, keras_gpt, keras_loss, torch_gpt, torch_loss

ALLOWED_RATIO = 0.10
ALLOWED_S = 3e-3

SIZES = Sizes(vocabulary=256, width=64, heads=4, layers=4, tokens=64, dropout=0.1)
BATCH = 16

#: Runs some steps, to their end; both sides of a comparison.
Round = Callable[[int], None]


def keras_rounds(session: sw.Session) -> tuple[Round, Round]:
    """(fit, the model's train_step by `session.parallelize`) of a GPT with dropout under AdamW."""
    import keras

    import shardwright.keras as swk

    def build() -> Any:
        keras.utils.clear_session()
        keras.utils.set_random_seed(0)
        model = keras_gpt(SIZES)
        model.compile(keras.optimizers.AdamW(1e-3), keras_loss(), metrics=["accuracy"])
        return model

    ids = np.random.default_rng(0).integers(0, SIZES.vocabulary, (BATCH, SIZES.tokens)).astype("int32")
    fitted = swk.distribute(build(), session, force="data")

    def batches() -> Iterator[Any]:
        while True:
            yield ids, ids

    def fit(steps: int) -> None:
        fitted.fit(batches(), steps_per_epoch=steps, epochs=1, verbose=0)

    plain = build()
    plain._symbolic_build(data_batch=(ids, ids))
    groups = [plain.trainable_variables, plain.non_trainable_variables, plain.optimizer.variables]
    state = tuple([variable.value for variable in group] for group in (*groups, plain.metrics_variables))
    step = session.parallelize(plain.train_step, donate_argnums=(0,), force="data")

    def call(steps: int) -> None:
        nonlocal state
        for _ in range(steps):
            logs, state = step(state, (ids, ids))
        float(logs["loss"])

    return fit, call


def torch_rounds(session: sw.Session) -> tuple[Round, Round]:
    """(steps of a module, calls of the program that they lower to) of a GPT under AdamW."""
    import torch

    import shardwright.torch as swt

    torch.manual_seed(0)
    model = torch_gpt(SIZES)
    ids = torch.randint(0, SIZES.vocabulary, (BATCH, SIZES.tokens))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = swt.parallelize(session, model, optimizer, torch_loss, force="data")

    def steps_of_torch(steps: int) -> None:
        for _ in range(steps):
            loss = step(ids, ids)
        loss.item()

    program = step.lower(ids, ids)
    names = program.argument_names
    bare = session.program(program.hlo_text, names=names, force="data")
    arguments: list[Any] = [
        np.zeros(kind.shape, spec.dtype) for kind, spec in zip(program.arguments, program.specs, strict=True)
    ]
    arguments[names.index("x")] = arguments[names.index("y")] = ids.numpy()
    arguments[names.index("optimizer.lr")] = np.float64(1e-3)
    arguments[names.index("random")] = np.array([0, 1], np.uint32)

    def calls(steps: int) -> None:
        for _ in range(steps):
            results = bare(*arguments)
            for output, argument in program.aliases.items():
                arguments[argument] = results[output]
        float(results[-1])

    return steps_of_torch, calls


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("frontend", choices=["keras", "torch"])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20, help="in a round")
    parser.add_argument("--json", metavar="FILE", help="write all figures")
    arguments = parser.parse_args()
    with sw.connect(devices=4) as session:
        make = {"keras": keras_rounds, "torch": torch_rounds}[arguments.frontend]
        sides = dict(zip(("front end", "bare"), make(session), strict=True))
        for run in sides.values():
            run(3)
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(arguments.rounds):
            for name, run in sides.items():
                start = time.perf_counter()
                run(arguments.steps)
                seconds[name].append((time.perf_counter() - start) / arguments.steps)
    front, bare = (min(seconds[name]) for name in sides)
    allowed = max(ALLOWED_RATIO * bare, ALLOWED_S)
    print(
        f"{arguments.frontend}: {front * 1e3:.2f} ms a step, without the front end {bare * 1e3:.2f} ms: "
        f"{(front - bare) * 1e3:+.2f} ms, {front / bare - 1:+.1%} (at most {allowed * 1e3:.1f} ms)"
    )
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(seconds, indent=1), encoding="utf-8")
    return 0 if front - bare <= allowed else 1


if __name__ == "__main__":
    sys.exit(main())
