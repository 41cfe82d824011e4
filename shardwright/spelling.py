"""Suggestions for unknown names."""

from __future__ import annotations

import difflib
from collections.abc import Collection


def nearest(name: str, names: Collection[str], most: int = 1) -> list[str]:
    """The names most like an unknown one (a similarity of 0.6 or more, `difflib.get_close_matches`)."""
    return difflib.get_close_matches(name, sorted(names), n=most)


def did_you_mean(name: str, names: Collection[str]) -> str:
    """`did you mean 'data'?`; nothing where no name is near."""
    near = nearest(name, names)
    return f"did you mean {near[0]!r}?" if near else ""
