"""What fused attention is worth: Llama planned with and without it, and compiled by XLA:GPU without a GPU.

Of each plan: predicted step, bytes that collectives put on the wire, predicted peak; of what XLA:GPU makes of it for
H100: calls of cuDNN in the text of each device and the sizes of their parts, the peak, and the largest array that holds
rows × keys.

    python -m benchmarks.planner.fused_attention [--devices 8 64] [--remat full dots] [--context 4096 16384]
        [--no-compile] [--json FILE]    # make gpu-packages first
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import jax
import optax

import shardwright as sw
from examples.llama.model import PRESETS, Config, make_steps
from shardwright.clusters.cluster import Cluster
from shardwright.hlo import parse
from shardwright.xla import CompileService
from shardwright.xla.compilers import find_compiler

_CALL = re.compile(r'custom_call_target="(__cudnn\$fmha\w+)".*?"dimensions":\[?([^\]]*)\]')


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One plan; bytes on one device, seconds a step. calls: target and sizes [batch, heads, rows, keys] → how often."""

    devices: int
    remat: str
    context: int
    fused: str
    planning_s: float
    step_s: float
    wire_bytes: int
    peak_bytes: int
    compiled_peak_bytes: int = 0
    calls: dict[str, int]
    scores_bytes: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="*", default=[8, 64])
    parser.add_argument("--remat", nargs="*", default=["full", "dots"])
    parser.add_argument("--context", type=int, nargs="*", default=[4096, 16384])
    parser.add_argument("--preset", default="1.3B")
    parser.add_argument("--no-compile", action="store_true", help="plans only")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    rows = []
    for devices, remat, context in product(arguments.devices, arguments.remat, arguments.context):
        config = replace(PRESETS[arguments.preset], remat=remat, context=context, batch=devices)
        rows += [measure(config, devices, fused, compiled=not arguments.no_compile) for fused in ("off", "auto")]
        print_pair(*rows[-2:])
        if arguments.json:
            arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


def measure(config: Config, devices: int, fused: str, *, compiled: bool) -> Row:
    """Plan a training step with or without fused attention, and compile it if asked to."""
    init, train_step, _ = make_steps(config, optax.adamw(1e-4))
    state = jax.eval_shape(init, jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((config.batch, config.context + 1), "int32")
    text = sw.lower(train_step, *state, tokens, donate_argnums=(0, 1), platform="cuda").as_text()
    start = time.process_time()
    plan: Any = sw.plan(text, h100(devices), fused_attention=fused, stages=1, cache=False)
    row = Row(
        devices=devices,
        remat=config.remat,
        context=config.context,
        fused=fused,
        planning_s=time.process_time() - start,
        step_s=plan.cost.step_s,
        wire_bytes=sum(each.wire_bytes * each.count for each in plan.collectives),
        peak_bytes=plan.memory.peak_bytes,
        calls={},
    )
    return _compile(row, plan) if compiled else row


def _compile(row: Row, plan: Any) -> Row:
    """The row with what XLA:GPU makes of the plan."""
    compiler = find_compiler("h100", row.devices)
    with CompileService(row.devices, children=1, compiler=compiler) as service:
        program = service.compile(plan.require_hlo(), plan, want_executable=False)
    assert program.memory is not None
    calls = Counter(f"{target} {sizes.replace(chr(34), '')}" for target, sizes in _CALL.findall(program.partitioned))
    scores = (
        leaf.size_bytes
        for instruction in parse(program.partitioned).instructions()
        for leaf in instruction.shape.leaves
        if sum(size == row.context for size in leaf.dimensions) > 1 and prod(leaf.dimensions) > 2 * row.context**2
    )
    return replace(
        row, compiled_peak_bytes=program.memory.peak_bytes, calls=dict(calls), scores_bytes=max(scores, default=0)
    )


def h100(devices: int) -> Cluster:
    """So many H100 in nodes of eight."""
    per_node = min(devices, 8)
    nodes = [
        {"ip": f"10.0.0.{number + 1}", "port": 2222, "gpu_ids": list(range(per_node))}
        for number in range(devices // per_node)
    ]
    links = {"intra_node": "nvlink-4", "inter_node": "infiniband-ndr"}
    description = {"name": "h100", "hardware": "h100", "links": links, "insecure": True, "master": nodes[0]}
    return Cluster.from_json(json.dumps(description | {"workers": nodes[1:]}), for_planning=True)


def print_pair(off: Row, auto: Row) -> None:
    """A line: without, with, and the parts that are left."""
    print(
        f"{off.devices:3} H100, remat {off.remat:4}, {off.context:6} tokens: step {1e3 * off.step_s:8.1f} → "
        f"{1e3 * auto.step_s:8.1f} ms ({auto.step_s / off.step_s:.2f}), wire "
        f"{auto.wire_bytes / max(off.wire_bytes, 1):.3f}, peak {off.peak_bytes / 1e9:.1f} → "
        f"{auto.peak_bytes / 1e9:.1f} GB, compiled {off.compiled_peak_bytes / 1e9:.1f} → "
        f"{auto.compiled_peak_bytes / 1e9:.1f} GB ({auto.compiled_peak_bytes / max(off.compiled_peak_bytes, 1):.2f}), "
        f"scores {auto.scores_bytes} B, planning {off.planning_s:.1f} → {auto.planning_s:.1f} CPU s, {auto.calls}",
        flush=True,
    )


if __name__ == "__main__":
    main()
