"""`shardwright diff`: what differs between two plan files."""

from __future__ import annotations

import argparse

from shardwright.cli.output import EXIT_OK, EXIT_UNHEALTHY, add_command, print_json, read_plan, text_width


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser) -> None:
    parser = add_command(
        commands,
        common,
        "diff",
        summary="compare two plan files",
        description="Print what differs between two plans: mesh and options, predicted time and memory, strategies of "
        "variables, layouts by tensor, collectives.",
        examples=(
            "shardwright diff before.json after.json",
            "shardwright diff before.json after.json --json | jq .differences",
        ),
    )
    parser.add_argument("before", metavar="BEFORE.json", help="a plan, or - for standard input")
    parser.add_argument("after", metavar="AFTER.json", help="another one")
    parser.add_argument("--json", action="store_true", help="print the differences as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from shardwright.report.differences import compare_plans, differences_as_dict, explain_differences

    before, _ = read_plan(arguments.before)
    after, _ = read_plan(arguments.after)
    differences = compare_plans(before, after)
    if arguments.json:
        print_json(differences_as_dict(differences))
    else:
        print(explain_differences(before, after, width=text_width()).rstrip())
    return EXIT_UNHEALTHY if differences else EXIT_OK
