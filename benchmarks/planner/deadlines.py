"""Delay of answers after a deadline: seconds from the text to a plan, or to the error that none fits.

    python -m benchmarks.planner.deadlines --model gpt2 --size 1.5B --devices 8 16 --budgets 4 2.5 --deadlines 2 5 8
    python -m benchmarks.planner.deadlines --model gpt2 --size 124M --layers 96 --budgets none --deadlines 1 2 5

Budgets are GiB of a device; `none`: the device's memory. Each is planned in a process of its own. `promised`: the
deadline with its grace. CPU seconds are printed, too: other load on the machine delays an answer.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.planner.children import plan_in_child
from benchmarks.planner.planned import lower
from benchmarks.planner.suite import Entry


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--size", default="1.5B")
    parser.add_argument("--layers", type=int, help="layers of the model")
    parser.add_argument("--devices", type=int, nargs="*", default=[8])
    parser.add_argument("--budgets", nargs="*", default=["none"], metavar="GiB", help="of a device, or `none`")
    parser.add_argument("--deadlines", type=float, nargs="*", default=[2.0, 5.0, 8.0], metavar="S")
    parser.add_argument("--options", type=json.loads, default={}, metavar="JSON", help="further options of the plan")
    arguments = parser.parse_args()
    changes = {"layers": arguments.layers} if arguments.layers else {}
    with tempfile.TemporaryDirectory(prefix="bench-planner-") as folder:
        for devices in arguments.devices:
            entry = Entry(model=arguments.model, size=arguments.size, devices=devices, changes=changes)
            source = Path(folder) / "step.hlo"
            source.write_text(lower(entry).hlo_text)
            for budget in arguments.budgets:
                for deadline_s in arguments.deadlines:
                    limit = None if budget == "none" else round(float(budget) * 2**30)
                    options = {**arguments.options, "memory_budget": limit, "deadline_s": deadline_s}
                    answer = plan_in_child("benchmarks.planner.deadlines", entry, source, options=options)
                    print(f"{entry.name:14} {budget:>5} GiB  {_format_answer(answer)}", flush=True)


def _format_answer(answer: dict[str, Any]) -> str:
    times = f"deadline {answer['deadline_s']:4.1f} s, promised {answer['promised_s']:4.1f} s"
    return f"{times}, answered after {answer['wall_s']:5.2f} s ({answer['cpu_s']:5.2f} s CPU): {answer['answer']}"


def child() -> None:
    """Plan the job on stdin; print the answer and its seconds."""
    from shardwright.clusters.cluster import Cluster
    from shardwright.errors import PlanError
    from shardwright.options.plan_options import PlanOptions
    from shardwright.planner.clock import answer_due_s
    from shardwright.planner.planning import plan_step
    from shardwright.plans.plan import Plan

    job: dict[str, Any] = json.load(sys.stdin)
    text, cluster = Path(job["hlo"]).read_text(), Cluster.from_json(job["cluster"])
    options = PlanOptions(**job["options"])
    deadline_s = options.deadline_s or 0.0
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    try:
        step_plan = plan_step(text, cluster, options)
        step_s = step_plan.cost.step_s if isinstance(step_plan, Plan) else step_plan.step_s
        answer = f"{type(step_plan).__name__}, {step_s * 1e3:.1f} ms a step"
    except PlanError as error:
        answer = f"{type(error).__name__}: {error.message[:90]}"
    report = {
        "deadline_s": deadline_s,
        "promised_s": answer_due_s(deadline_s),
        "wall_s": time.perf_counter() - start_s,
        "cpu_s": time.process_time() - start_cpu_s,
        "answer": answer,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
