"""A step of GPT-2 124M on one GPU: by its framework alone, and by the service.

Each side is a process of its own: `jax.jit` with XLA's attention and with cuDNN's; PyTorch eager and by
`torch.compile`, in bfloat16 autocast; then a server of this GPU and, as its clients without a GPU,
`session.parallelize` and `shardwright.torch.parallelize`, with fused attention and without. A round of steps ends when
its last loss is a Python float; the median of the rounds counts. The losses of the first 20 steps of fused sides are
held against those of the same side without.

    python -m benchmarks.runtime.one_gpu --hardware h100 [--sides jit served] [--json FILE]

A side that fails says why, and the others run. Without a GPU: `--platform cpu --layers 1 --tokens 32 --batch 2`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

VOCABULARY, WIDTH, HEADS = 50257, 768, 12
SIDES = (
    "jit", "jit cudnn", "torch", "torch.compile", "served", "served unfused", "torch served", "torch served unfused",
)  # fmt: skip

#: Side with fused attention → the same side without.
UNFUSED = {"jit cudnn": "jit", "served": "served unfused", "torch served": "torch served unfused"}

#: Steps whose losses are compared.
COMPARED = 20

#: Starts a step and returns its loss, to be read by `float` some time later.
Step = Callable[[], Any]


# ---- sides ------------------------------------------------------------------------------
def measure_side(arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a step of one side in its rounds, seconds to its first loss, and its memory in bytes."""
    make = {
        "jit": make_jit_step,
        "jit cudnn": make_jit_step,
        "torch": make_torch_step,
        "torch.compile": make_torch_step,
        "served": make_served_step,
        "served unfused": make_served_step,
        "torch served": make_torch_served_step,
        "torch served unfused": make_torch_served_step,
    }[arguments.side]
    start = time.perf_counter()
    with make(arguments) as (step, more):
        losses = [float(step())]
        first_s = time.perf_counter() - start
        losses += [float(step()) for _ in range(COMPARED - 1)]
        seconds = []
        for _ in range(arguments.rounds):
            start = time.perf_counter()
            for _ in range(arguments.steps):
                loss = step()
            losses.append(float(loss))
            seconds.append((time.perf_counter() - start) / arguments.steps)
        figures = {"step_s": statistics.median(seconds), "rounds_s": seconds, "first_s": first_s, "losses": losses}
        return figures | more()


def _jax_gpt(arguments: argparse.Namespace) -> tuple[Any, Any, np.ndarray[Any, Any]]:
    """The example with its attention as `jax.nn.dot_product_attention`, by cuDNN where the side asks for it."""
    import jax
    from jax import numpy as jnp

    from examples.gpt2 import model
    from examples.gpt2.model import Config, make_steps
    from examples.gpt2.train import adamw

    def attention(p: Any, x: Any, heads: int) -> Any:
        q, k, v = (each.reshape(*x.shape[:2], heads, -1) for each in jnp.split(model.linear(p["qkv"], x), 3, axis=-1))
        implementation: Any = "cudnn" if arguments.side == "jit cudnn" else None
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)
        return model.linear(p["output"], mixed.reshape(x.shape))

    model.attention = attention
    config = Config(
        vocabulary=VOCABULARY, context=arguments.tokens, layers=arguments.layers, heads=HEADS, width=WIDTH,
        batch=arguments.batch, dtype="bfloat16",
    )  # fmt: skip
    init, train_step, _ = make_steps(config, adamw(1e-4, 1000))
    return init, train_step, _token_ids(arguments)


def _token_ids(arguments: argparse.Namespace) -> np.ndarray[Any, Any]:
    random = np.random.default_rng(0)
    return random.integers(0, VOCABULARY, (arguments.batch, arguments.tokens + 1), np.int32)


@contextmanager
def make_jit_step(arguments: argparse.Namespace) -> Iterator[tuple[Step, Callable[[], dict[str, Any]]]]:
    import jax

    init, train_step, tokens = _jax_gpt(arguments)
    state = jax.jit(init)(jax.random.key(0))
    compiled = jax.jit(train_step, donate_argnums=(0, 1)).lower(*state, tokens).compile()
    batch = jax.device_put(tokens)

    def step() -> Any:
        nonlocal state
        params, optimizer, loss = compiled(*state, batch)
        state = params, optimizer
        return loss

    analysis: Any = compiled.memory_analysis()
    compiled_bytes = analysis.argument_size_in_bytes + analysis.temp_size_in_bytes
    yield step, lambda: {"compiled_bytes": compiled_bytes, "device": jax.devices()[0].device_kind}


@contextmanager
def make_served_step(arguments: argparse.Namespace) -> Iterator[tuple[Step, Callable[[], dict[str, Any]]]]:
    import jax

    from benchmarks.runtime.recovery import connect

    init, train_step, tokens = _jax_gpt(arguments)
    with connect(arguments.server) as session:
        served = session.parallelize(train_step, donate_argnums=(0, 1), fused_attention=_choice(arguments))
        state: Any = served.init(init, jax.random.key(0))

        def step() -> Any:
            nonlocal state
            params, optimizer, loss = served(*state, tokens)
            state = params, optimizer
            return loss

        yield step, lambda: _figures_of_plan(served)


def _torch_gpt(arguments: argparse.Namespace, device: str) -> tuple[Any, Any, Any, Any]:
    import torch
    from torch.nn import functional as F

    from tests.torch_frontend.models import GPT

    torch.manual_seed(0)
    model = GPT(VOCABULARY, WIDTH, arguments.layers, arguments.tokens, heads=HEADS)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.02)
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.from_numpy(_token_ids(arguments)).long().to(device)

    def loss_of(model: Any, x: Any, y: Any) -> Any:
        with torch.autocast(arguments.platform, torch.bfloat16):
            return F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())

    return model, optimizer, loss_of, tokens


@contextmanager
def make_torch_step(arguments: argparse.Namespace) -> Iterator[tuple[Step, Callable[[], dict[str, Any]]]]:
    import torch

    torch.set_float32_matmul_precision("high")
    model, optimizer, loss_of, tokens = _torch_gpt(arguments, arguments.platform)
    if arguments.side == "torch.compile":
        model = torch.compile(model)
    x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def step() -> Any:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    yield step, lambda: {"peak_bytes": torch.cuda.max_memory_allocated() if arguments.platform == "cuda" else None}


@contextmanager
def make_torch_served_step(arguments: argparse.Namespace) -> Iterator[tuple[Step, Callable[[], dict[str, Any]]]]:
    import shardwright.torch as swt
    from benchmarks.runtime.recovery import connect

    model, optimizer, loss_of, tokens = _torch_gpt(arguments, "cpu")
    x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    with connect(arguments.server) as session:
        served = swt.parallelize(session, model, optimizer, loss_of, fused_attention=_choice(arguments))
        yield lambda: served(x, y), lambda: _figures_of_plan(served)


def _choice(arguments: argparse.Namespace) -> str:
    return "off" if "unfused" in arguments.side else "auto"


def _figures_of_plan(step: Any) -> dict[str, Any]:
    plan = step.plan
    return {"predicted_s": plan.cost.step_s, "predicted_bytes": plan.memory.peak_bytes, "report": step.report}


# ---- all of them ------------------------------------------------------------------------
@contextmanager
def server(arguments: argparse.Namespace) -> Iterator[str]:
    """A server of one device, and its address."""
    from shardwright.server.security import free_port

    node = {"ip": "127.0.0.1", "port": free_port("127.0.0.1")}
    device = {"gpu_ids": [0]} if arguments.platform == "cuda" else {"devices": 1}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.json"
        hardware = {"hardware": arguments.hardware} if arguments.hardware else {}
        path.write_text(json.dumps({"master": node | device, **hardware}))
        process = subprocess.Popen([sys.executable, "-m", "shardwright.server", str(path), "0"])
        try:
            yield f"127.0.0.1:{node['port']}"
        finally:
            process.terminate()
            process.wait(timeout=60)


def run_side(side: str, address: str | None) -> dict[str, Any]:
    options = [*sys.argv[1:], "--side", side, *(["--server", address] if address else [])]
    environment = os.environ | ({"JAX_PLATFORMS": "cpu"} if address else {})
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "side.json"
        command = [sys.executable, "-m", "benchmarks.runtime.one_gpu", *options, "--result", str(result)]
        ended = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, check=False)
        if ended.returncode:
            return {"error": ended.stderr[-3000:]}
        figures: dict[str, Any] = json.loads(result.read_text())
        return figures


def compare_losses(figures: dict[str, dict[str, Any]]) -> None:
    """Note how far the losses of a fused side are from those of its twin, where both are there."""
    for fused, unfused in UNFUSED.items():
        losses = [figures[side]["losses"][:COMPARED] for side in (fused, unfused) if "losses" in figures.get(side, {})]
        if len(losses) == 2:
            figures[fused]["apart"] = float(np.abs(np.subtract(*losses)).max())


def report(side: str, figures: dict[str, Any]) -> str:
    if "error" in figures:
        return f"{side}: {figures['error']}"
    texts = [f"{1e3 * figures['step_s']:.1f} ms", f"first loss after {figures['first_s']:.0f} s"]
    if "predicted_s" in figures:
        texts.append(f"predicted {1e3 * figures['predicted_s']:.1f} ms")
    texts += [
        f"{name.removesuffix('_bytes')} {figures[name] / 2**30:.2f} GiB"
        for name in ("compiled_bytes", "predicted_bytes", "peak_bytes")
        if figures.get(name)
    ]
    texts.append(f"loss {figures['losses'][0]:.3f} to {figures['losses'][-1]:.3f}")
    if "apart" in figures:
        texts.append(f"losses of {COMPARED} steps at most {figures['apart']:.1e} from those without fused attention")
    return "\n".join([f"{side}: {', '.join(texts)}", *([figures["report"]] if "report" in figures else [])])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", help="the hardware profile of the server's cluster file")
    parser.add_argument("--platform", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--sides", nargs="*", choices=SIDES, default=SIDES)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="in a round")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    for name in ("--side", "--server", "--result"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        Path(arguments.result).write_text(json.dumps(measure_side(arguments)))
        return 0
    figures = {}

    def run(sides: list[str], address: str | None) -> None:
        for side in sides:
            figures[side] = run_side(side, address)
            compare_losses(figures)
            print(report(side, figures[side]), flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(figures, indent=1))

    run([side for side in arguments.sides if "served" not in side], None)
    if served := [side for side in arguments.sides if "served" in side]:
        with server(arguments) as address:
            run(served, address)
    return int(any("error" in each for each in figures.values()))


if __name__ == "__main__":
    sys.exit(main())
