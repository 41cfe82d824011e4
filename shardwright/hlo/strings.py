"""String literals of HLO text, with C's escape sequences."""

from __future__ import annotations

import re

_ESCAPE = re.compile(r"\\(?:([0-7]{1,3})|[xX]([0-9a-fA-F]+)|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_SIMPLE = {
    "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v",
    "\\": "\\", "?": "?", "'": "'", '"': '"', "`": "`",
}  # fmt: skip


def _replace(match: re.Match[str]) -> str:
    octal, hexadecimal, short, long, simple = match.groups()
    if simple is not None:
        return _SIMPLE.get(simple, match[0])
    code = int(octal, 8) if octal else int(hexadecimal or short or long, 16)
    return chr(code) if code <= 0x10FFFF else match[0]


def unescape(literal: str) -> str:
    """The text of a string literal, its quotes included.

    Escapes of single bytes (`\\303\\251`) are joined to UTF-8 if they form it.
    """
    body = literal[1:-1]
    if "\\" not in body:
        return body
    text = _ESCAPE.sub(_replace, body)
    if text.isascii() or any(ord(character) > 255 for character in text):
        return text
    try:
        return text.encode("latin-1").decode("utf-8")
    except UnicodeDecodeError:
        return text
