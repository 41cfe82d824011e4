"""The `python` and `sh` blocks of a document.

A comment on the line before a block, `<!-- not run: why -->`, says why it is not run. Readers of the
page do not see it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

#: Documents whose blocks run, and of which links and names are checked.
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])

_BLOCK = re.compile(
    r"^(?:[ ]*<!-- not run: (?P<reason>[^\n]+?) -->\n)?[ ]*```(?P<language>python|sh)\n(?P<text>.*?)^[ ]*```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, kw_only=True)
class Block:
    """A block of code. line: of its first line, from 1. reason: why it is not run; empty: it is."""

    language: str
    text: str
    line: int
    reason: str


def blocks_of(document: Path) -> list[Block]:
    """The blocks of a document, in order."""
    text = document.read_text()
    return [
        Block(
            language=match["language"],
            text=match["text"],
            line=text.count("\n", 0, match.start("text")) + 1,
            reason=match["reason"] or "",
        )
        for match in _BLOCK.finditer(text)
    ]


def name_of(document: Path) -> str:
    """The path of a document, from the root of the repository."""
    return document.relative_to(ROOT).as_posix()


def prelude_of(document: Path) -> Path:
    """What a page's blocks take for granted: a file that runs ahead of them, where there is one."""
    return Path(__file__).parent / Path(name_of(document)).with_suffix(".py")
