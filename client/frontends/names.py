"""Unique names of arguments."""

from __future__ import annotations

from collections.abc import Sequence


def unique_names(paths: Sequence[str]) -> tuple[str, ...]:
    """The paths, with `#2` and so on behind repeated ones: frameworks do not ask for unique paths."""
    counts: dict[str, int] = {}
    names = []
    for path in paths:
        counts[path] = counts.get(path, 0) + 1
        names.append(path if counts[path] == 1 else f"{path}#{counts[path]}")
    return tuple(names)
