"""How many names say what they stand for: parameters, fields, locals and functions of a package, and the vague ones.

    python scripts/count_wording.py [FOLDER ...]    # these folders; without any, those of PACKAGES

A vague name says how a value got here, not what it is: `found`, `made`, `known`. A function is a verb, so one that
begins with a participle (`bounded_plan`) is vague, too.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

#: Folders counted by themselves; `shardwright` without its links to others.
PACKAGES = (
    "planner", "server", "ranks", "builders", "launch", "client", "shardwright", "tests", "workloads", "oracles",
    "benchmarks", "scripts", "examples",
)  # fmt: skip

VAGUE = frozenset(
    {
        "begun", "each", "found", "given", "gone", "held", "kept", "known", "left", "lies", "made", "read",
        "said", "seen", "taken", "told", "tried", "want", "wanted",
    }
)  # fmt: skip

#: Participles that do not end in -ed.
_IRREGULAR = frozenset(
    {
        "begun", "broken", "built", "chosen", "done", "drawn", "found", "given", "gone", "held", "hidden",
        "kept", "known", "lost", "made", "seen", "sent", "shown", "taken", "thrown", "told", "written",
    }
)  # fmt: skip

#: What ends in -ed and is none.
_VERBS = frozenset(
    {
        "embed", "exceed", "feed", "need", "proceed", "seed", "shed", "speed", "succeed",
    }
)  # fmt: skip

_Named = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Some names, and the vague among them."""

    count: int
    vague: tuple[str, ...]

    @property
    def percent(self) -> float:
        return 100 * len(self.vague) / max(self.count, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wording:
    """The names of one package. fields: annotated in a class; functions: methods too, without properties."""

    parameters: Share
    fields: Share
    locals: Share
    functions: Share


def count_wording(folder: Path) -> Wording:
    """Counts the names in a folder's Python files; links and generated code are left out."""
    nodes = [node for path in _list_sources(folder) for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    functions = [node for node in nodes if isinstance(node, _Named | ast.Lambda)]
    return Wording(
        parameters=_join(share for function in functions if (share := _count_parameters(function.args))),
        fields=_count_vague(name for node in nodes if isinstance(node, ast.ClassDef) for name in _list_fields(node)),
        locals=_count_vague(
            node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        ),
        functions=_count_participles(node for node in functions if isinstance(node, _Named)),
    )


def _list_sources(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink() and path.name != "proto":
            yield from _list_sources(path)
        elif path.suffix == ".py":
            yield path


def _count_parameters(arguments: ast.arguments) -> Share:
    """`left` beside `right` is a side."""
    listed = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    names = [argument.arg for argument in listed if argument is not None and argument.arg not in ("self", "cls")]
    sides = {"left"} if "right" in names else set()
    return Share(count=len(names), vague=tuple(name for name in names if name in VAGUE - sides))


def _list_fields(node: ast.ClassDef) -> Iterator[str]:
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id


def _count_vague(names: Iterable[str]) -> Share:
    listed = list(names)
    return Share(count=len(listed), vague=tuple(name for name in listed if name.strip("_") in VAGUE))


def _count_participles(functions: Iterable[_Named]) -> Share:
    names = [function.name for function in functions if not function.name.startswith("__") and not _is_value(function)]
    return Share(count=len(names), vague=tuple(name for name in names if _is_participle(name.strip("_").split("_")[0])))


def _is_value(function: _Named) -> bool:
    return any("property" in ast.unparse(decorator) for decorator in function.decorator_list)


def _is_participle(word: str) -> bool:
    return word in _IRREGULAR or (len(word) > 4 and word.endswith("ed") and word not in _VERBS)


def _join(shares: Iterable[Share]) -> Share:
    listed = list(shares)
    return Share(
        count=sum(share.count for share in listed), vague=tuple(name for share in listed for name in share.vague)
    )


def main() -> None:
    print(f"{'vague, %':<16}{'parameters':>12}{'fields':>12}{'locals':>12}{'functions':>12}")
    for folder in sys.argv[1:] or PACKAGES:
        wording = count_wording(ROOT / folder)
        shares = (wording.parameters, wording.fields, wording.locals, wording.functions)
        print(f"{folder:<16}" + "".join(f"{share.percent:>12.1f}" for share in shares))


if __name__ == "__main__":
    main()
