"""Many cases that differ in a line: one test over a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


def list_failing_rows(check: Callable[..., None], rows: Iterable[tuple[Any, ...]]) -> list[str]:
    """Each row that a check of its values raises for, with the error: all of them, whatever comes first."""
    failing = []
    for row in rows:
        try:
            check(*row)
        except Exception as error:
            failing.append(f"{', '.join(map(str, row))}: {type(error).__name__}: {error}")
    return failing
