"""The plans of one training step written three times: GPT-2 under AdamW in JAX, in Keras and in PyTorch.

Each front end lowers by types alone, in its own environment (`make test-frontends` makes them), to a file; one process
plans all files of a folder and compares their predicted steps with JAX's of `workloads`.

    python -m benchmarks.planner.twins lower jax build/twins --devices 8
    KERAS_BACKEND=jax build/frontends/keras/bin/python -m benchmarks.planner.twins lower keras build/twins --devices 8
    build/frontends/torch/bin/python -m benchmarks.planner.twins lower torch build/twins --devices 8
    python -m benchmarks.planner.twins plan build/twins

`lower` prints seconds and peak memory of its process (`--size 1.5B` for GPT-2 XL); `plan` the steps, and with
`--explain` what differs most by kind of instruction. Exit code 1 where a step is more than 5 % beside JAX's.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import shardwright as sw
from benchmarks.frontend_models import Sizes, keras_gpt, keras_loss, torch_gpt, torch_loss
from benchmarks.planner.suite import cluster_json
from shardwright.cost import compute_time_s, hardware_profile
from shardwright.cost.opcodes import ELEMENTWISE
from shardwright.hlo import parse
from shardwright.planner.costs.kernels import find_kernels
from shardwright.planner.graph.dataflow import build_dataflow
from shardwright.planner.segments.variables import cheap_nodes
from workloads.models import gpt2

ALLOWED_RATIO = 0.05
MACHINE = "a100"

#: Differences that `--explain` shows, in seconds a step.
SHOWN_S = 5e-5

RATE, WEIGHT_DECAY = 1e-4, 0.01


def lower_jax(config: gpt2.Config, size: str, devices: int) -> str:
    """HLO text of the step in JAX."""
    del config
    return str(gpt2.build(size, devices).lower().as_text("hlo", debug_info=True))


def lower_keras(config: gpt2.Config, size: str, devices: int) -> str:
    """HLO text of the step in Keras, whose variables are types."""
    del size
    import jax
    import keras

    import shardwright.keras as swk

    with swk.scope():
        model = keras_gpt(_sizes(config))
        model.compile(keras.optimizers.AdamW(RATE, weight_decay=WEIGHT_DECAY), keras_loss())
    ids = jax.ShapeDtypeStruct((config.batch_per_device * devices, config.context), "int32")
    return swk.lower(model, ids, ids).hlo_text


def lower_torch(config: gpt2.Config, size: str, devices: int) -> str:
    """HLO text of the step in PyTorch, whose tensors are on `meta`."""
    del size
    import torch

    import shardwright.torch as swt

    with torch.device("meta"):
        model = torch_gpt(_sizes(config))
        ids = torch.zeros(config.batch_per_device * devices, config.context, dtype=torch.int64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=WEIGHT_DECAY)
    with sw.connect(devices=1) as session:
        return swt.parallelize(session, model, optimizer, torch_loss).lower(ids, ids).hlo_text


LOWERINGS: dict[str, Callable[[gpt2.Config, str, int], str]] = {
    "jax": lower_jax, "keras": lower_keras, "torch": lower_torch,
}  # fmt: skip


def _sizes(config: gpt2.Config) -> Sizes:
    return Sizes(
        vocabulary=config.vocabulary, width=config.width, heads=config.heads, layers=config.layers,
        tokens=config.context,
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    lowering = commands.add_parser("lower", help="write the step's HLO to FOLDER/FRONTEND-DEVICES.hlo")
    lowering.add_argument("frontend", choices=LOWERINGS)
    lowering.add_argument("folder", type=Path)
    lowering.add_argument("--devices", type=int, default=8)
    lowering.add_argument("--size", choices=gpt2.SIZES, default="124M")
    planning = commands.add_parser("plan", help="plan all of the folder's steps on A100s")
    planning.add_argument("folder", type=Path)
    planning.add_argument("--devices", type=int, nargs="+", default=[8])
    planning.add_argument("--explain", action="store_true")
    arguments = parser.parse_args()
    if arguments.command == "lower":
        _lower(arguments)
        return 0
    return max(_compare(arguments.folder, devices, arguments.explain) for devices in arguments.devices)


def _lower(arguments: argparse.Namespace) -> None:
    started = time.perf_counter()
    text = LOWERINGS[arguments.frontend](gpt2.SIZES[arguments.size], arguments.size, arguments.devices)
    seconds = time.perf_counter() - started
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    arguments.folder.mkdir(parents=True, exist_ok=True)
    (arguments.folder / f"{arguments.frontend}-{arguments.devices}.hlo").write_text(text, encoding="utf-8")
    print(
        f"{arguments.frontend} {arguments.size}: {seconds:.1f} s, at most {peak_bytes / 2**20:.0f} MiB, "
        f"{len(text) / 1e6:.1f} MB of text"
    )


def _compare(folder: Path, devices: int, is_explained: bool) -> int:
    """1 if a step is too far from JAX's."""
    cluster = sw.Cluster.from_json(cluster_json(devices, MACHINE))
    reference: sw.Plan | None = None
    is_missed = False
    for name in LOWERINGS:
        text = (folder / f"{name}-{devices}.hlo").read_text(encoding="utf-8")
        plan = sw.plan(text, cluster, stages=1, cache=False)
        assert isinstance(plan, sw.Plan)
        reference = reference or plan
        ratio = plan.cost.step_s / reference.cost.step_s
        is_missed |= abs(ratio - 1) > ALLOWED_RATIO
        print(
            f"{devices} {MACHINE}, {name}: {plan.cost.step_s * 1e3:.2f} ms, {ratio:.3f} of JAX's: "
            f"{plan.cost.compute_s * 1e3:.2f} computing, {plan.cost.communication_s * 1e3:.2f} communicating; "
            f"{plan.mesh}, gap {plan.cost.gap:.2%}, {plan.planning_s:.0f} s of planning",
            flush=True,
        )
        if is_explained and name != "jax":
            for line in _differences(plan, reference):
                print(f"    {line}", flush=True)
    return int(is_missed)


def _differences(plan: sw.Plan, reference: sw.Plan) -> Iterator[str]:
    """Kinds of instructions and collectives whose milliseconds differ, the largest difference first."""
    here, there = _seconds_by_kind(plan), _seconds_by_kind(reference)
    difference = {kind: here[kind][0] - there[kind][0] for kind in {**here, **there}}
    for kind in sorted(difference, key=lambda kind: -abs(difference[kind])):
        if abs(difference[kind]) >= SHOWN_S:
            (seconds, count), (other_s, other_count) = here[kind], there[kind]
            yield (
                f"{difference[kind] * 1e3:+6.2f} ms  {kind}: {seconds * 1e3:.2f} ms of {count}, "
                f"JAX {other_s * 1e3:.2f} ms of {other_count}"
            )


def _seconds_by_kind(plan: sw.Plan) -> dict[str, tuple[float, int]]:
    """Opcode of a kernel, or kind of a collective and what it is over → (seconds a step, count)."""
    totals: defaultdict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))

    def add(kind: str, seconds: float, count: int) -> None:
        totals[kind] = (totals[kind][0] + seconds, totals[kind][1] + count)

    for kind, seconds in _kernels(plan):
        add(kind, seconds, 1)
    for collective in plan.collectives:
        add(f"{collective.kind} over {collective.over}", collective.time_s, collective.count)
    return totals


def _kernels(plan: sw.Plan) -> Iterator[tuple[str, float]]:
    """(kind, seconds on one device) of every instruction, as the planner's cost model has it."""
    profile = hardware_profile(plan.hardware)
    flow = build_dataflow(parse(plan.require_hlo()))
    kernels, cheap = find_kernels(flow, merges=profile.compiler.runs("merges_loops")), cheap_nodes(flow, ())
    entries = {entry.name: entry for entry in plan.instructions}
    for node in flow.nodes:
        instruction = node.instruction
        if node.is_value or not node.weight or instruction.name not in entries:
            continue
        entry = entries[instruction.name]
        operands = [
            sharding.shard_shape(leaf.dimensions, plan.mesh)
            for operand, used in zip(instruction.operands, entry.operands, strict=True)
            for leaf, sharding in zip(operand.shape.leaves, used, strict=True)
        ]
        results = [
            sharding.shard_shape(leaf.dimensions, plan.mesh)
            for leaf, sharding in zip(instruction.shape.leaves, entry.result, strict=True)
        ]
        seconds = compute_time_s(
            instruction, operands, results, profile,
            ends_kernel=kernels.ends[node.index] and not cheap[node.index], traffic=kernels.traffic[node.index],
        )  # fmt: skip
        kind = "elementwise" if instruction.opcode in ELEMENTWISE else instruction.opcode
        yield kind, node.weight * kernels.parts[node.index] * seconds


if __name__ == "__main__":
    sys.exit(main())
