"""`shardwright verify`: compares the collectives of XLA's partitioned program with the plan's prediction."""

from __future__ import annotations

import argparse
import math
import shutil
from typing import TYPE_CHECKING, Any

from shardwright.cli.output import EXIT_OK, EXIT_UNHEALTHY, add_command, print_json, read_plan
from shardwright.errors import OptionError
from shardwright.options.user_options import check_deadline

if TYPE_CHECKING:
    from shardwright.report.proof import Proof

#: Columns that the tables need to stay readable.
_MIN_WIDTH = 110


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser) -> None:
    parser = add_command(
        commands,
        common,
        "verify",
        summary="hold a plan's collectives against those of XLA's partitioned program",
        description=(
            "Emit a plan, have XLA partition it (on CPU devices of this machine, in a child process), and compare the "
            "collectives of the program with the plan's lines: kinds, axes, executions, bytes. A collective without a "
            "line of the plan or over other axes, or differences over the tolerance, are a failure. Of a pipeline, "
            "every program is compared. With --on, the compiler of those devices does it, to the end and without a "
            "device; its memory is shown beside the plan's."
        ),
        examples=(
            "shardwright verify plan.json --hlo step.hlo",
            "shardwright verify plan.json --hlo step.hlo --on a100",
            "shardwright verify plan.json --hlo step.hlo --all",
            "shardwright verify plan.json --hlo step.hlo --json | jq '.lines[] | select(.status != \"agrees\")'",
        ),
    )
    parser.add_argument("file", metavar="PLAN.json", help="a plan, or - for standard input")
    parser.add_argument(
        "--hlo", metavar="FILE", help="the program the plan was made for, where its file does not hold it"
    )
    parser.add_argument(
        "--on",
        metavar="DEVICES",
        help="compile for these devices, which need not be here: a100, h100 or tpu-v5e",
    )
    parser.add_argument("--packages", metavar="FOLDER", help="with the compiler for --on")
    parser.add_argument(
        "--tolerance",
        metavar="PART",
        type=float,
        default=0.02,
        help="part of the bytes that may differ (0.02)",
    )
    parser.add_argument("--compiled", action="store_true", help="compile to the end: minutes for deep models")
    parser.add_argument("--deadline", metavar="SECONDS", type=float, help="give up after this long")
    parser.add_argument("--all", action="store_true", help="print every line, not only differences")
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if not 0 <= arguments.tolerance < math.inf:
        raise OptionError(f"{arguments.tolerance} is no part", where="--tolerance", remedy="write one, such as 0.02")
    check_deadline(arguments.deadline, where="--deadline")
    if arguments.packages and not arguments.on:
        raise OptionError("is for --on", where="--packages", remedy="say which devices: --on a100")

    from shardwright.plans.pipeline_plan import PipelinePlan
    from shardwright.report.collectives import proof_as_dict
    from shardwright.user_plans import compile_and_prove, prove_programs

    plan, _ = read_plan(arguments.file, arguments.hlo)
    if isinstance(plan, PipelinePlan):
        proofs = prove_programs(plan, **_options(arguments))
        holds = all(proof.holds for proof in proofs.values())
        if arguments.json:
            print_json({"holds": holds, "programs": {name: proof_as_dict(proof) for name, proof in proofs.items()}})
        else:
            print("\n".join(f"{name}: {_explain_proof(proof, arguments)}" for name, proof in proofs.items()))
    elif plan.hlo_text is None:
        raise OptionError("is needed: this plan does not hold its program", where="--hlo", remedy="pass the HLO text")
    else:
        proof = compile_and_prove(plan, **_options(arguments))
        holds = proof.holds
        if arguments.json:
            print_json(proof_as_dict(proof))
        else:
            print(_explain_proof(proof, arguments))
    return EXIT_OK if holds else EXIT_UNHEALTHY


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "tolerance": arguments.tolerance,
        "inspect": "compiled" if arguments.compiled else "partition-pass",
        "deadline_s": arguments.deadline,
        "on": arguments.on,
        "packages": arguments.packages,
    }


def _explain_proof(proof: Proof, arguments: argparse.Namespace) -> str:
    width = max(_MIN_WIDTH, shutil.get_terminal_size().columns)
    return proof.explain(everything=arguments.all, width=width)
