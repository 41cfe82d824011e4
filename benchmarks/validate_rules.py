"""Every strategy rule against XLA: each factor, each pair of factors, each scattered sum, on several meshes.

Cuts the distinct instructions out of training steps and of single operations (tests/planner/rules/rule_programs.py),
gives their factors to mesh axes in every way, compiles, runs and compares (tests/planner/rules/rule_validator.py).
Prints what is wrong, what XLA realises with more collectives than the factor promises and, with --missing, splits
that XLA realises but no rule offers. Exit code 1 where anything is wrong. All of it takes about ten minutes.

    python benchmarks/validate_rules.py                                  # operations and models on all meshes
    python benchmarks/validate_rules.py --mesh 2x2 --only convolution    # names that contain a word
    python benchmarks/validate_rules.py --mesh 4 --missing --only scatter
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "planner" / "rules"))

from rule_cases import Case, Trial, cases_of, missing_candidates
from rule_programs import MODELS, hlo_text, operations
from rule_validator import Verdict, judge_all

from shardwright.plans import Mesh

MESHES = ("2", "4", "2x2", "2x4", "4x2")


def main() -> int:
    options = _parser().parse_args()
    programs = {} if options.models == "only" else {name: hlo_text(program) for name, program in operations().items()}
    if options.models != "no":
        programs |= {name: hlo_text(program()) for name, program in MODELS.items()}
    cases = [case for case in cases_of(programs) if all(word in case.name for word in options.only)]
    print(f"{len(cases)} distinct instructions of {len(programs)} programs", flush=True)
    wrong = 0
    for text in options.mesh or MESHES:
        sizes = [int(size) for size in text.split("x")]
        mesh = Mesh.of(dict(zip("xyz", sizes, strict=False)))
        began = time.perf_counter()
        trials = list(_missing(cases, mesh) if options.missing else _trials(cases, mesh, options.scatter))
        verdicts = judge_all(trials)
        print(f"mesh {mesh}: {len(trials)} trials in {time.perf_counter() - began:.0f} s", flush=True)
        if options.missing:
            _print("realised, but no rule offers it", [v for v in verdicts if not v.wrong and _as_promised(v)])
            continue
        wrong += _print("WRONG", [v for v in verdicts if v.wrong])
        _print("right, with collectives that were not promised", [v for v in verdicts if not v.wrong and v.extra])
        idle = [v for v in verdicts if not v.wrong and v.trial.summed and "all-reduce" not in v.collectives]
        _print("contracted, but no all-reduce", idle)
    return 1 if wrong else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", action="append", help=f"sizes of the axes, e.g. 2x4; default: {', '.join(MESHES)}")
    parser.add_argument("--only", action="append", default=[], help="only cases whose names contain this word")
    parser.add_argument("--models", choices=("yes", "no", "only"), default="yes", help="training steps, too")
    parser.add_argument("--scatter", action="store_true", help="sums split over a dimension of the result, too")
    parser.add_argument("--missing", action="store_true", help="look for splits that no rule offers (one axis of 4)")
    return parser


def _trials(cases: list[Case], mesh: Mesh, scatter: bool) -> Iterator[Trial]:
    for case in cases:
        for assignment in case.assignments(mesh):
            trial = Trial(case, assignment, mesh)
            yield trial
            if scatter:
                yield from trial.scattered()


def _missing(cases: list[Case], mesh: Mesh) -> Iterator[Trial]:
    (axis,) = mesh.axes
    for case in cases:
        yield from (Trial(case, {axis.name: candidate}, mesh) for candidate in missing_candidates(case, axis.size))


def _as_promised(verdict: Verdict) -> bool:
    return not verdict.extra and verdict.trial.summed == ("all-reduce" in verdict.collectives)


def _print(title: str, verdicts: list[Verdict]) -> int:
    if verdicts:
        opcodes = Counter(verdict.trial.case.instruction.opcode for verdict in verdicts)
        counts = ", ".join(f"{count} {opcode}" for opcode, count in opcodes.most_common())
        print(f"  {title}: {counts}")
        for verdict in sorted(verdicts, key=str)[:100]:
            print(f"    {verdict}")
    return len(verdicts)


if __name__ == "__main__":
    sys.exit(main())
