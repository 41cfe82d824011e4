"""Every strategy rule against XLA: each factor, each pair of factors, each scattered sum, on several meshes.

Cuts the distinct instructions out of training steps and of single operations (tests/planner/rules/rule_programs.py),
gives their factors to mesh axes in every way, compiles, runs and compares (tests/planner/rules/rule_validator.py).
Prints wrong results, right results with other collectives than the factors promise and, with --missing, splits realised
by XLA but offered by no rule. Exit code 1 if anything is wrong. All of it takes about a quarter of an hour of CPU;
--sample takes a part, the same every time.

    python -m oracles.rules                                  # operations and models on all meshes
    python -m oracles.rules --mesh 2x2 --only convolution    # names that contain a word
    python -m oracles.rules --mesh 2x4 --sample 1000         # a thousand trials, spread over all cases
    python -m oracles.rules --mesh 3 --mesh 2x3 --uneven     # factors that an axis does not divide
    python -m oracles.rules --mesh 4 --missing --only scatter
    python -m oracles.rules --table                          # every opcode: its rule, or why it has none
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

from shardwright.planner.rules.table import opcode_table
from shardwright.plans.shardings import Mesh
from tests.planner.rules.rule_cases import Case, Trial, cases_of, missing_candidates
from tests.planner.rules.rule_isolation import in_child, judge_isolated
from tests.planner.rules.rule_programs import MODELS, hlo_text, operations
from tests.planner.rules.rule_texts import TEXTS
from tests.planner.rules.rule_validator import Verdict

MESHES = ("2", "4", "2x2", "2x4", "4x2")


def main() -> int:
    options = _build_parser().parse_args()
    if options.table:
        print(opcode_table())
        return 0
    programs = in_child(_load_programs, options.models)
    cases = [
        case
        for case in cases_of(programs, without_factors=options.missing)
        if all(word in case.name for word in options.only)
    ]
    print(f"{len(cases)} distinct instructions of {len(programs)} programs", flush=True)
    rows = []
    for text in options.mesh or MESHES:
        sizes = [int(size) for size in text.split("x")]
        mesh = Mesh.of(dict(zip("xyz", sizes, strict=False)))
        trials = list(_list_missing(cases, mesh) if options.missing else _list_trials(cases, mesh, options))
        rows.append(_judge(text, trials, options))
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")
    return 1 if any(row["wrong"] for row in rows) else 0


def _load_programs(models: str) -> dict[str, str]:
    programs: dict[str, str] = {}
    if models != "only":
        programs = {name: hlo_text(program) for name, program in operations().items()} | TEXTS
    if models != "no":
        programs |= {name: hlo_text(program()) for name, program in MODELS.items()}
    return programs


def _judge(mesh: str, trials: list[Trial], options: argparse.Namespace) -> dict[str, object]:
    """Judge the trials of one mesh, print the conspicuous ones, and return their counts."""
    possible = len(trials)
    if options.sample and options.sample < possible:
        sample = random.Random(options.seed).sample(range(possible), options.sample)
        trials = [trials[number] for number in sorted(sample)]  # those of one case stay together
    began = time.perf_counter()
    verdicts = judge_isolated(trials)
    print(f"mesh {mesh}: {len(trials)} of {possible} trials in {time.perf_counter() - began:.0f} s", flush=True)
    row: dict[str, object] = {"mesh": mesh, "possible": possible, "tried": len(trials), "wrong": 0}
    if options.missing:
        results = [v for v in verdicts if not v.wrong and not v.extra and (not v.trial.summed or _has_all_reduce(v))]
        return row | {"realised": _print_verdicts("realised, but no rule offers it", results)}
    row["wrong"] = _print_verdicts("WRONG", [v for v in verdicts if v.wrong])
    right = [v for v in verdicts if not v.wrong]
    row["other collectives"] = _print_verdicts(
        "right, with other collectives", [v for v in right if v.extra or v.absent]
    )
    idle = [v for v in right if v.trial.summed and not _has_all_reduce(v)]
    row["idle"] = _print_verdicts("contracted, but no all-reduce", idle)
    return row


def _has_all_reduce(verdict: Verdict) -> bool:
    return "all-reduce" in verdict.collectives


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", action="append", help=f"sizes of the axes, e.g. 2x4; default: {', '.join(MESHES)}")
    parser.add_argument("--only", action="append", default=[], help="only cases whose names contain this word")
    parser.add_argument("--models", choices=("yes", "no", "only"), default="yes", help="training steps, too")
    parser.add_argument("--scatter", action="store_true", help="sums split over a dimension of the result, too")
    parser.add_argument("--uneven", action="store_true", help="factors that their axes do not divide, instead")
    parser.add_argument("--missing", action="store_true", help="look for splits that no rule offers (one axis)")
    parser.add_argument("--sample", type=int, default=0, help="at most so many trials a mesh")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--json", help="write the counts to this file")
    parser.add_argument("--table", action="store_true", help="print what is known of every opcode")
    return parser


def _list_trials(cases: list[Case], mesh: Mesh, options: argparse.Namespace) -> Iterator[Trial]:
    for case in cases:
        for assignment in case.assignments(mesh, uneven=options.uneven):
            trial = Trial(case, assignment, mesh)
            yield trial
            if options.scatter:
                yield from trial.scattered()


def _list_missing(cases: list[Case], mesh: Mesh) -> Iterator[Trial]:
    (axis,) = mesh.axes
    for case in cases:
        yield from (Trial(case, {axis.name: candidate}, mesh) for candidate in missing_candidates(case, axis.size))


def _print_verdicts(title: str, verdicts: list[Verdict]) -> int:
    if verdicts:
        opcodes = Counter(verdict.trial.case.instruction.opcode for verdict in verdicts)
        counts = ", ".join(f"{count} {opcode}" for opcode, count in opcodes.most_common())
        print(f"  {title}: {counts}")
        for verdict in sorted(verdicts, key=str)[:100]:
            print(f"    {verdict}")
    return len(verdicts)


if __name__ == "__main__":
    sys.exit(main())
