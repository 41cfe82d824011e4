"""`shardwright token`: a new token for a person, and the line of a tokens file that admits it."""

from __future__ import annotations

import argparse
import os
import secrets
from pathlib import Path

from shardwright.cli.output import EXIT_OK, add_command, note
from shardwright.clusters.access_tokens import ROLES, hash_of, parse_tokens
from shardwright.clusters.secret_files import read_secret_file
from shardwright.errors import OptionError


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser) -> None:
    parser = add_command(
        commands,
        common,
        "token",
        summary="make a token for a person",
        description=(
            "Print a new random token, to be given to one person, who puts it into SHARDWRIGHT_TOKEN. With --file, add "
            "its line (name, role, hash) to the file that the cluster file's security.tokens_file names: servers "
            "follow changes of it. Without, the line goes to standard error. Take a token back by removing its line."
        ),
        examples=(
            "shardwright token alice --file tokens",
            "shardwright token bob --role operator --file tokens",
        ),
    )
    parser.add_argument("name", metavar="NAME", help="whose it is, as logs and `shardwright status` show it")
    parser.add_argument("--role", choices=ROLES, default="user", help="user: sessions of their own (default)")
    parser.add_argument("--file", metavar="PATH", help="tokens file to add it to; made where it is not there")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Raises OptionError on a name that cannot be used, and on a file that others can read."""
    token = secrets.token_urlsafe(32)
    line = f"{arguments.name} {arguments.role} sha256:{hash_of(token)}\n"
    if arguments.file is None:
        _check(line, "NAME")
        note(f"add to the tokens file:\n{line.rstrip()}")
    else:
        _append(Path(arguments.file), line)
    print(token)
    return EXIT_OK


def _check(text: str, where: str) -> None:
    def refuse(number: int, problem: str, remedy: str) -> OptionError:
        return OptionError(problem, where=f"{where}, line {number}", remedy=remedy)

    parse_tokens(text, refuse)


def _append(path: Path, line: str) -> None:
    """Write the file anew in one step: a server that reads it meanwhile finds all of the old one or of the new one."""

    def refuse(problem: str, remedy: str) -> OptionError:
        return OptionError(problem, where=str(path), remedy=remedy)

    try:
        old = read_secret_file(path, refuse).decode("utf-8") if path.exists() else ""
        text = old + ("" if old.endswith("\n") or not old else "\n") + line
        _check(text, str(path))
        draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
        draft.replace(path)
    except (OSError, UnicodeDecodeError) as error:
        problem = getattr(error, "strerror", None) or "it is not text"
        raise OptionError(f"the file cannot be changed ({problem})", where=str(path), remedy="name another") from None
