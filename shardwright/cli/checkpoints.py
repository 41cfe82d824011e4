"""`shardwright checkpoints`: the contents of a directory of checkpoints, and of one checkpoint."""

from __future__ import annotations

import argparse
from math import prod
from typing import TYPE_CHECKING, Any

from shardwright.checkpoints.directories import resolve_directory
from shardwright.cli.output import EXIT_OK, add_command, print_json, text_width
from shardwright.errors import CheckpointError

if TYPE_CHECKING:
    from shardwright.server.runtime.checkpoints.files import Contents, StoredType


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser) -> None:
    parser = add_command(
        commands,
        common,
        "checkpoints",
        summary="list the checkpoints of a directory, or the arrays of one",
        description=(
            "List the complete checkpoints in a directory, whoever wrote them with Orbax: number, time, arrays, bytes. "
            "With --step, the arrays of one. Needs no server."
        ),
        examples=("shardwright checkpoints runs/gpt2", "shardwright checkpoints runs/gpt2 --step 200 --json"),
    )
    parser.add_argument("directory", metavar="DIRECTORY", help='where they were saved; also "gs://…"')
    parser.add_argument("--step", metavar="N", type=int, help="list the arrays of this one")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from shardwright.report.tables import plain_text
    from shardwright.server.runtime.checkpoints import files

    directory = resolve_directory(arguments.directory, is_local=True)
    steps = files.steps(directory) if arguments.step is None else (arguments.step,)
    if not steps:
        raise CheckpointError("there is no complete checkpoint", where=directory, remedy="save one with step.save")
    contents = {step: files.contents(directory, step) for step in steps}
    if arguments.json:
        print_json(
            [_as_dict(step, content, with_arrays=arguments.step is not None) for step, content in contents.items()]
        )
    else:
        view = _table(contents) if arguments.step is None else _array_table(contents[arguments.step])
        print(plain_text(view, text_width()), end="")
    return EXIT_OK


def _as_dict(step: int, contents: Contents, *, with_arrays: bool) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "step": step,
        "saved_at": contents.saved_at.isoformat(timespec="seconds") if contents.saved_at is not None else None,
        "array_count": len(contents.arrays),
        "bytes": sum(map(_size_bytes, contents.arrays.values())),
    }
    if with_arrays:
        facts["arrays"] = {
            name: {"type": stored.element_type, "shape": list(stored.shape)} for name, stored in contents.arrays.items()
        }
    return facts


def _table(found: dict[int, Contents]) -> Any:
    from shardwright.report.tables import plain_table
    from shardwright.units import format_bytes

    table = plain_table([("step", "right"), ("saved", "left"), ("arrays", "right"), ("size", "right")])
    for step, contents in found.items():
        saved = f"{contents.saved_at:%Y-%m-%d %H:%M:%S}" if contents.saved_at is not None else "-"
        size = format_bytes(sum(map(_size_bytes, contents.arrays.values())))
        table.add_row(str(step), saved, str(len(contents.arrays)), size)
    return table


def _array_table(contents: Contents) -> Any:
    from shardwright.report.tables import plain_table
    from shardwright.units import format_bytes

    table = plain_table([("array", "left"), ("type", "left"), ("size", "right")], fold=("array",))
    for name, stored in contents.arrays.items():
        table.add_row(name, f"{stored.element_type}{list(stored.shape)}", format_bytes(_size_bytes(stored)))
    return table


def _size_bytes(stored: StoredType) -> int:
    from shardwright.dtypes import to_dtype

    return prod(stored.shape) * to_dtype(stored.element_type).itemsize
