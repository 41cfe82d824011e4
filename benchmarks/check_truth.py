"""Predicted collectives beside those of XLA's partitioned program: small models, kinds of plans, meshes.

Each case is planned, emitted, partitioned by XLA for CPU devices and proven (`Plan.prove`). Prints a table and
what differs; exit code 1 where a proof does not hold. About twenty minutes on two cores for the whole grid;
`--meshes 2x2x2` proves plans over three axes.

    python benchmarks/check_truth.py [--models mlp,gpt2] [--plans data,search] [--meshes 8,2x4] [--json out.json]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from truth_models import MODELS

import shardwright
from shardwright.errors import ShardwrightError
from shardwright.report.collectives import proof_as_dict
from shardwright.report.proof import Proof

PLANS = ("data", "fsdp", "tensor", "mixed", "search")
MESHES = ("8", "2x4", "4x2")
DEVICES = 8


@dataclass(frozen=True, kw_only=True)
class Case:
    """One plan; `proof` is absent where `error` says why there is none."""

    model: str
    plan: str
    mesh: str
    proof: Proof | None = None
    error: str = ""

    @property
    def failed(self) -> bool:
        return self.proof is None or not self.proof.holds


def cases(models: Sequence[str], plans: Sequence[str], meshes: Sequence[str]) -> Iterator[Case]:
    """Every case that makes sense: mixed strategies need more axes than one."""
    for model in models:
        text = MODELS[model]()
        for plan in plans:
            for mesh in meshes:
                if plan != "mixed" or "x" in mesh:
                    yield prove(model, text, plan, mesh)


def prove(model: str, text: str, plan: str, mesh: str) -> Case:
    try:
        made = shardwright.plan(text, DEVICES, mesh=mesh, force=None if plan == "search" else plan, cache=False)
        return Case(model=model, plan=plan, mesh=mesh, proof=made.prove())
    except ShardwrightError as error:
        return Case(model=model, plan=plan, mesh=mesh, error=f"{type(error).__name__}: {error.message.splitlines()[0]}")


def table(found: Sequence[Case]) -> Table:
    view = Table("model", "plan", "mesh", "predicted B", "program B", "difference", "lines", "unlike", "proof")
    for case in found:
        if case.proof is None:
            view.add_row(case.model, case.plan, case.mesh, "", "", "", "", "", case.error[:60])
            continue
        predicted, observed = case.proof.predicted_wire_bytes, case.proof.observed_wire_bytes
        share = f"{observed / predicted - 1:+.2%}" if predicted else ""
        lines, unlike = str(len(case.proof.lines)), str(len(case.proof.differences))
        verdict = "holds" if case.proof.holds else "[red]does not hold[/red]"
        view.add_row(case.model, case.plan, case.mesh, f"{predicted:,}", f"{observed:,}", share, lines, unlike, verdict)
    return view


def as_dict(case: Case) -> dict[str, Any]:
    proof = None if case.proof is None else proof_as_dict(case.proof)
    return {"model": case.model, "plan": case.plan, "mesh": case.mesh, "error": case.error, "proof": proof}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="(default: all)")
    parser.add_argument("--plans", default=",".join(PLANS), help="(default: all)")
    parser.add_argument("--meshes", default=",".join(MESHES), help="(default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write every line of every proof")
    parser.add_argument("--explain", action="store_true", help="print the proofs that do not hold")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 140)
    found = []
    for case in cases(options.models.split(","), options.plans.split(","), options.meshes.split(",")):
        found.append(case)
        console.print(f"{case.model} {case.plan} {case.mesh}: {'no proof' if case.failed else 'holds'}", style="dim")
        if options.explain and case.proof is not None and not case.proof.holds:
            console.print(case.proof.explain(width=140), highlight=False)
    console.print(table(found))
    failed = [case for case in found if case.failed]
    console.print(f"{len(found) - len(failed)} of {len(found)} proofs hold")
    if options.json:
        Path(options.json).write_text(json.dumps([as_dict(case) for case in found], indent=1))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
