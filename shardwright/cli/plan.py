"""`shardwright plan`: HLO text in, plan and annotated StableHLO out, with no server."""

from __future__ import annotations

import argparse

from shardwright.cli.dumps import add_emit_option, add_trace_option, write_emitted, write_plan_trace
from shardwright.cli.options import add_cluster_option, add_planning_options, cluster_of, planning_options
from shardwright.cli.output import (
    EXIT_OK,
    add_command,
    name_file_in_errors,
    note,
    print_json,
    read_text,
    text_width,
    write_text,
)
from shardwright.cli.progress import planning_progress


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser) -> None:
    parser = add_command(
        commands,
        common,
        "plan",
        summary="plan a program for a cluster",
        description="Plan the HLO text of a training step for a cluster: what is split over what, and what it costs.",
        examples=(
            "shardwright plan step.hlo --cluster 8 --explain",
            "shardwright plan step.hlo --cluster cluster_configs/a100_2x8.json --out plan.json --emit step.sdy.mlir",
            "shardwright plan step.hlo --cluster 8 --mesh 2x4 --force mixed --json",
            "shardwright plan step.hlo --cluster 8 --mesh data=2,model=4 --force \"params['wte']=0:model,1:-\"",
            "shardwright plan step.hlo --cluster cluster_configs/a100_2x8.json --force Parallax --bucket 25MB",
            "shardwright plan step.hlo --cluster 8 --stages 2 --micro-batches 4 --trace step.trace.json",
            "shardwright lower mymodel:step --args 'f32[8,16]' | shardwright plan - --cluster 8",
        ),
    )
    parser.add_argument("file", metavar="FILE", help="HLO text, or - for standard input")
    add_cluster_option(parser, required=True)
    add_planning_options(parser)
    parser.add_argument("--out", metavar="PLAN.json", help="write the plan (schema: docs/plan-schema.json)")
    add_emit_option(parser)
    add_trace_option(parser)
    parser.add_argument("--no-cache", action="store_true", help="plan anew, even what was planned before")
    parser.add_argument("--explain", action="store_true", help="print the plan for people")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Plans, checks, and writes the requested files; by default the explanation."""
    builder, options = planning_options(arguments)
    cluster = cluster_of(arguments.cluster, for_planning=True)
    text = read_text(arguments.file)

    from shardwright.offline import plan_fastest

    with name_file_in_errors(arguments.file), planning_progress() as progress:
        plan = plan_fastest(text, cluster, options, builder, cache=not arguments.no_cache, progress=progress)
    if arguments.out:
        write_text(arguments.out, plan.to_json(indent=1))
        note(f"plan: {arguments.out}")
    if arguments.emit:
        write_emitted(arguments.emit, plan)
    if arguments.trace:
        write_plan_trace(arguments.trace, plan, cluster)
    if arguments.json:
        print_json(plan.as_dict())
    elif arguments.explain or not (arguments.out or arguments.emit or arguments.trace):
        print(plan.explain(width=text_width()))
    return EXIT_OK
