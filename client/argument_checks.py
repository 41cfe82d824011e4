"""Checks of what users pass besides arrays."""

from __future__ import annotations

from numbers import Integral
from typing import Any

from shardwright.errors import OptionError


def check_number(name: str, number: Any, least: int, most: int) -> None:
    """Raises OptionError unless it is a whole number in these bounds, of Python or of numpy."""
    if isinstance(number, bool) or not isinstance(number, Integral) or not least <= int(number) <= most:
        raise OptionError(f"{name}={number!r}", where=name, remedy=f"a whole number from {least} to {most}")
