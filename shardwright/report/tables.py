"""Tables without frames, and rich views in plain text. No name is ever broken: a long one widens its column."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

#: Columns that a folded cell keeps at least, so that names stay readable on narrow terminals.
_FOLDED_WIDTH = 14

#: Wider than any table: what is measured in so much room says how much it needs at least.
_MAX_WIDTH = 100_000


class PlainTable(Table):
    """A table with columns at least as wide as their longest name: the whole cell in a column without wrapping, else
    the longest word.
    """

    def add_row(self, *renderables: RenderableType | None, **options: Any) -> None:
        super().add_row(*renderables, **options)
        for column, cell in zip(self.columns, renderables, strict=False):
            column.min_width = max(column.min_width or 0, _min_width(cell, is_whole=column.no_wrap))


def plain_table(columns: Sequence[tuple[str, str]], *, fold: Sequence[str] = ()) -> Table:
    """A table without frame; columns are (name, "left" or "right"), those in `fold` may wrap."""
    table = PlainTable(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for name, side in columns:
        table.add_column(
            name,
            justify="right" if side == "right" else "left",
            overflow="fold",
            no_wrap=name not in fold,
            min_width=_FOLDED_WIDTH if name in fold else cell_len(name),
        )
    return table


def plain_grid(*sides: str) -> Table:
    """A table of facts, without a heading: label and fact; the second column may wrap if it is "left"."""
    table = PlainTable(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for number, side in enumerate(sides):
        right = side == "right"
        table.add_column(justify="right" if right else "left", overflow="fold", no_wrap=number == 0 or right)
    return table


def _min_width(cell: RenderableType | None, *, is_whole: bool) -> int:
    if cell is None:
        return 0
    if isinstance(cell, str | Text):
        text = str(cell)
        return max((cell_len(piece) for piece in (text.splitlines() if is_whole else text.split())), default=0)
    console = _plain_console(io.StringIO(), _MAX_WIDTH)
    return Measurement.get(console, console.options, cell).minimum


def plain_text(view: RenderableType, width: int) -> str:
    """A rich view without colours, trailing blanks left out."""
    target = io.StringIO()
    print_view(view, _plain_console(target, width))
    return "\n".join(line.rstrip() for line in target.getvalue().rstrip().splitlines()) + "\n"


def _plain_console(target: io.StringIO, width: int) -> Console:
    """A console that writes the same text wherever the process runs: it asks neither notebook, terminal nor
    environment. (In a notebook rich shows what it prints and ignores `file`.)
    """
    return Console(
        file=target, width=width, color_system=None, no_color=True, force_terminal=False, force_jupyter=False,
        force_interactive=False, highlight=False, emoji=False, legacy_windows=False,
    )  # fmt: skip


def print_view(view: RenderableType, console: Console) -> None:
    """Print a view, each part with the console's width, or its longest name's."""
    room, width = console.options.update_width(_MAX_WIDTH), console.width
    try:
        for part in _parts(view):
            console.width = max(width, Measurement.get(console, room, part).minimum)  # rich cuts what is wider
            console.print(part)
    finally:
        console.width = width


def _parts(view: RenderableType) -> Iterator[RenderableType]:
    if isinstance(view, Group):
        for part in view.renderables:
            yield from _parts(part)
    else:
        yield view


def title(text: str) -> Text:
    """The heading of a section."""
    return Text(text, style="bold")
