"""Measure one GPU: kernels, products and training steps, for the figures of its hardware profile.

    python -m benchmarks.measure_gpu --out DIR [--cases gpt2:124M llama:1B …] [--seconds 240]

Prints a table. DIR gets `figures.json` and, per case, the optimized HLO text and the seconds of each instruction's
kernels (`NAME.hlo.gz`, `NAME.json`). Needs a GPU, but not Shardwright's planner: `benchmarks.gpu_measured` compares the
files with predictions on any machine. Durations are the device's own, from XLA's profiler.

CUDA graphs (XLA's default) hide the instructions of kernels: with them only whole steps are timed. `XLA_FLAGS=
--xla_gpu_enable_command_buffer=` switches them off.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.profiler import ProfileData

from workloads.every_model import EVERY_MODEL

#: model:size → changes to make it fit one GPU.
CASES: dict[str, dict[str, Any]] = {
    "gpt2:124M": {"batch_per_device": 8},
    "llama:1B": {},
    "unet:128": {"blocks": 1},
    "dlrm:1M": {},
    "lstm:1024": {},
    "vit:L16": {"layers": 4},
    "resnet:250M": {"blocks": (1, 2, 2, 1)},
    "bert:large": {"layers": 4},
    "t5:base": {"layers": 3},
    "moe:8e": {"layers": 4},
}
#: Results, inner and outer dimensions of products: squares, and those of a GPT-2 of 768 at 8 × 1024 tokens.
PRODUCTS = (
    (1024, 1024, 1024), (2048, 2048, 2048), (4096, 4096, 4096), (8192, 8192, 8192),
    (8192, 768, 2304), (8192, 768, 768), (8192, 768, 3072), (8192, 3072, 768), (768, 8192, 3072), (8192, 768, 50304),
)  # fmt: skip
#: Rows, heads, key heads, width, tokens, causal: attention, by cuDNN and as XLA writes it.
ATTENTION = (
    (512, 16, 16, 64, 16384, True), (1024, 12, 12, 64, 16384, True), (2048, 16, 8, 128, 16384, True),
    (4096, 16, 8, 128, 16384, True), (4096, 16, 8, 64, 16384, True), (4096, 16, 16, 128, 16384, False),
    (8192, 16, 16, 128, 16384, True), (16384, 16, 16, 128, 16384, True), (32768, 8, 1, 128, 32768, True),
)  # fmt: skip
SIZES = tuple(1 << power for power in range(10, 29, 3))
REPEATS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", nargs="*", default=list(CASES), metavar="MODEL:SIZE")
    parser.add_argument("--seconds", type=float, default=240.0, help="no case begins later (default: 240)")
    parser.add_argument("--no-kernels", action="store_true", help="only whole steps")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    started_s = time.monotonic()
    device = jax.devices()[0]
    figures: dict[str, Any] = {"device": device.device_kind, "jax": jax.__version__, "steps": {}}
    if not arguments.no_kernels:
        figures["elementwise"] = [measure_elementwise(size) for size in SIZES]
        figures["products"] = [
            measure_product(*shape, dtype) for dtype in ("float32", "bfloat16") for shape in PRODUCTS
        ]
        figures["chain"] = measure_chain()
        figures["attention"] = [measure_attention(*shape) for shape in ATTENTION]
        _write(arguments.out, figures)
    for case in arguments.cases:
        if time.monotonic() - started_s > arguments.seconds:
            print(f"{case}: no time left")
            continue
        try:
            figures["steps"][case] = measure_step(case, arguments.out, with_kernels=not arguments.no_kernels)
        except Exception as error:  # one case must not cost the others
            figures["steps"][case] = {"error": str(error)[:500]}
        print(case, json.dumps(figures["steps"][case]), flush=True)
        _write(arguments.out, figures)
    print(json.dumps({name: value for name, value in figures.items() if name != "steps"}))


def _write(folder: Path, figures: dict[str, Any]) -> None:
    (folder / "figures.json").write_text(json.dumps(figures, indent=1))


# ---- kernels --------------------------------------------------------------------------
def measure_elementwise(elements: int) -> dict[str, float]:
    """y = 1.1 x + y of float32: bytes moved and seconds of the kernel."""
    x, y = (jax.random.normal(jax.random.key(seed), (elements,)) for seed in (0, 1))
    seconds = _measure_kernels_s(jax.jit(lambda x, y: 1.1 * x + y), x, y)
    return {"bytes": 12.0 * elements, "seconds": seconds}


def measure_product(rows: int, inner: int, columns: int, dtype: str) -> dict[str, Any]:
    """A matrix product: operations and seconds of its kernels."""
    lhs = jax.random.normal(jax.random.key(0), (rows, inner), dtype)
    rhs = jax.random.normal(jax.random.key(1), (inner, columns), dtype)
    seconds = _measure_kernels_s(jax.jit(jnp.matmul), lhs, rhs)
    return {"shape": [rows, inner, columns], "type": dtype, "flops": 2.0 * rows * inner * columns, "seconds": seconds}


def measure_chain(length: int = 200) -> dict[str, float]:
    """A chain of dependent 256 × 256 products: seconds of a step and of its kernels, number of kernels."""

    def chain(x: jax.Array) -> jax.Array:
        for _ in range(length):
            x = jnp.matmul(x, x) * 0.05
        return x

    x = jax.random.normal(jax.random.key(0), (256, 256))
    compiled = jax.jit(chain).lower(x).compile()
    kernels = _profile(lambda: compiled(x), 3)
    return {
        "step_s": _measure_step_s(lambda: compiled(x)),
        "kernels_s": sum(seconds for _, seconds, _ in kernels) / 3,
        "kernels": sum(runs for _, _, runs in kernels) / 3,
    }


def measure_attention(rows: int, heads: int, kv_heads: int, width: int, tokens: int, causal: bool) -> dict[str, Any]:
    """Attention in bfloat16: seconds of its kernels, forward, and forward with backward, by cuDNN and by XLA."""
    q, k, v = (
        jax.random.normal(jax.random.key(seed), (tokens // rows, rows, count, width), jnp.bfloat16)
        for seed, count in enumerate((heads, kv_heads, kv_heads))
    )
    result: dict[str, Any] = {"shape": [rows, heads, kv_heads, width, tokens], "causal": causal}
    for implementation in ("cudnn", "xla"):

        def forward(q: jax.Array, k: jax.Array, v: jax.Array, by: Any = implementation) -> jax.Array:
            return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation=by)

        both = jax.jit(jax.grad(lambda *qkv, run=forward: run(*qkv).astype(jnp.float32).sum(), argnums=(0, 1, 2)))
        result[implementation] = {
            "forward_s": _measure_kernels_s(jax.jit(forward), q, k, v),
            "both_s": _measure_kernels_s(both, q, k, v),
        }
    return result


def _measure_kernels_s(function: Callable[..., jax.Array], *arguments: jax.Array) -> float:
    jax.block_until_ready(function(*arguments))
    return sum(seconds for _, seconds, _ in _profile(lambda: function(*arguments), REPEATS)) / REPEATS


# ---- steps -----------------------------------------------------------------------------
def measure_step(name: str, folder: Path, *, with_kernels: bool) -> dict[str, float]:
    """A training step on one device: seconds, memory, and the seconds of its kernels by instruction."""
    model, size = name.split(":")
    case = EVERY_MODEL[model].build(size, 1, **CASES.get(name, {}))
    state_and_batch = [jax.tree.map(partial(_random_array, seed=17), avals) for avals in case.avals]
    started_s = time.monotonic()
    compiled = jax.jit(case.step, donate_argnums=(0, 1), keep_unused=True).lower(*case.avals).compile()
    compile_s = time.monotonic() - started_s
    params, opt_state, batch = state_and_batch
    del state_and_batch

    def run() -> jax.Array:
        nonlocal params, opt_state
        params, opt_state, loss = compiled(params, opt_state, batch)
        return loss

    loss = float(run())
    statistics_before = jax.devices()[0].memory_stats() or {}
    analysis = compiled.memory_analysis()
    result = {
        "compile_s": compile_s,
        "loss": loss,
        "step_s": _measure_step_s(run),
        "argument_bytes": analysis.argument_size_in_bytes,
        "temporary_bytes": analysis.temp_size_in_bytes,
        "peak_bytes_in_use": statistics_before.get("peak_bytes_in_use", 0),
    }
    if with_kernels:
        kernels = _profile(run, 3)
        result["kernels_s"] = sum(seconds for _, seconds, _ in kernels) / 3
        result["kernels"] = sum(runs for _, _, runs in kernels) / 3
        stem = folder / name.replace(":", "-")
        stem.with_suffix(".json").write_text(json.dumps([(op, seconds / 3, runs / 3) for op, seconds, runs in kernels]))
        with gzip.open(stem.with_suffix(".hlo.gz"), "wt") as file:
            file.write(compiled.as_text())
    return result


def _random_array(aval: jax.ShapeDtypeStruct, seed: int) -> jax.Array:
    """Small positive numbers, or indices below 100."""
    generator = np.random.default_rng(seed)
    if jnp.issubdtype(aval.dtype, jnp.floating):
        key = jax.random.key(int(generator.integers(1 << 30)))
        return jnp.abs(jax.random.normal(key, aval.shape, jnp.float32) * 0.02).astype(aval.dtype)
    if jnp.issubdtype(aval.dtype, jnp.integer):
        return jnp.asarray(generator.integers(0, 100 if aval.shape else 1, aval.shape), aval.dtype)
    return jnp.zeros(aval.shape, aval.dtype)


def _measure_step_s(run: Callable[[], Any], repeats: int = 20) -> float:
    """Median seconds of a call, over groups of five calls with one wait each."""
    jax.block_until_ready(run())
    times = []
    for _ in range(max(repeats // 5, 1)):
        start = time.perf_counter()
        for _ in range(5):
            result = run()
        jax.block_until_ready(result)
        times.append((time.perf_counter() - start) / 5)
    return statistics.median(times)


# ---- XLA's profiler ---------------------------------------------------------------------
def _profile(run: Callable[[], Any], repeats: int) -> list[tuple[str, float, int]]:
    """(HLO instruction or kernel, seconds, runs) of all device work in `repeats` calls."""
    jax.block_until_ready(run())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(repeats):
                result = run()
            jax.block_until_ready(result)
        files = sorted(Path(folder).rglob("*.xplane.pb"))
        seconds: dict[str, float] = defaultdict(float)
        runs: dict[str, int] = defaultdict(int)
        for name, duration_s in _device_events(files):
            seconds[name] += duration_s
            runs[name] += 1
    return [(name, seconds[name], runs[name]) for name in sorted(seconds, key=lambda name: -seconds[name])]


def _device_events(files: Sequence[Path]) -> Iterator[tuple[str, float]]:
    for file in files:
        for plane in ProfileData.from_file(str(file)).planes:
            if not plane.name.startswith("/device:GPU"):
                continue
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    for event in line.events:
                        stats = dict(event.stats)
                        yield str(stats.get("hlo_op", event.name)), event.duration_ns / 1e9


if __name__ == "__main__":
    main()
