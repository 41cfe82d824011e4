"""Files that a command writes of a plan: StableHLO and traces."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.cli.output import note, write_text
from shardwright.clusters.cluster import Cluster
from shardwright.errors import OptionError

if TYPE_CHECKING:
    from shardwright.user_plans import PipelinePlan, Plan


def add_emit_option(parser: argparse.ArgumentParser, needs: str = "") -> None:
    parser.add_argument(
        "--emit",
        metavar="OUT",
        help="write StableHLO with the plan as Shardy constraints; of a pipeline, into a folder: the programs of its "
        f"stages, and its tasks as a graph in DOT{needs}",
    )


def add_trace_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace", metavar="OUT.json", help="write the predicted step as a trace, which ui.perfetto.dev shows"
    )


def write_emitted(path: str, plan: Plan | PipelinePlan) -> None:
    """Write the module of a plan to a file, or those of a pipeline into a folder. Raises OptionError."""
    from shardwright.plans.pipeline_plan import TASKS_FILE, PipelinePlan

    if not isinstance(plan, PipelinePlan):
        write_text(path, plan.emit())
        note(f"StableHLO: {path}")
        return
    emitted = plan.emit()
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"cannot be made a folder ({error.strerror})", where=path, remedy="name another") from None
    for name, text in emitted.items():
        write_text(str(Path(path) / f"{name}.mlir"), text)
    write_text(str(Path(path) / TASKS_FILE), plan.tasks.to_dot())
    note(f"StableHLO of {len(emitted)} programs and {TASKS_FILE}: {path}")


def write_plan_trace(path: str, plan: Plan | PipelinePlan, cluster: Cluster | None = None) -> None:
    """Write the predicted timeline of a plan. cluster: tells the devices of each node. Raises OptionError."""
    from shardwright.report.plan_trace import plan_trace

    nodes = [] if cluster is None else [n for n, node in enumerate(cluster.nodes) for _ in range(node.device_count)]
    trace = plan_trace(plan, node_of=lambda device: nodes[device] if device < len(nodes) else 0)
    write_text(path, json.dumps(trace, separators=(",", ":")))
    note(f"trace: {path}; ui.perfetto.dev opens it")
