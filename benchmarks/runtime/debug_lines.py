"""What `jax.debug.print` costs a step: the mean of each layer's output in a loop, over 8 CPU devices, beside the same
step without.

Blocks of both steps take turns in one session; CPU seconds are those of this process and of its servers. It fails where
a line is missing, comes twice or out of order, or where the lines cost more than `LIMIT`.

    python -m benchmarks.runtime.debug_lines --json build/debug_lines.json
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil

import shardwright as sw

#: Maximum of what the lines add, as a part of the step.
LIMIT = 0.02

STEPS = 100
#: Steps of a block: both kinds take turns, since other load passes.
BLOCK = 10
KINDS = ("silent", "speaking")


def make_step(*, speaks: bool) -> Callable[..., Any]:
    """A training step of a scanned perceptron."""

    def step(weights: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def loss(weights: jax.Array) -> jax.Array:
            def layer(h: jax.Array, own: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
                number, weight = own
                h = jnp.tanh(h @ weight)
                if speaks:
                    jax.debug.print("layer {} mean {}", number, h.mean())
                return h, None

            h, _ = jax.lax.scan(layer, x, (jnp.arange(len(weights)), weights))
            return (h**2).mean()

        value, gradient = jax.value_and_grad(loss)(weights)
        return weights - 0.1 * gradient, value

    step.__name__ = "speaking" if speaks else "silent"
    return step


def cpu_s() -> float:
    """CPU seconds of this process and of its children."""
    this = psutil.Process()
    times = [process.cpu_times() for process in (this, *this.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def measure(session: sw.Session, layers: int, width: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds of CPU and by the clock of each block of each step."""
    draw = np.random.default_rng(0).standard_normal
    x = draw((width, width)).astype(np.float32)
    steps = {name: session.parallelize(make_step(speaks=name == "speaking"), donate_argnums=0) for name in KINDS}
    state = {name: (draw((layers, width, width)) / width**0.5).astype(np.float32) for name in KINDS}
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in KINDS}
    for block in range(1 + STEPS // BLOCK):
        for name in KINDS if block % 2 else KINDS[::-1]:
            before = cpu_s(), time.perf_counter()
            for _ in range(BLOCK):
                state[name], loss = steps[name](state[name], x)
                float(loss)
            spent[name].append((cpu_s() - before[0], time.perf_counter() - before[1]))
    return {name: blocks[1:] for name, blocks in spent.items()}


def check_lines(lines: list[str], layers: int) -> bool:
    """Whether each layer of each step has said its line, once and in order."""
    numbers = [int(line.split(":")[0].removeprefix("step ")) for line in lines]
    said = [int(line.split()[3]) for line in lines]
    return numbers == sorted(numbers) and said == list(range(layers)) * (STEPS + BLOCK)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512, help="of the layers, and rows of the batch")
    parser.add_argument("--json", metavar="FILE", help="write all figures")
    arguments = parser.parse_args()
    output = io.StringIO()
    with sw.connect(devices=8) as session, contextlib.redirect_stdout(output):
        spent = measure(session, arguments.layers, arguments.width)
    is_whole = check_lines(output.getvalue().splitlines(), arguments.layers)
    cpu, clock = (
        {name: sum(block[which] for block in blocks) / STEPS for name, blocks in spent.items()} for which in (0, 1)
    )
    over = cpu["speaking"] / cpu["silent"] - 1
    print(f"each line once, in order: {'yes' if is_whole else 'no'}")
    print(
        f"CPU of a step: {cpu['silent'] * 1e3:.1f} ms, {cpu['speaking'] * 1e3:.1f} with lines: {over:+.1%} "
        f"(at most {LIMIT:.0%}); by the clock {clock['silent'] * 1e3:.1f} and {clock['speaking'] * 1e3:.1f} ms"
    )
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"over": over, "cpu_s": cpu, "clock_s": clock}), encoding="utf-8")
    return 0 if is_whole and over <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
