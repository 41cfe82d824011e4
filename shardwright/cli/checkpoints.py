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
    if arguments.step is not None:
        contents = files.contents(directory, arguments.step)
        if arguments.json:
            print_json([_as_dict(arguments.step, contents, with_arrays=True)])
        else:
            print(plain_text(_array_table(contents), text_width()), end="")
        return EXIT_OK
    content_by_step = {step: _contents_or_error(directory, step) for step in files.steps(directory)}
    if not content_by_step:
        raise CheckpointError("there is no complete checkpoint", where=directory, remedy="save one with step.save")
    if arguments.json:
        print_json([_as_dict(step, content, with_arrays=False) for step, content in content_by_step.items()])
    else:
        print(plain_text(_table(content_by_step), text_width()), end="")
        for error in content_by_step.values():
            if isinstance(error, CheckpointError):
                print(error)
    return EXIT_OK


def _contents_or_error(directory: str, step: int) -> Contents | CheckpointError:
    """A damaged checkpoint does not hide the others."""
    from shardwright.server.runtime.checkpoints import files

    try:
        return files.contents(directory, step)
    except CheckpointError as error:
        return error


def _as_dict(step: int, contents: Contents | CheckpointError, *, with_arrays: bool) -> dict[str, Any]:
    if isinstance(contents, CheckpointError):
        return {"step": step, "error": {"message": contents.message, "where": contents.where}}
    facts: dict[str, Any] = {
        "step": step,
        "saved_at": contents.saved_at.isoformat(timespec="seconds") if contents.saved_at is not None else None,
        "array_count": len(contents.arrays),
        "bytes": sum(map(_size_bytes, contents.arrays.values())),
        "has_checksums": contents.has_checksums,
    }
    if with_arrays:
        facts["arrays"] = {
            name: {"type": stored.element_type, "shape": list(stored.shape)} for name, stored in contents.arrays.items()
        }
    return facts


def _table(content_by_step: dict[int, Contents | CheckpointError]) -> Any:
    from shardwright.report.tables import plain_table
    from shardwright.units import format_bytes

    table = plain_table([("step", "right"), ("saved", "left"), ("arrays", "right"), ("size", "right")])
    for step, contents in content_by_step.items():
        if isinstance(contents, CheckpointError):
            table.add_row(str(step), "damaged", "-", "-")
            continue
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
