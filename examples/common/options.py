"""Command line of the larger examples: a preset, options of the plan, plans without a server."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
from rich.console import Console
from rich.markup import escape

import shardwright as sw
from shardwright.report.plan_trace import plan_trace
from shardwright.report.trace import write_trace

#: Options handed on, by the same names, to `session.parallelize` and `sw.plan`.
_PLANNING = ("mesh", "force", "memory_budget", "deadline", "stages", "micro_batches", "schedule")


def run_example(main: Callable[[], None]) -> None:
    """`main()`; Ctrl-C ends it with a line instead of a traceback, and exit code 130."""
    try:
        main()
    except KeyboardInterrupt as interrupt:
        print(": ".join(("interrupted", *map(str, interrupt.args))), file=sys.stderr)
        raise SystemExit(130) from None


def example_parser(
    description: str | None, presets: Mapping[str, Any], default: str, steps: int
) -> argparse.ArgumentParser:
    """Build a parser: a preset, an option for each of its sizes, and the options of plans."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=presets, default=default, help=f"sizes (default: {default})")
    parser.add_argument("--steps", type=int, metavar="N", default=steps, help=f"default: {steps}")
    parser.add_argument(
        "--devices", type=int, metavar="N", default=8, help="CPU devices of the embedded server (default: 8)"
    )
    parser.add_argument("--seed", type=int, metavar="N", default=0)
    parser.add_argument("--explain", action="store_true", help="print the plan at the end")
    parser.add_argument("--trace", metavar="FILE", help="measure one step; with --plan-only, the predicted one")
    parser.add_argument(
        "--checkpoint-dir", metavar="DIR", help="save the state there, as the servers see it; the last 2"
    )
    parser.add_argument("--checkpoint-every", type=int, default=50, metavar="N", help="steps (default: 50)")
    parser.add_argument("--resume", action="store_true", help="go on from the latest checkpoint, if there is one")
    parser.add_argument("--annotate", action="store_true", help="pin dimensions, as the script's table says")

    sizes = parser.add_argument_group("sizes, instead of the preset's")
    for field in dataclasses.fields(presets[default]):
        option = f"--{field.name.replace('_', '-')}"
        if field.type == "int":
            sizes.add_argument(option, type=int, metavar="N")
        elif field.type == "bool":
            sizes.add_argument(option, action=argparse.BooleanOptionalAction)

    plan = parser.add_argument_group("the plan")
    plan.add_argument("--plan-only", action="store_true", help="plan for --cluster and print the plan; run nothing")
    plan.add_argument("--cluster", metavar="FILE|N", help="cluster file or number of CPU devices, for --plan-only")
    plan.add_argument("--mesh", metavar="SIZES", help="8 or 2x4 (default: search)")
    plan.add_argument(
        "--force", help="a strategy: data, tensor, mixed, megatron, zero1, fsdp, replicated, … (default: search)"
    )
    plan.add_argument("--memory-budget", metavar="AMOUNT", help="of one device: 40GB, 50%% (default: all of it)")
    plan.add_argument("--deadline", type=float, metavar="SECONDS", help="take the best plan found by then")
    plan.add_argument("--stages", type=int, metavar="N", help="pipeline stages (default: search)")
    plan.add_argument("--micro-batches", type=int, metavar="N", help="parts of a batch (default: search)")
    plan.add_argument("--schedule", help="gpipe, 1f1b, 2f2b, …, interleaved or zero-bubble (default: search)")
    return parser


def number_parser(description: str | None, *, devices: int = 8, **numbers: int) -> argparse.ArgumentParser:
    """Build a parser: an option for each of `numbers`, with its default, and one for the embedded server's devices."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, metavar="N", default=default, help=f"default: {default}")
    parser.add_argument(
        "--devices", type=int, metavar="N", default=devices, help=f"of the embedded server (default: {devices})"
    )
    return parser


def parse_arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line; exits on contradicting options."""
    arguments = parser.parse_args()
    if arguments.resume and arguments.checkpoint_dir is None:
        parser.error("--resume needs --checkpoint-dir")
    if arguments.plan_only and arguments.cluster is None:
        parser.error("--plan-only needs --cluster: a cluster file, e.g. cluster_configs/a100_2x8.json, or 8")
    return arguments


def select_config(presets: Mapping[str, Any], arguments: argparse.Namespace) -> Any:
    """The chosen preset, with the command line's sizes. Exits on sizes that do not fit together."""
    preset = presets[arguments.preset]
    sizes = {field.name: getattr(arguments, field.name, None) for field in dataclasses.fields(preset)}
    try:
        return dataclasses.replace(preset, **{name: value for name, value in sizes.items() if value is not None})
    except ValueError as error:
        raise SystemExit(f"these sizes do not fit together: {error}") from None


def planning_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Keywords of `session.parallelize` and `sw.plan`."""
    return {name: getattr(arguments, name) for name in _PLANNING}


def show_plan(
    train_step: Callable[..., Any], init: Callable[..., Any], batch: tuple[Any, ...], arguments: argparse.Namespace
) -> None:
    """Print the plan of `train_step(*init(key), *batch)` for `--cluster`, with donated state and no real arrays.

    batch: array types.
    """
    try:
        cluster = _load_cluster(arguments.cluster)
        state = jax.eval_shape(init, jax.random.key(0))
        donated = tuple(range(len(state)))
        with Console(stderr=True).status("lowering") as status:
            program = sw.lower(train_step, *state, *batch, donate_argnums=donated, platform=cluster.platform)
            plan = sw.plan(
                program.as_text(),
                cluster,
                progress=lambda report: status.update(escape(str(report))),
                **planning_options(arguments),
            )
    except sw.ShardwrightError as error:
        raise SystemExit(str(error)) from None
    if arguments.trace:
        write_trace(arguments.trace, plan_trace(plan))
    print(plan.explain())


def _load_cluster(text: str) -> sw.Cluster:
    return sw.Cluster.local(int(text)) if text.isdigit() else sw.Cluster.load(text, for_planning=True)
