"""`shardwright explain`: a plan file in readable form, checked against its program when given."""

from __future__ import annotations

import argparse

from shardwright.cli.dumps import add_emit_option, add_trace_option, write_emitted, write_plan_trace
from shardwright.cli.output import EXIT_OK, add_command, print_json, read_plan, text_width


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser) -> None:
    parser = add_command(
        commands,
        common,
        "explain",
        summary="print a plan file for people",
        description="Print what a plan splits over what, its collectives and bytes a step, memory per device, "
        "the plans that were compared with it, the parts that were solved apart, and how far from optimal it can be.",
        examples=(
            "shardwright explain plan.json",
            "shardwright explain plan.json --json | jq .collectives",
            "shardwright explain plan.json --trace step.trace.json",
            "shardwright explain plan.json --hlo step.hlo --emit step.sdy.mlir",
        ),
    )
    parser.add_argument("file", metavar="PLAN.json", help="a plan, or - for standard input")
    parser.add_argument("--hlo", metavar="FILE", help="the program; refused where the plan was made for another")
    add_emit_option(parser, " (needs --hlo where the plan's file does not hold the program)")
    add_trace_option(parser)
    parser.add_argument("--json", action="store_true", help="print the checked plan as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    plan, _ = read_plan(arguments.file, arguments.hlo)
    if arguments.emit:
        write_emitted(arguments.emit, plan)
    if arguments.trace:
        write_plan_trace(arguments.trace, plan)
    if arguments.json:
        print_json(plan.as_dict())
    elif not (arguments.emit or arguments.trace):
        print(plan.explain(width=text_width()))
    return EXIT_OK
