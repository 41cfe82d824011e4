"""`shardwright plan`: a program in, plan and annotated StableHLO out, with no server."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import TYPE_CHECKING

from shardwright.cli.dumps import add_emit_option, add_trace_option, write_emitted, write_plan_trace
from shardwright.cli.options import add_cluster_option, add_planning_options, cluster_of, planning_options
from shardwright.cli.output import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    add_command,
    name_file_in_errors,
    note,
    print_json,
    read_program_file,
    read_text,
    text_width,
    write_text,
)
from shardwright.cli.progress import planning_progress
from shardwright.errors import OptionError
from shardwright.units import format_seconds

if TYPE_CHECKING:
    from shardwright.hlo.entry import Names


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser) -> None:
    parser = add_command(
        commands,
        common,
        "plan",
        summary="plan a program for a cluster",
        description=(
            "Plan a training step for a cluster: what is split over what, and what it costs. The step is HLO text, a\n"
            "serialized HloModuleProto, StableHLO text or StableHLO bytecode, told apart by content."
        ),
        examples=(
            "shardwright plan step.hlo --cluster 8 --explain",
            "shardwright plan step.hlo --cluster cluster_configs/a100_2x8.json --out plan.json --emit step.sdy.mlir",
            "shardwright plan step.hlo --cluster 8 --mesh 2x4 --force mixed --json",
            "shardwright plan step.hlo --cluster 8 --mesh data=2,model=4 --force \"params['wte']=0:model,1:-\"",
            "shardwright plan step.hlo --cluster cluster_configs/a100_2x8.json --force Parallax --bucket 25MB",
            "shardwright plan step.hlo --cluster 8 --stages 2 --micro-batches 4 --trace step.trace.json",
            "shardwright plan step.hlo --cluster 8 --from plan.json --out plan.json",
            "shardwright plan step.pb --names names.txt --cluster 8",
            "shardwright lower mymodel:step --args 'f32[8,16]' | shardwright plan - --cluster 8",
        ),
    )
    parser.add_argument("file", metavar="FILE", help="the program, or - for standard input")
    parser.add_argument(
        "--names",
        metavar="FILE",
        help="names of the arguments: one a line, a JSON list, or a JSON object from number or own name to name",
    )
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
    """Plans, checks, and writes the requested files; by default the explanation.

    Exit code 130 where Ctrl-C ended the search; all is written of the best plan so far.
    """
    builder, options = planning_options(arguments)
    cluster = cluster_of(arguments.cluster, for_planning=True)
    text = read_program_file(arguments.file)

    from shardwright.builders.choices import predicted_step_s
    from shardwright.hlo import parse
    from shardwright.hlo.entry import name_parameters
    from shardwright.offline import plan_until_interrupted
    from shardwright.plans.plan import TAKEN_OVER

    if arguments.names:
        names = names_of(arguments.names)
        with name_file_in_errors(arguments.file):
            module = parse(text)
        options = replace(options, argument_names=name_parameters(module, names))
    with name_file_in_errors(arguments.file), planning_progress() as progress:
        plan, was_interrupted = plan_until_interrupted(
            text, cluster, options, builder, cache=not arguments.no_cache, progress=progress
        )
    if was_interrupted:
        note("interrupted: this is the best plan that was found until then")
    for said in (said for said in plan.notes if said.startswith(TAKEN_OVER)):
        note(said)
    if arguments.out:
        write_text(arguments.out, plan.to_json(indent=1))
        note(f"plan: {arguments.out}: {format_seconds(predicted_step_s(plan))} a step predicted")
    if arguments.emit:
        write_emitted(arguments.emit, plan)
    if arguments.trace:
        write_plan_trace(arguments.trace, plan, cluster)
    if arguments.json:
        print_json(plan.as_dict())
    elif arguments.explain or not (arguments.out or arguments.emit or arguments.trace):
        print(plan.explain(width=text_width()))
    return EXIT_INTERRUPTED if was_interrupted else EXIT_OK


def names_of(path: str) -> Names:
    """Argument names in a file: one a line, or JSON. Raises OptionError naming the path."""
    text = read_text(path)
    if not text.lstrip().startswith(("[", "{")):
        return [line.strip() for line in text.splitlines() if line.strip()]
    try:
        names = json.loads(text)
    except ValueError as error:
        raise OptionError(f"it is no JSON: {error}", where=path, remedy="write one name a line, or JSON") from None
    if isinstance(names, dict):
        return {int(key) if key.isdecimal() else key: name for key, name in names.items()}
    return list(names)
