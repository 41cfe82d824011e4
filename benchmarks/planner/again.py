"""Replanning: after one annotation, with twice the batch, without the last node.

    python -m benchmarks.planner.again                                  # the cases below
    python -m benchmarks.planner.again --case gpt2-124M-16 --memory 0.6 # with part of what the fastest plan needs
    python -m benchmarks.planner.again --case gpt2-124M-24 --situation "lost node"

Each changed program is planned twice: from nothing, and with the search record of the first one. Prints CPU seconds of
both, their ratio, and the ratio of the two plans' predicted step times, in one process.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

import shardwright as sw
from benchmarks.planner.suite import Entry, cluster_json
from shardwright.client.annotate import keep_annotations
from shardwright.clusters.cluster import Cluster
from shardwright.options.plan_options import PlanOptions
from shardwright.planner.cache.plan_cache import plan_with_cache
from shardwright.planner.cache.store import MemoryStore, Store
from shardwright.plans.plan import Plan
from workloads.hooks import Axes, constrained_by
from workloads.models.registry import MODELS

#: (case, limit as a part of the memory of its fastest plan; None: the device's memory).
CASES: tuple[tuple[Entry, float | None], ...] = (
    (Entry(model="gpt2", size="124M", devices=16), None),
    (Entry(model="gpt2", size="124M", devices=16, changes={"layers": 2}), None),
)


#: Changes of the first program. A cluster of one node loses half of its devices instead of the node.
SITUATIONS = ("annotation", "batch × 2", "lost node")


@dataclass(frozen=True, kw_only=True)
class Replanning:
    """One situation: CPU seconds of planning from nothing and of replanning, ratio of the two plans' steps.

    follows: whether the earlier search's record led to the plan; else the search was a whole one.
    """

    situation: str
    from_nothing_s: float
    again_s: float
    step_ratio: float
    follows: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", metavar="NAME", help="MODEL-SIZE-DEVICES; may be repeated")
    parser.add_argument("--layers", type=int, help="layers of these cases' models")
    parser.add_argument("--situation", action="append", choices=SITUATIONS, help="may be repeated; default: all")
    parser.add_argument("--memory", type=float, metavar="PART", help="of what the fastest plan needs")
    arguments = parser.parse_args()
    cases = [(_parse_entry(name, arguments.layers), arguments.memory) for name in arguments.case or ()] or CASES
    print(f"{'case':34} {'situation':12} {'from nothing':>12} {'again':>8} {'ratio':>6} {'step':>7}")
    for entry, memory in cases:
        first_s, replannings = measure(entry, memory, arguments.situation or SITUATIONS)
        name = " ".join([entry.name, *(f"{key}={value}" for key, value in entry.changes.items())])
        name += f" {memory:.0%}" if memory else ""
        print(f"{name:34} {'first':12} {first_s:10.2f} s", flush=True)
        for replanning in replannings:
            ratio = replanning.again_s / replanning.from_nothing_s
            seconds = f"{replanning.from_nothing_s:10.2f} s {replanning.again_s:6.2f} s"
            how = "" if replanning.follows else "  searched whole"
            print(
                f"{'':34} {replanning.situation:12} {seconds} {ratio:6.2f} {replanning.step_ratio:7.4f}{how}",
                flush=True,
            )


def measure(entry: Entry, memory: float | None, situations: Sequence[str]) -> tuple[float, Iterator[Replanning]]:
    """CPU seconds of the first plan, and the replannings. memory: limit as a part of the fastest plan's."""
    options = PlanOptions(stages=1)
    cluster = Cluster.from_json(cluster_json(entry.devices, entry.machine))
    text = _lower_text(entry)
    if memory is not None:
        peak_bytes = _plan(text, cluster, options, None)[1].memory.peak_bytes
        options = replace(options, memory_budget=round(memory * peak_bytes))
    store = MemoryStore()
    first_s, _ = _plan(text, cluster, options, store)
    return first_s, (_replan(situation, entry, text, cluster, options, store) for situation in situations)


def _change_program(situation: str, entry: Entry, text: str, cluster: Cluster) -> tuple[str, Cluster]:
    """The HLO text and the cluster of a situation."""
    if situation == "annotation":
        return _lower_text(entry, annotated=True), cluster
    if situation == "batch × 2":
        return _lower_text(replace(entry, devices=2 * entry.devices)), cluster
    lost_devices = cluster.nodes[-1].device_count if len(cluster.nodes) > 1 else entry.devices // 2
    return text, Cluster.from_json(cluster_json(entry.devices - lost_devices, entry.machine))


def _replan(
    situation: str, entry: Entry, text: str, cluster: Cluster, options: PlanOptions, store: MemoryStore
) -> Replanning:
    changed_text, changed_cluster = _change_program(situation, entry, text, cluster)
    from_nothing_s, fresh_plan = _plan(changed_text, changed_cluster, options, None)
    again_s, replanned_plan = _plan(changed_text, changed_cluster, options, store)
    return Replanning(
        situation=situation,
        from_nothing_s=from_nothing_s,
        again_s=again_s,
        step_ratio=replanned_plan.cost.step_s / fresh_plan.cost.step_s,
        follows=any("like an earlier plan" in note for note in replanned_plan.notes),
    )


def _plan(text: str, cluster: Cluster, options: PlanOptions, store: Store | None) -> tuple[float, Plan]:
    start_s = time.process_time()
    step_plan = plan_with_cache(text, cluster, options, store=store)
    assert isinstance(step_plan, Plan)
    return time.process_time() - start_s, step_plan


def _lower_text(entry: Entry, *, annotated: bool = False) -> str:
    """The HLO text of a case. annotated: the width of the first named hidden layer must not be split."""
    marked = 0

    def mark(x: jax.Array, axes: Axes) -> jax.Array:
        nonlocal marked
        if marked or not {"mlp", "channels", "gates"}.intersection(axes):
            return x
        marked += 1
        return sw.annotate(x, {x.ndim - 1: None})

    case = MODELS[entry.model].build(entry.size, entry.devices, **entry.changes)
    if not annotated:
        return str(case.lower().as_text("hlo", debug_info=True))
    with keep_annotations(), constrained_by(mark):
        return str(case.lower().as_text("hlo", debug_info=True))


def _parse_entry(name: str, layers: int | None) -> Entry:
    model, size, devices = name.split("-")
    changes: dict[str, Any] = {} if layers is None else {"layers": layers}
    return Entry(model=model, size=size, devices=int(devices), changes=changes)


if __name__ == "__main__":
    main()
