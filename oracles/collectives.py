"""Predicted collectives beside those of XLA's partitioned program: models × kinds of plans × meshes.

Each case is planned, emitted, partitioned by XLA for CPU devices and proven (`Plan.prove`). Small models
(`collective_steps`, the held-out `unusual_steps`) are planned for CPU devices. Models of the planner's benchmark, at
their judged depth, and its held-out models are planned for A100 nodes of eight (`--models gpt2-124M,clip-base`; not in
the default grid). Plans are

- forced: `data`, `fsdp`, `tensor`, `mixed`, on the meshes given;
- searched: `search` on the meshes given (`any`: the search takes the mesh, too);
- searched under a constraint, on any mesh: `half` and `quarter` of data parallelism's peak memory, `remat` (every layer
  rematerialized), `micro-batches` (two).

Prints a table and the differences; exit code 1 if a proof does not hold. About forty minutes on two cores for the
whole grid on eight devices; `--cluster 16` (one CPU node of so many devices, or a name of `CLUSTERS`) and
`--meshes 2x2x2` ask for others.

    python -m oracles.collectives [--models mlp,gpt2] [--plans data,half] [--meshes 8,2x4,any] [--cluster pcie]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import shardwright
from benchmarks.planner.planned import lower
from benchmarks.planner.suite import JUDGED, UNSEEN, Entry, cluster_json
from shardwright.clusters.cluster import Cluster
from shardwright.errors import MemoryBudgetError, MicroBatchError, ShardwrightError
from shardwright.plans.plan import Plan
from shardwright.report.collectives import proof_as_dict
from shardwright.report.proof import Proof
from workloads.collective_steps import MODELS
from workloads.unusual_steps import UNUSUAL

SMALL = {**MODELS, **UNUSUAL}
#: Models of the planner's benchmark by name: model, size, and the slice of it that is judged.
LARGE: dict[str, tuple[str, str, Mapping[str, Any]]] = {
    **{f"{model}-{size}": (model, size, changes) for (model, size), changes in JUDGED.items()},
    **{f"{entry.model}-{entry.size}": (entry.model, entry.size, entry.changes) for entry in UNSEEN},
}
FORCED = ("data", "fsdp", "tensor", "mixed")
#: Plans that choose their mesh themselves: part of data parallelism's memory, or options of `shardwright.plan`.
BUDGETS = {"half": 0.5, "quarter": 0.25}
OPTIONS: dict[str, dict[str, Any]] = {"remat": {"remat": "full"}, "micro-batches": {"micro_batches": 2}}
PLANS = (*FORCED, "search", *BUDGETS, *OPTIONS)
MESHES = {8: ("8", "2x4", "4x2", "any"), 16: ("16", "2x8", "4x4", "any")}


def _build_gpu_cluster(hardware: str, *devices: int, **links: Any) -> Cluster:
    """Build a cluster of GPU nodes; devices: the number of GPUs of each node."""
    nodes = [
        {"ip": f"10.0.0.{number}", "port": 2222, "gpu_ids": list(range(count))}
        for number, count in enumerate(devices, start=1)
    ]
    text = {"name": "truth", "hardware": hardware, "insecure": True, "master": nodes[0], "workers": nodes[1:]}
    return Cluster.from_json(json.dumps({**text, "links": links} if links else text))


#: Clusters that are not one node of CPU devices: nodes of unlike sizes, slow links inside a node.
CLUSTERS: dict[str, Callable[[], Cluster]] = {
    "unequal": lambda: _build_gpu_cluster("a100", 6, 2),
    "unequal-12": lambda: _build_gpu_cluster("v100", 5, 4, 3),
    "pcie": lambda: _build_gpu_cluster("v100", 8, intra_node="pcie-3"),
    "pcie-ethernet": lambda: _build_gpu_cluster("v100", 2, 2, 2, 2, intra_node="pcie-3", inter_node="ethernet-10g"),
}


def find_cluster(name: str) -> Cluster:
    """One of `CLUSTERS`, or for a number one node with so many CPU devices. Raises KeyError for any other name."""
    return Cluster.local(int(name)) if name.isdecimal() else CLUSTERS[name]()


def list_meshes(devices: int) -> tuple[str, ...]:
    """Meshes of one axis and of two, and `any`."""
    chosen = MESHES.get(devices)
    pairs = (f"{first}x{devices // first}" for first in range(2, devices) if devices % first == 0)
    return chosen or (str(devices), *pairs, "any")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One plan and its proof.

    proof: None if planning or compiling failed; `error` has the reason.
    refused: no plan exists: nothing fits the memory, or the micro-batches do not divide the batch.
    """

    model: str
    plan: str
    mesh: str
    proof: Proof | None = None
    error: str = ""
    refused: bool = False

    @property
    def failed(self) -> bool:
        return not self.refused and (self.proof is None or not self.proof.holds)

    @property
    def verdict(self) -> str:
        return "refused" if self.refused else "does not hold" if self.failed else "holds"

    @property
    def summary(self) -> str:
        """One line of progress."""
        message = self.error if self.proof is None else f"{self.proof.difference:.2%} of the bytes differ"
        return f"{self.model} {self.plan} {self.mesh}: {self.verdict}, {message}"


@dataclass(frozen=True)
class Subject:
    """A model on a cluster; `peak_bytes`: peak memory of data parallelism there."""

    name: str
    hlo_text: str
    cluster: Cluster

    def plan(self, **options: Any) -> Plan:
        step_plan = shardwright.plan(self.hlo_text, self.cluster, stages=1, cache=False, **options)
        assert isinstance(step_plan, Plan)
        return step_plan

    @property
    def peak_bytes(self) -> int:
        return self.plan(force="data", mesh=str(self.cluster.device_count)).memory.peak_bytes


def load_subject(model: str, cluster: str) -> Subject:
    """Lower a model by its name. Raises KeyError for an unknown name."""
    target = find_cluster(cluster)
    if model in SMALL:
        return Subject(model, SMALL[model](), target)
    name, size, changes = LARGE[model]
    entry = Entry(model=name, size=size, devices=target.device_count, changes=changes)
    if cluster.isdecimal():
        target = Cluster.from_json(cluster_json(entry.devices, entry.machine))
    return Subject(model, lower(entry).hlo_text, target)


def run_cases(models: Sequence[str], plans: Sequence[str], meshes: Sequence[str], cluster: str) -> Iterator[Case]:
    """Prove every applicable case: forced strategies on named meshes (`mixed` on several axes), the search on each,
    memory limits on any."""
    for model in models:
        subject = load_subject(model, cluster)
        for plan in plans:
            for mesh in meshes if plan in (*FORCED, "search") else ("any",):
                if plan not in FORCED or (mesh != "any" and (plan != "mixed" or "x" in mesh)):
                    yield prove_case(subject, plan, mesh)


def prove_case(subject: Subject, plan: str, mesh: str) -> Case:
    options: dict[str, Any] = dict(OPTIONS.get(plan, {}))
    if plan in FORCED:
        options["force"] = plan
    if mesh != "any":
        options["mesh"] = mesh
    try:
        if plan in BUDGETS:
            options["memory_budget"] = round(BUDGETS[plan] * subject.peak_bytes)
        step_plan = subject.plan(**options)
        return Case(model=subject.name, plan=plan, mesh=str(step_plan.mesh), proof=step_plan.prove())
    except ShardwrightError as error:
        message = f"{type(error).__name__}: {error.message.splitlines()[0]}"
        refused = isinstance(error, MemoryBudgetError | MicroBatchError)
        return Case(model=subject.name, plan=plan, mesh=mesh, error=message, refused=refused)


def build_table(cases: Sequence[Case]) -> Table:
    view = Table("model", "plan", "mesh", "predicted B", "program B", "difference", "lines", "unlike", "proof")
    for case in cases:
        if case.proof is None:
            view.add_row(case.model, case.plan, case.mesh, "", "", "", "", "", f"{case.verdict}: {case.error[:60]}")
            continue
        predicted, observed = case.proof.predicted_wire_bytes, case.proof.observed_wire_bytes
        share = f"{observed / predicted - 1:+.2%}" if predicted else ""
        lines, unlike = str(len(case.proof.lines)), str(len(case.proof.differences))
        view.add_row(
            case.model, case.plan, case.mesh, f"{predicted:,}", f"{observed:,}", share, lines, unlike, case.verdict
        )
    return view


def as_dict(case: Case) -> dict[str, Any]:
    proof = None if case.proof is None else proof_as_dict(case.proof)
    return {
        "model": case.model, "plan": case.plan, "mesh": case.mesh, "verdict": case.verdict, "error": case.error,
        "proof": proof,
    }  # fmt: skip


def max_difference(cases: Sequence[Case]) -> float:
    """The largest difference of a proof: bytes of unmatched collectives over all bytes."""
    return max((case.proof.difference for case in cases if case.proof is not None), default=0.0)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(SMALL), help=f"also {', '.join(LARGE)} (default: %(default)s)")
    parser.add_argument("--plans", default=",".join(PLANS), help="(default: all)")
    parser.add_argument("--cluster", default="8", help=f"devices, or {', '.join(CLUSTERS)} (default: %(default)s)")
    parser.add_argument("--meshes", help="(default: one and two axes, and any)")
    parser.add_argument("--json", metavar="FILE", help="write every line of every proof")
    parser.add_argument("--explain", action="store_true", help="print the proofs that do not hold")
    return parser.parse_args()


def main() -> int:
    options = parse_arguments()
    meshes = options.meshes.split(",") if options.meshes else list_meshes(find_cluster(options.cluster).device_count)
    console = Console(width=None if sys.stdout.isatty() else 140)
    cases = []
    for case in run_cases(options.models.split(","), options.plans.split(","), meshes, options.cluster):
        cases.append(case)
        console.print(case.summary, style="dim", highlight=False)
        if options.explain and case.failed and case.proof is not None:
            console.print(case.proof.explain(width=140), highlight=False)
    console.print(build_table(cases))
    proven = [case for case in cases if not case.refused]
    failed = [case for case in proven if case.failed]
    console.print(
        f"{len(proven) - len(failed)} of {len(proven)} proofs hold, differences of {max_difference(cases):.2%} at most"
    )
    if options.json:
        Path(options.json).write_text(json.dumps([as_dict(case) for case in cases], indent=1))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
