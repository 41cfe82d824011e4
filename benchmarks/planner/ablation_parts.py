"""Ablation of the parts of one mesh's chain: time and quality with one of them switched off.

    python -m benchmarks.planner.ablation_parts [--case gpt2-12] [--json FILE]

The planner has no switches: each search is built of the planner's own pieces, one of them replaced, and runs in a child
of its own, without shared caches. Times are CPU seconds from the parsed program to its solution on one mesh. Without a
part:

segments    the program is one segment, without equal segments or runs
reuse       every segment is reduced by itself, also one equal to another
runs        layers are untied: every repeat of a run is solved by itself
reductions  variables of degree one and two are not eliminated
ILP         the solution is the best assignment of message passing and local search
hubs        no shared layouts inside a segment: each reader reshards a value by itself
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.planner.planned import lower
from benchmarks.planner.suite import Entry, cluster_json
from shardwright.clusters.cluster import Cluster
from shardwright.options.plan_options import PlanOptions
from shardwright.planner.search.search import Search
from shardwright.planner.segments.bound import lower_bound
from shardwright.planner.segments.dominator_cut import Segments, build_instances, find_runs
from shardwright.planner.segments.segment_chain import Chain, ChainSolution, SegmentKind
from shardwright.planner.segments.variables import build_variables, variables_of
from shardwright.planner.solver import dual, ilp, pbqp
from shardwright.planner.solver.ilp import Solution
from shardwright.planner.solver.pbqp import Problem, Reduction
from shardwright.planner.solver.tuning import EXACT_STATES, GAP_TOLERANCE, TIGHT
from shardwright.planner.tuning import MAX_TIE_SHARE
from shardwright.plans.shardings import Mesh

_ROOT = Path(__file__).resolve().parents[2]
_LIMIT_S = 600.0
_INTEGER_PROGRAM_S = 60.0

PARTS = ("segments", "reuse", "runs", "reductions", "ILP", "hubs")

#: Case → entry; all on one node of eight A100, mesh data=2 × model=4.
CASES = {
    "gpt2-2": Entry(model="gpt2", size="124M", devices=8, changes={"layers": 2}),
    "gpt2-12": Entry(model="gpt2", size="124M", devices=8),
    "gpt2-48": Entry(model="gpt2", size="124M", devices=8, changes={"layers": 48}),
    "moe-4": Entry(model="moe", size="8e", devices=8, changes={"layers": 4}),
    "unet": Entry(model="unet", size="128", devices=8, changes={"blocks": 1}),
    "dlrm": Entry(model="dlrm", size="1M", devices=8),
}
_MESH = Mesh.of({"data": 2, "model": 4})


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One case with one part switched off ("" for none).

    cpu_s: of the search. step_s: price of its plan. bound_s: lower bound of its own problem. variables, states: size of
    the core left to message passing and the ILP.
    """

    case: str
    off: str
    cpu_s: float
    step_s: float
    bound_s: float
    variables: int
    states: int


# ---- one search --------------------------------------------------------------------


class _AblatedChain(Chain):
    """A chain reduced and solved without the part `off`."""

    __slots__ = ("core_size", "off")

    def without(self, off: str) -> _AblatedChain:
        self.off = off
        self.core_size = (0, 0)
        return self

    def kind(self, segment: int) -> SegmentKind:
        if self.off == "reductions" and self.instances[segment].kind not in self._kinds:
            problem = self.problem(segment)
            everything = tuple(range(len(problem.costs)))
            self._kinds[self.instances[segment].kind] = SegmentKind(
                boundary=everything, reduction=pbqp.reduce(problem, everything)
            )
        return super().kind(segment)

    def solve(self, time_limit_s: float, close: float = 0.0) -> ChainSolution:
        problem, variables, states = self.build_tied_problem()
        reduction = self._reduce(problem)
        solution = self._solve_core(reduction.core, time_limit_s)
        self.core_size = len(reduction.core.costs), sum(map(len, reduction.core.costs))
        result = reduction.complete(solution.states)
        chosen = {key: int(states[key][result[i]]) for key, i in variables.items()}
        constant = self.constant + reduction.constant
        return ChainSolution(
            states=self.expand_tied(chosen),
            value=solution.value + constant,
            tied_bound=solution.lower_bound + constant,
        )

    def _reduce(self, problem: Problem) -> Reduction:
        """Reduce a problem. Without reductions only infeasible states are dropped: message passing requires it."""
        return pbqp.reduce(problem, range(len(problem.costs)) if self.off == "reductions" else ())

    def _solve_core(self, core: Problem, time_limit_s: float) -> Solution:
        """Solve like `planner.solver.solve`, with or without the ILP."""
        if not core.costs:
            return Solution(states=np.zeros(0, np.int64), value=0.0, lower_bound=0.0)
        close = TIGHT if sum(map(len, core.costs)) <= EXACT_STATES else GAP_TOLERANCE
        bounded = dual.tighten(core, close)
        solution = Solution(states=bounded.states, value=bounded.value, lower_bound=bounded.lower_bound)
        if self.off == "ILP" or solution.value - solution.lower_bound <= close * abs(solution.value):
            return solution
        survivors = bounded.surviving_states(bounded.value)
        rest = self._reduce(core.restrict(survivors))
        integer_solution = ilp.solve(rest.core, time_limit_s=time_limit_s)
        value = rest.constant + integer_solution.value
        bound = max(solution.lower_bound, min(rest.constant + integer_solution.lower_bound, solution.value))
        if value >= solution.value:
            return replace(solution, lower_bound=bound)
        chosen = rest.complete(integer_solution.states)
        states = np.array([kept_states[i] for kept_states, i in zip(survivors, chosen, strict=True)], np.int64)
        return Solution(states=states, value=value, lower_bound=min(bound, value))


def measure(case: str, off: str) -> Measurement:
    """Search one case without the part `off`."""
    entry = CASES[case]
    cluster = Cluster.from_json(cluster_json(entry.devices, entry.machine))
    search = Search(lower(entry).hlo_text, cluster, PlanOptions(mesh=_MESH.sizes))
    started_s = time.process_time()
    chain = _build_chain_without(search, off)
    solution = chain.solve(_INTEGER_PROGRAM_S)
    cpu_s = time.process_time() - started_s
    graph = chain.graph
    bound_s = lower_bound(chain, _INTEGER_PROGRAM_S) if chain.runs else solution.tied_bound
    variables, states = chain.core_size
    return Measurement(
        case=case,
        off=off,
        cpu_s=cpu_s,
        step_s=search.evaluate(chain, solution, ()).cost.step_s,
        bound_s=bound_s + graph.min_recompute_s() - MAX_TIE_SHARE * graph.min_compute_s(),
        variables=variables,
        states=states,
    )


def _build_chain_without(search: Search, off: str) -> _AblatedChain:
    program, flow = search.program, search.flow
    chain = search.build_chain(_MESH, program.resolve_force(search.options, _MESH), frozenset())
    graph, instances, runs = chain.graph, chain.instances, chain.runs
    layout = graph.variables
    if off == "segments":
        free = layout.is_cheap_to_recompute
        segments = Segments(of=tuple(-1 if is_free else 0 for is_free in free), count=1, cuts=())
        keys = dict.fromkeys(program.fed_arguments, ("arriving",))
        layout = build_variables(
            flow, free, segments, {}, keys, program.kernels, program.rules, program.gradients, program.rounded_uses
        )
    if off == "hubs":
        shared_layouts = {
            hub: weight
            for hub, weight in layout.shared_layouts.items()
            if hub in layout.cross_segment or hub in layout.always_reduced
        }
        layout = replace(layout, shared_layouts=shared_layouts)
    if layout is not graph.variables:
        graph = replace(graph, variables=layout, _sets={})
        instances = build_instances(flow, layout.segments, lambda nodes: variables_of(layout, nodes), layout.describe)
        runs = find_runs(instances)
    if off == "reuse":
        instances = tuple(replace(instance, kind=number) for number, instance in enumerate(instances))
    return _AblatedChain(graph=graph, instances=instances, runs=() if off == "runs" else runs).without(off)


# ---- all of them -------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=CASES, help="may repeat (default: all)")
    parser.add_argument("--json", metavar="FILE", help="write the rows")
    parser.add_argument("--child", nargs=2, metavar=("CASE", "OFF"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(asdict(measure(*arguments.child))))
        return
    rows: list[dict[str, Any]] = []
    for case in arguments.case or CASES:
        for off in ("", *PARTS):
            rows.append(_run_child(case, off))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    Console(width=None if sys.stdout.isatty() else 120).print(_build_table(rows))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=1) + "\n")


def _run_child(case: str, off: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.planner.ablation_parts", "--child", case, off]
    try:
        child = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return {"case": case, "off": off, "error": f"not done after {_LIMIT_S:.0f} s"}
    if child.returncode:
        return {"case": case, "off": off, "error": (child.stderr.splitlines() or ["no message"])[-1]}
    answer: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    return answer


def _build_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None)
    for heading in ("case", "without", "CPU", "times", "step", "slower by", "gap", "core"):
        table.add_column(heading, justify="left" if heading in ("case", "without") else "right", no_wrap=True)
    whole: Mapping[str, Any] = {}
    for row in rows:
        whole = whole if row["off"] else row
        if "error" in row:
            table.add_row(row["case"], row["off"] or "nothing", row["error"])
            continue
        has_whole = "error" not in whole
        table.add_row(
            row["case"],
            row["off"] or "nothing",
            f"{row['cpu_s']:.2f} s",
            f"{row['cpu_s'] / whole['cpu_s']:.1f}" if has_whole else "",
            f"{1e3 * row['step_s']:.3f} ms",
            f"{row['step_s'] / whole['step_s'] - 1:+.2%}" if has_whole else "",
            f"{max(0.0, 1 - row['bound_s'] / row['step_s']):.3%}",
            f"{row['variables']} variables, {row['states']} states",
        )
    return table


if __name__ == "__main__":
    main()
