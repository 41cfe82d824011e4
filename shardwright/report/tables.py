"""Tables without frames, and rich views as plain text."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

#: Columns that a folded cell keeps at least, so that names stay readable on narrow terminals.
_FOLDED_WIDTH = 14


def plain_table(columns: Sequence[tuple[str, str]], *, fold: Sequence[str] = ()) -> Table:
    """A table without frame; columns are (name, "left" or "right"), those in `fold` may wrap."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for name, side in columns:
        table.add_column(
            name,
            justify="right" if side == "right" else "left",
            overflow="fold",
            no_wrap=name not in fold,
            min_width=_FOLDED_WIDTH if name in fold else None,
        )
    return table


def plain_text(view: RenderableType, width: int) -> str:
    """A rich view without colours, trailing blanks left out."""
    target = io.StringIO()
    Console(file=target, width=width, color_system=None, force_terminal=False, highlight=False).print(view)
    return "\n".join(line.rstrip() for line in target.getvalue().rstrip().splitlines()) + "\n"


def title(text: str) -> Text:
    """The heading of a section."""
    return Text(text, style="bold")
