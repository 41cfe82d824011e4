"""Numbers in readable units: the only place of prefixes on bytes and seconds, and of per cent signs."""

from __future__ import annotations

_BYTE_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_TIME_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def format_bytes(size_bytes: float) -> str:
    """`1.50 MiB`, three significant digits; whole bytes below 1 KiB."""
    for scale, unit in _BYTE_UNITS:
        if abs(size_bytes) >= scale:
            return f"{_three_digits(size_bytes / scale)} {unit}"
    return f"{size_bytes:.0f} B"


def format_seconds(time_s: float) -> str:
    """`12.3 ms`, three significant digits."""
    if time_s == 0:
        return "0 s"
    for scale, unit in _TIME_UNITS:
        if abs(time_s) >= scale:
            return f"{_three_digits(time_s / scale)} {unit}"
    return f"{_three_digits(time_s * 1e9)} ns"


def format_percent(part: float, form: str = ".0%") -> str:
    """`12 %`, of a part of one; `form` is Python's, ending in %."""
    return f"{part:{form}}".replace("%", " %")


def _three_digits(value: float) -> str:
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:.{digits}f}"
