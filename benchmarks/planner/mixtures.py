"""What a mixture of experts costs in either form: DeepSeek's layers, ragged and one-hot, planned and compiled for H100.

Of each plan: predicted step, and what the plan says of experts. Of what XLA:GPU makes of it, without a GPU, for one
device: operations of products beside those that rows need, bytes of collectives beside those of rows that are sent and
returned, the largest array but for scores of attention, and the peak. Then which form is faster, by name. `--layer`:
the ragged layer alone and its step, predicted, what its plan says of experts, with the steps of the other forms.

    python -m benchmarks.planner.mixtures [--devices 8 64] [--experts 16 64] [--forms ragged onehot]
        [--expert-capacity 1.1] [--layer] [--no-compile] [--json FILE]    # make gpu-packages first
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import shardwright as sw
from benchmarks.planner.counter import count
from benchmarks.planner.fused_attention import h100
from benchmarks.planner.rows_work import count_product_flops, largest_array
from examples.moe.deepseek import FORMS, Config
from shardwright.hlo import format_shape
from shardwright.units import format_bytes, format_seconds
from shardwright.xla import CompileService
from shardwright.xla.compilers import find_compiler
from workloads.mixtures import build, build_layer, config_of, row_bytes

_MILLI = 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One plan; seconds, bytes and operations of one device a step.

    expert_flops: all rows' work, shared equally. other_flops: what all other products need, shared equally.
    row_bytes: of the rows sent and returned, shared equally, less those that stay. parts: what the plan says of
    dispatch, experts and combine: seconds, bytes on the wire, operations. As compiled: product_flops: of all products;
    moved_bytes: of all-to-alls; wire_bytes: of all collectives; largest: the largest array but for
    scores of attention.
    """

    devices: int
    experts: int
    form: str
    capacity: float | None
    planning_s: float
    step_s: float
    mesh: str
    expert_flops: float
    other_flops: float
    row_bytes: float
    parts: dict[str, tuple[float, int, float]]
    experts_note: str
    product_flops: float = 0.0
    moved_bytes: float = 0.0
    wire_bytes: float = 0.0
    largest: str = ""
    peak_bytes: int = 0

    @property
    def work(self) -> float:
        """Operations of the experts as compiled, relative to all rows' work; other products shared equally."""
        return (self.product_flops - self.other_flops) / self.expert_flops


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="*", default=[8, 64])
    parser.add_argument("--experts", type=int, nargs="*", default=[16, 64], choices=[16, 64])
    parser.add_argument("--forms", nargs="*", default=list(FORMS), choices=FORMS)
    parser.add_argument("--expert-capacity", type=float, metavar="SHARE")
    parser.add_argument("--layer", action="store_true", help="one ragged layer and its step, planned only")
    parser.add_argument("--no-compile", action="store_true", help="plans only")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    rows = []
    for devices, experts in product(arguments.devices, arguments.experts):
        if arguments.layer:
            print_layer(devices, experts, arguments.expert_capacity)
            continue
        forms = [
            measure(config_of(experts, devices, form), devices, arguments.expert_capacity, not arguments.no_compile)
            for form in arguments.forms
        ]
        rows += forms
        print_better(forms)
        if arguments.json:
            arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


def measure(config: Config, devices: int, capacity: float | None, is_compiled: bool) -> Row:
    """Plan a training step, and compile it if asked to."""
    text = lower(config)
    needed = count_product_flops(lower(replace(config, form="ragged")))
    start = time.process_time()
    plan = _plan(text, devices, capacity, fused_attention="off")
    row = Row(
        devices=devices,
        experts=config.experts,
        form=config.form,
        capacity=capacity,
        planning_s=time.process_time() - start,
        step_s=plan.cost.step_s,
        mesh=str(plan.mesh),
        expert_flops=needed["ragged-dot"] / devices,
        other_flops=needed["dot"] / devices,
        row_bytes=row_bytes(config) / devices * (1 - 1 / devices),
        parts={note.part: (note.time_s, note.wire_bytes, note.flops) for note in plan.mixtures},
        experts_note=next((note for note in plan.notes if note.startswith("experts:")), ""),
    )
    if is_compiled:
        row = _compile(row, plan, config.context)
    print_row(row)
    return row


def print_layer(devices: int, experts: int, capacity: float | None) -> None:
    """Plan a layer's step, and say what its experts take."""
    step, types = build_layer(experts, devices)
    text = str(sw.lower(step, *types, donate_argnums=(0, 1), platform="cuda").as_text())
    plan = _plan(text, devices, capacity, effort="fast")
    needed = count_product_flops(text)["ragged-dot"] / devices
    print(f"{devices:3} H100, {experts} experts, a layer: step {format_seconds(plan.cost.step_s)} on {plan.mesh}")
    for note in plan.mixtures:
        print(
            f"      {note.part:8} {format_seconds(note.time_s)}, {format_bytes(note.wire_bytes)} on the wire, "
            f"{note.flops / needed:.2f} × rows' work"
        )
    print(f"      {next((note for note in plan.notes if note.startswith('experts:')), '')}", flush=True)


def _plan(text: str, devices: int, capacity: float | None, **options: Any) -> Any:
    """One program on all devices, nothing computed again but where the text says so."""
    return sw.plan(
        text,
        h100(devices),
        stages=1,
        micro_batches=1,
        remat="none",
        expert_capacity=capacity,
        cache=False,
        **options,
    )


def lower(config: Config) -> str:
    train_step, types = build(config)
    return str(sw.lower(train_step, *types, donate_argnums=(0, 1), platform="cuda").as_text())


def _compile(row: Row, plan: Any, context: int) -> Row:
    """The row with what XLA:GPU makes of the plan."""
    with CompileService(row.devices, children=1, compiler=find_compiler("h100", row.devices)) as service:
        program = service.compile(plan.require_hlo(), plan, want_executable=False)
    assert program.memory is not None
    counts = count(program.partitioned, row.devices)
    return replace(
        row,
        product_flops=counts.product_flops,
        moved_bytes=counts.wire_by_kind().get("all-to-all", (0, 0.0))[1],
        wire_bytes=counts.wire_bytes,
        largest=format_shape(largest_array(program.partitioned, rows=context)),
        peak_bytes=program.memory.peak_bytes,
    )


def _describe_work(row: Row) -> str:
    """What the experts multiply as compiled; JAX's kernels, whose products no text shows, as the plan counts them."""
    if row.work >= 0.01:
        return f"{row.work:.2f} × rows' work"
    return f"{row.parts['experts'][2] / row.expert_flops:.2f} × rows' work by the plan, in kernels"


def print_row(row: Row) -> None:
    print(
        f"{row.devices:3} H100, {row.experts} experts, {row.form:6}: step {format_seconds(row.step_s)} predicted on "
        f"{row.mesh}, planned in {row.planning_s:.0f} CPU s; compiled: {_describe_work(row)}, all-to-alls "
        f"{row.moved_bytes / row.row_bytes:.2f} × rows sent and returned (all collectives "
        f"{format_bytes(row.wire_bytes)}), largest array {row.largest}, peak {format_bytes(row.peak_bytes)}",
        flush=True,
    )
    for part, (time_s, wire_bytes, flops) in row.parts.items():
        print(
            f"      {part:8} {format_seconds(time_s)}, {format_bytes(wire_bytes)} on the wire, {flops:.3g} operations"
        )
    if row.experts_note:
        print(f"      {row.experts_note}", flush=True)


def print_better(forms: Sequence[Row]) -> None:
    """Which form is faster, by how much."""
    if len(forms) < 2:
        return
    best, other = sorted(forms, key=lambda row: row.step_s)[:2]
    print(
        f"{best.devices:3} H100, {best.experts} experts: {best.form} is better, {_MILLI * best.step_s:.1f} ms, "
        f"{other.form} {_MILLI * other.step_s:.1f} ms ({other.step_s / best.step_s:.2f})\n",
        flush=True,
    )


if __name__ == "__main__":
    main()
