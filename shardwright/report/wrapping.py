"""Sentences in narrow columns: broken where a reader would break them, never inside a name."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.text import Text

#: Behind blanks and commas, but not within `[data, -]`.
_BREAK = re.compile(r"(?:(?<= )|(?<=,)(?=[^ ]))(?![^\[\]]*\])")

#: What lines after the first begin with.
_INDENT = " "


class Wrapped:
    """A cell of a table: `params['blocks'][0..3]['w']` stays whole, sentences break between words and names."""

    def __init__(self, text: str) -> None:
        self._pieces = [piece for piece in _BREAK.split(text) if piece]

    def lines(self, width: int) -> list[str]:
        """The text in lines of at most `width` columns; pieces put together are the text again."""
        lines = [""]
        for piece in self._pieces:
            if lines[-1].strip() and len(lines[-1]) + len(piece.rstrip()) > width:
                lines.append(_INDENT)
            lines[-1] += piece
        return [line.rstrip() for line in lines]

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        longest = max((len(piece.rstrip()) for piece in self._pieces), default=0)
        return Measurement(longest + len(_INDENT), sum(map(len, self._pieces)))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        for line in self.lines(options.max_width):
            yield Text(line, overflow="fold")
