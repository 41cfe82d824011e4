"""`shardwright tune`: the fastest plan of a function by measurement, on the real cluster."""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from shardwright.cli.lower import add_function, read_function, user_errors_as_messages
from shardwright.cli.options import add_planning_options, force_of, mesh_of
from shardwright.cli.output import EXIT_OK, add_command, note, print_json
from shardwright.errors import OptionError
from shardwright.options.user_options import OPTION_HELP
from shardwright.units import format_seconds

if TYPE_CHECKING:
    from shardwright.client.plan_changes import PlanChange


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser) -> None:
    parser = add_command(
        commands,
        common,
        "tune",
        summary="measure the plans of a Python function on the servers, and remember the fastest",
        description=(
            "Plan a JAX function, run the plan and its runners-up (other strategies, meshes, micro-batches, buckets)\n"
            "for some steps each on the servers, on made-up arguments, and remember the fastest by measurement: steps\n"
            'with effort="measured" begin with it. The trials are kept as CSV in the cache folder.'
        ),
        examples=(
            "shardwright tune mymodel:step --example mymodel:example_arguments --donate 0,1 --address 10.0.0.1:2222",
            "shardwright tune mymodel:step --args 'f32[512,512] f32[64,512]' --donate 0 --devices 4",
        ),
    )
    add_function(parser)
    parser.add_argument("--address", metavar="HOST:PORT", help="the server; default: $SERVER_IP and $SERVER_PORT")
    parser.add_argument("--devices", metavar="N", type=int, default=8, help="CPU devices where there is no server (8)")
    parser.add_argument("--limit", metavar="SECONDS", type=float, default=1800.0, help="give up after this long (1800)")
    add_planning_options(parser)
    parser.add_argument("--json", action="store_true", help="print what happened as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.effort is not None:
        raise OptionError("it is measured", where="--effort", remedy="leave the option out")
    if not 0 < arguments.limit < math.inf:
        raise OptionError(f"{arguments.limit} s", where="--limit", remedy="give the seconds, such as 600")
    function, example, kinds = read_function(arguments)
    options: dict[str, Any] = {name: getattr(arguments, name, None) for name in OPTION_HELP}
    options |= {"mesh": mesh_of(arguments.mesh), "force": force_of(arguments.force)}
    del options["effort"], options["background"]

    from shardwright.client.session import connect
    from shardwright.client.tuning import tune

    with (
        connect(arguments.address, devices=arguments.devices) as session,
        user_errors_as_messages(arguments.function, is_debug=arguments.debug),
    ):
        changes = tune(
            session,
            function,
            example,
            limit_s=arguments.limit,
            tell=lambda change: note(str(change)),
            **kinds,
            **{name: value for name, value in options.items() if value is not None},
        )
    if arguments.json:
        print_json([asdict(change) for change in changes])
    else:
        print("\n".join(_table(changes)))
    return EXIT_OK


def _table(changes: tuple[PlanChange, ...]) -> list[str]:
    """The plans that were measured, the fastest first, and how far the predictions are off."""
    first = next((change for change in changes if change.kind == "first plan"), None)
    end = changes[-1]
    if end.kind == "remembered" or first is None:
        return [str(end)]
    measured = [(change.detail, change.predicted_s, change.after_s) for change in changes if change.kind == "measured"]
    if end.kind not in ("kept", "went back") or not measured:
        return [str(first), str(end)]
    rows = sorted([(first.detail, first.predicted_s, end.before_s), *measured], key=lambda row: row[2])
    lines = [f"{'measured':>12}  {'predicted':>12}  plan"]
    lines += [f"{format_seconds(took_s):>12}  {format_seconds(said_s):>12}  {name}" for name, said_s, took_s in rows]
    ratios = sorted(said_s / took_s for _, said_s, took_s in rows if took_s)
    lines.append(f"predicted over measured: {ratios[len(ratios) // 2]:.2f}, from {ratios[0]:.2f} to {ratios[-1]:.2f}")
    return lines
