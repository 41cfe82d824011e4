"""`shardwright explain`: a plan file for people, checked against its program where that is given."""

from __future__ import annotations

import argparse

from shardwright.cli.output import EXIT_OK, add_command, note, print_json, read_text, text_width, write_text


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
            "shardwright explain plan.json --hlo step.hlo --emit step.sdy.mlir",
        ),
    )
    parser.add_argument("file", metavar="PLAN.json", help="a plan, or - for standard input")
    parser.add_argument("--hlo", metavar="FILE", help="the program; refused where the plan was made for another")
    parser.add_argument("--emit", metavar="OUT.mlir", help="write StableHLO with the plan as constraints (needs --hlo)")
    parser.add_argument("--json", action="store_true", help="print the checked plan as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from shardwright.plans import Plan

    hlo_text = read_text(arguments.hlo) if arguments.hlo else None
    plan = Plan.from_json(read_text(arguments.file), hlo_text=hlo_text)
    if arguments.emit:
        write_text(arguments.emit, plan.emit())
        note(f"StableHLO: {arguments.emit}")
    if arguments.json:
        print_json(plan.as_dict())
    elif not arguments.emit:
        print(plan.explain(width=text_width()))
    return EXIT_OK
