"""Plan every published size of the examples for large clusters, without a server: time, plan and memory.

python -m benchmarks.published.sizes [--only gpt2:175B] [--cluster cluster_configs/a100_64x8.json] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import optax
from rich.console import Console
from rich.table import Table

import shardwright as sw
from examples.gpt2 import model as gpt2
from examples.moe import model as moe
from examples.wide_resnet import model as wide_resnet
from shardwright.plans.pipeline_plan import PipelinePlan

_MODELS = {"gpt2": gpt2, "moe": moe, "wide_resnet": wide_resnet}
_CLUSTER = Path(__file__).resolve().parent.parent.parent / "cluster_configs" / "a100_64x8.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One size on one cluster; mesh, step_s and peak_bytes are None if the planner refused, with its `refusal`."""

    case: str
    cluster: str
    text_bytes: int
    lower_s: float
    plan_s: float
    mesh: str | None = None
    step_s: float | None = None
    peak_bytes: int | None = None
    refusal: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="MODEL[:PRESET]", help="default: every published size")
    parser.add_argument("--cluster", action="append", help=f"cluster file, may repeat (default: {_CLUSTER.name})")
    parser.add_argument("--batch", type=int, help="instead of the presets'")
    parser.add_argument("--json", metavar="FILE", help="write the rows")
    arguments = parser.parse_args()
    clusters = [sw.Cluster.load(path) for path in arguments.cluster or [_CLUSTER]]
    rows = []
    for name, model, preset in _list_cases(arguments.only):
        for cluster in clusters:
            rows.append(_plan_preset(f"{name}:{preset}", model, preset, arguments.batch, cluster))
            print(f"{rows[-1].case} on {cluster.name}: {rows[-1].plan_s:.1f} s", file=sys.stderr, flush=True)
    Console(width=None if sys.stdout.isatty() else 140).print(_build_table(rows))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def _list_cases(only: str | None) -> Iterator[tuple[str, ModuleType, str]]:
    for name, model in _MODELS.items():
        for preset in model.PRESETS:
            is_chosen = only is None or only in (name, f"{name}:{preset}")
            if is_chosen and preset not in ("tiny", "small"):
                yield name, model, preset


def _plan_preset(case: str, model: ModuleType, preset: str, batch: int | None, cluster: sw.Cluster) -> Row:
    config = model.PRESETS[preset]
    config = replace(config, batch=batch or config.batch)
    types = wide_resnet.batch_types(config) if model is wide_resnet else gpt2.batch_types(config)
    init, train_step, _ = model.make_steps(config, optax.adamw(1e-4))
    start_s = time.monotonic()
    state = jax.eval_shape(init, jax.random.key(0))
    text = sw.lower(train_step, *state, *types, donate_argnums=(0, 1), platform=cluster.platform).as_text()
    end_lower_s = time.monotonic()
    lower_s = end_lower_s - start_s
    figures: dict[str, Any] = {"case": case, "cluster": cluster.name, "text_bytes": len(text), "lower_s": lower_s}
    try:
        plan = sw.plan(text, cluster, cache=False)
    except sw.PlanError as error:
        return Row(**figures, plan_s=time.monotonic() - end_lower_s, refusal=error.message)
    plan_s = time.monotonic() - end_lower_s
    if isinstance(plan, PipelinePlan):
        stages = f"{len(plan.stages)} × {plan.stages[0].mesh}, {plan.micro_batches} micro-batches, {plan.schedule}"
        peak = max(stage.memory.peak_bytes for stage in plan.stages)
        return Row(**figures, plan_s=plan_s, mesh=stages, step_s=plan.step_s, peak_bytes=peak)
    return Row(
        **figures,
        plan_s=plan_s,
        mesh=str(plan.mesh),
        step_s=plan.cost.step_s,
        peak_bytes=plan.memory.peak_bytes,
    )


def _build_table(rows: list[Row]) -> Table:
    table = Table(box=None)
    for heading in ("model", "cluster", "text", "lower", "plan", "mesh", "step", "memory"):
        table.add_column(heading, no_wrap=heading != "mesh")
    for row in rows:
        figures = (
            row.case,
            row.cluster,
            f"{row.text_bytes / 1e6:.1f} MB",
            f"{row.lower_s:.1f} s",
            f"{row.plan_s:.1f} s",
        )
        if row.mesh is None or row.step_s is None or row.peak_bytes is None:
            table.add_row(*figures, f"none: {row.refusal}", "", "")
        else:
            table.add_row(*figures, row.mesh, f"{row.step_s:.2f} s", f"{row.peak_bytes / 2**30:.1f} GiB")
    return table


if __name__ == "__main__":
    main()
