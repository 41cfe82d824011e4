"""Time and peak memory of `shardwright.hlo.parse` beside XLA's own parser.

    python benchmarks/bench_parse.py [--layers 12 96] [--repeats 3]

Lowers a whole GPT-2 training step (forward, backward, AdamW, layers unrolled)
from shapes alone and parses its HLO text with both parsers, each in its own
process. Prints one JSON object per depth: seconds of both (best of the
repeats), their ratio, and the peak memory of a process with nothing but the
text and its parser. Exits 1 if a bar is missed: the larger of 12 times XLA's
time and 3 s, and 1 GiB.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MAX_RATIO = 12.0
MAX_TIME_S = 3.0
MAX_RSS_BYTES = 1 << 30

_OURS = """
import re, sys, time
from shardwright.hlo import parse
text = open(sys.argv[1]).read()
best = float("inf")
for _ in range(int(sys.argv[2])):
    module = None
    start = time.perf_counter()
    module = parse(text)
    best = min(best, time.perf_counter() - start)
count = sum(len(computation.instructions) for computation in module.computations)
# Not getrusage: that starts from what the parent had when it forked.
peak_kib = int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
print(best, count, peak_kib * 1024)
"""

_XLA = """
import sys, time
from jaxlib import _hlo
text = open(sys.argv[1]).read()
best = float("inf")
for _ in range(int(sys.argv[2])):
    start = time.perf_counter()
    _hlo.hlo_module_from_text(text)
    best = min(best, time.perf_counter() - start)
print(best)
"""


def lower_gpt2_step(
    layers: int, *, width: int = 768, heads: int = 12, vocabulary: int = 50257, sequence: int = 1024
) -> str:
    """Lower one AdamW step of a GPT-2 with unrolled layers to HLO text with source lines."""
    import jax
    import jax.numpy as jnp
    import optax

    def layer_shapes() -> dict[str, tuple[int, ...]]:
        return {
            "ln1_scale": (width,), "ln1_bias": (width,), "ln2_scale": (width,), "ln2_bias": (width,),
            "qkv": (width, 3 * width), "qkv_bias": (3 * width,), "out": (width, width), "out_bias": (width,),
            "up": (width, 4 * width), "up_bias": (4 * width,), "down": (4 * width, width), "down_bias": (width,),
        }  # fmt: skip

    shapes = {
        "wte": (vocabulary, width),
        "wpe": (sequence, width),
        "final_scale": (width,),
        "final_bias": (width,),
        "layers": [layer_shapes() for _ in range(layers)],
    }
    parameters = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), shapes, is_leaf=lambda node: isinstance(node, tuple)
    )

    def normalize(x: Any, scale: Any, bias: Any) -> Any:
        centered = x - x.mean(-1, keepdims=True)
        return centered * jax.lax.rsqrt((centered**2).mean(-1, keepdims=True) + 1e-5) * scale + bias

    def attention(p: dict[str, Any], x: Any) -> Any:
        batch, length, _ = x.shape
        qkv = (x @ p["qkv"] + p["qkv_bias"]).reshape(batch, length, 3, heads, width // heads)
        query, key, value = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / (width // heads) ** 0.5
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)
        return mixed.reshape(batch, length, width) @ p["out"] + p["out_bias"]

    def loss(p: dict[str, Any], tokens: Any) -> Any:
        x = p["wte"][tokens[:, :-1]] + p["wpe"][: tokens.shape[1] - 1]
        for layer in p["layers"]:
            x = x + attention(layer, normalize(x, layer["ln1_scale"], layer["ln1_bias"]))
            hidden = jax.nn.gelu(normalize(x, layer["ln2_scale"], layer["ln2_bias"]) @ layer["up"] + layer["up_bias"])
            x = x + hidden @ layer["down"] + layer["down_bias"]
        logits = normalize(x, p["final_scale"], p["final_bias"]) @ p["wte"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    optimizer = optax.adamw(3e-4)

    def step(p: Any, state: Any, tokens: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(p, tokens)
        updates, state = optimizer.update(gradients, state, p)
        return optax.apply_updates(p, updates), state, value

    state = jax.eval_shape(optimizer.init, parameters)
    tokens = jax.ShapeDtypeStruct((8, sequence + 1), jnp.int32)
    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(parameters, state, tokens)
    return lowered.as_text("hlo", debug_info=True)


def _time_parser(program: str, path: Path, repeats: int) -> list[float]:
    output = subprocess.run(
        [sys.executable, "-c", program, str(path), str(repeats)], check=True, capture_output=True, text=True
    ).stdout
    return [float(word) for word in output.split()]


def measure(layers: int, repeats: int) -> dict[str, Any]:
    """Measure one depth; `ok`: whether both bars are met."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.hlo"
        path.write_text(text := lower_gpt2_step(layers))
        ours_s, instructions, rss_bytes = _time_parser(_OURS, path, repeats)
        # One pass for the memory figure: repeats would add the garbage of the pass before.
        rss_bytes = min(rss_bytes, _time_parser(_OURS, path, 1)[2])
        (xla_s,) = _time_parser(_XLA, path, repeats)
    ratio = ours_s / xla_s
    return {
        "layers": layers,
        "instructions": int(instructions),
        "text_bytes": len(text),
        "shardwright_s": round(ours_s, 3),
        "xla_s": round(xla_s, 3),
        "ratio": round(ratio, 2),
        "peak_rss_bytes": int(rss_bytes),
        "ok": (ratio <= MAX_RATIO or ours_s <= MAX_TIME_S) and rss_bytes <= MAX_RSS_BYTES,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 96])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    results = [measure(layers, options.repeats) for layers in options.layers]
    for result in results:
        print(json.dumps(result))
    return 0 if all(result["ok"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
