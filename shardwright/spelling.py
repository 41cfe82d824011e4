"""What was meant by a name that nothing has."""

from __future__ import annotations

import difflib
from collections.abc import Collection


def did_you_mean(name: str, known: Collection[str]) -> str:
    """`did you mean 'data'?`; nothing where no name is near (a similarity of 0.6, `difflib.get_close_matches`)."""
    near = difflib.get_close_matches(name, sorted(known), n=1)
    return f"did you mean {near[0]!r}?" if near else ""
