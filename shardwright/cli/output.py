"""Shared by all commands: exit codes, error blocks, reading and writing files."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.errors import HloSyntaxError, OptionError, PlanError, ShardwrightError, UnsupportedProgramError
from shardwright.input_files import read_input, read_input_text
from shardwright.tuning import MOST_PROGRAM_BYTES, PROGRAM_WAIT_S

if TYPE_CHECKING:
    from shardwright.user_plans import PipelinePlan, Plan

EXIT_OK = 0
EXIT_ERROR = 1
EXIT_USAGE = 2  # argparse's own
EXIT_UNHEALTHY = 3
EXIT_INTERRUPTED = 130

EXIT_CODES = """\
exit codes:
  0    done
  1    it could not be done; standard error says what, where and what to do
  2    wrong usage
  3    doctor: something is missing or does not work; verify: the program differs from the plan;
       diff: the plans differ; status: not ready
  130  interrupted
"""

#: Stands for standard input or output where a file is expected.
STANDARD_STREAM = "-"


def add_command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    common: argparse.ArgumentParser,
    name: str,
    *,
    summary: str,
    description: str,
    examples: Sequence[str],
) -> argparse.ArgumentParser:
    """A subcommand with examples and the exit codes at the end of its `--help`."""
    lines = "\n".join(f"  {example}" for example in examples)
    return commands.add_parser(
        name,
        help=summary,
        description=description,
        parents=[common],
        epilog=f"examples:\n{lines}\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def print_error(error: ShardwrightError) -> None:
    print(f"error: {error}", file=sys.stderr)


def text_width() -> int:
    """Columns of reports: the terminal's, within readable limits; 110 without a terminal."""
    return min(max(shutil.get_terminal_size((110, 24)).columns, 80), 160)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def note(text: str) -> None:
    """Write a line to the person, kept apart from results on standard output."""
    print(text, file=sys.stderr)


def read_text(path: str) -> str:
    """The text of a file, or of standard input for `-`. Raises OptionError naming the path."""
    try:
        if path == STANDARD_STREAM:
            return sys.stdin.read()
        return read_input_text(path, most_bytes=MOST_PROGRAM_BYTES, wait_s=PROGRAM_WAIT_S)
    except UnicodeDecodeError:
        raise OptionError("the file is not UTF-8 text", where=path, remedy="give a text file") from None
    except OSError as error:
        raise _unreadable(path, error) from None


def read_program_file(path: str) -> str:
    """HLO text of a program in a file, or on standard input for `-`, in any format that `sw.plan` takes.

    Raises OptionError or HloSyntaxError naming the path.
    """
    from shardwright.xla.formats import read_named_program

    try:
        if path == STANDARD_STREAM:
            data = sys.stdin.buffer.read()
        else:
            data = read_input(path, most_bytes=MOST_PROGRAM_BYTES, wait_s=PROGRAM_WAIT_S)
    except OSError as error:
        raise _unreadable(path, error) from None
    return read_named_program(data, path)


def _unreadable(path: str, error: OSError) -> OptionError:
    remedy = "check the path, or give - for standard input"
    if re.fullmatch(r"[\w.]+:\w+", path):
        remedy = f"lower the function first: shardwright lower {path} --args 'f32[8,16]' --out step.hlo"
    return OptionError(f"cannot be read ({error.strerror})", where=path, remedy=remedy)


def read_plan(path: str, hlo: str | None = None) -> tuple[Plan | PipelinePlan, str | None]:
    """The plan in a file, or on standard input for `-`, and the text of its program.

    hlo: the file of that program. Raises OptionError, PlanError or HloSyntaxError naming the path.
    """
    from shardwright.hlo import parse
    from shardwright.plans.plan_text import plan_from_json
    from shardwright.user_plans import to_user_plan

    hlo_text = read_program_file(hlo) if hlo else None
    try:
        return to_user_plan(plan_from_json(read_text(path), hlo_text=hlo_text)), hlo_text
    except PlanError as error:
        if hlo is not None and hlo_text is not None:
            with name_file_in_errors(hlo):  # what is no program at all is no other program
                parse(hlo_text)
        where = f"{path}: {error.where}" if error.where else path
        remedy = error.remedy or "give a file that `shardwright plan --out` wrote"
        raise PlanError(error.message, where=where, remedy=remedy) from None


@contextmanager
def name_file_in_errors(path: str) -> Iterator[None]:
    """Add the file's name to errors about HLO text or the program in it."""
    try:
        yield
    except UnsupportedProgramError as error:
        raise UnsupportedProgramError(error.message, where=f"{path}: {error.where}", remedy=error.remedy) from None
    except HloSyntaxError as error:
        raise HloSyntaxError(error.message, where=f"{path}:{error.where}", remedy=error.remedy) from None


def write_text(path: str, text: str) -> None:
    """Write a file, or standard output for `-`. Raises OptionError naming the path."""
    if path == STANDARD_STREAM:
        sys.stdout.write(text if text.endswith("\n") else text + "\n")
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise OptionError(f"cannot be written ({error.strerror})", where=path, remedy="check the folder") from None
