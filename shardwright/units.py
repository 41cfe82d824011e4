"""Numbers in readable units: the only place of prefixes on bytes and seconds, and of per cent signs."""

from __future__ import annotations

import re

from shardwright.errors import OptionError

_BYTE_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_TIME_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))

_UNIT_BYTES = {
    "": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40,
}  # fmt: skip
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*|%)\s*")


def format_bytes(size_bytes: float) -> str:
    """`1.50 MiB`, three significant digits; whole bytes below 1 KiB."""
    for scale, unit in _BYTE_UNITS:
        if abs(size_bytes) >= scale:
            return f"{_three_digits(size_bytes / scale)} {unit}"
    return f"{size_bytes:.0f} B"


def parse_amount(text: str) -> tuple[int | None, float | None]:
    """Bytes of a size as users write it, or per cent of something; both None where the text is neither."""
    match = _AMOUNT.fullmatch(text)
    if match is None or match[2].upper() not in {*_UNIT_BYTES, "%"}:
        return None, None
    if match[2] == "%":
        return None, float(match[1])
    return round(float(match[1]) * _UNIT_BYTES[match[2].upper()]), None


def parse_bytes(text: str, *, where: str = "") -> int:
    """Bytes of a size as users write it. Raises OptionError on a text that is none."""
    size_bytes, _ = parse_amount(text)
    if size_bytes is None:
        raise OptionError(f"{text!r} is no size", where=where, remedy='write bytes from 0, "25MB" or "8MiB"')
    return size_bytes


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
