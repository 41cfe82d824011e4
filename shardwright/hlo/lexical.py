"""Characters and spans of HLO text: patterns, comments, positions, errors.

HLO text is free-form: white space and comments may stand between any two
tokens. Comments are blanked in place before parsing, so that offsets into the
blanked text are offsets into what the user wrote; lines and columns are worked
out only when an error is raised.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import NoReturn

from shardwright.errors import HloSyntaxError, UnsupportedProgramError

#: Longest part of a source line that an error shows on each side of the caret.
_EXCERPT = 100

#: Deepest nesting of brackets in shapes, attributes and literals.
MAX_DEPTH = 256

NAME = r"[A-Za-z_][A-Za-z0-9_.\-]*+"
STRING = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
#: One character of an unquoted value.
WORD_CHARACTER = r"[^\s,{}\"'\[\]()=\x00\x80-\U0010ffff]"
SINGLE_QUOTED = r"'[^'\\]*+(?:\\.[^'\\]*+)*+'"

# The alternatives that match a lone opening keep a text full of them from being searched to its end for each.
_COMMENT_OR_STRING = re.compile(rf"/\*(?:.*?\*/)?|//[^\n\r]*+|{STRING}|\"", re.DOTALL)
_NOT_NEWLINE = re.compile(r"[^\n]")
_SPACE = re.compile(r"\s*+", re.ASCII)
_BRACKET = re.compile(rf"[()\[\]{{}}]|{STRING}|{SINGLE_QUOTED}", re.DOTALL)
_VALUE_PIECE = re.compile(rf"{STRING}|{SINGLE_QUOTED}|(?:{WORD_CHARACTER}|=)++", re.ASCII | re.DOTALL)
#: Between mesh['x'=2] and the axes {'x'} that are grouped: the one value with a space in it.
_MESH_TAIL = re.compile(r",?\s*+(?:device_ids=\([^(){}]*+(?:\([^(){}]*+\)[^(){}]*+)*+\)\s*+)?(?=\{)", re.ASCII)
_CLOSING = {"(": ")", "[": "]", "{": "}"}


def blank_comments(text: str) -> str:
    """`text` with comments outside of strings replaced by as many spaces (newlines stay).

    Raises HloSyntaxError where a comment or a string never ends.
    """

    def blank(match: re.Match[str]) -> str:
        token = match[0]
        if token[0] == "/":
            if token == "/*":
                fail(text, match.start(), "this comment never ends")
            return _NOT_NEWLINE.sub(" ", token)
        if token == '"':
            fail(text, match.start(), "this string never ends")
        return token

    return _COMMENT_OR_STRING.sub(blank, text)


def skip_space(text: str, position: int) -> int:
    """The offset of the first character at or after `position` that is not white space."""
    return _SPACE.match(text, position).end()  # type: ignore[union-attr]


def bracket_end(text: str, position: int, original: str | None = None) -> int:
    """The offset just after the bracket that closes the one at `position`; strings are skipped."""
    expected: list[str] = []
    end = -1
    for match in _BRACKET.finditer(text, position):
        token = match[0]
        if token in _CLOSING:
            if len(expected) >= MAX_DEPTH:
                fail(original or text, match.start(), f"brackets nest deeper than {MAX_DEPTH}")
            expected.append(_CLOSING[token])
        elif token[0] not in "\"'":
            if token != expected[-1]:
                fail(original or text, match.start(), f"expected {expected[-1]!r}, got {token!r}")
            expected.pop()
            if not expected:
                end = match.end()
                break
    if end < 0:
        fail(original or text, position, f"{text[position]!r} is never closed")
    return end


def value_end(text: str, start: int, original: str | None = None) -> int:
    """The offset after the attribute value at `start`: words, strings and brackets up to a comma or a space."""
    position = start
    while position < len(text):
        if text[position] in _CLOSING:
            position = bracket_end(text, position, original)
            if text.startswith("mesh[", start):
                tail = _MESH_TAIL.match(text, position)
                position = tail.end() if tail else position
            continue
        match = _VALUE_PIECE.match(text, position)
        if match is None:
            break
        position = match.end()
    return position


def suggest_names(name: str, names: Iterable[str]) -> str:
    """`; did you mean …?` for names close to `name`, or ''."""
    if len(name) > 100:
        return ""
    # Similarity is quadratic: only names of about the same length are compared, and not too many.
    candidates = [other for other in names if abs(len(other) - len(name)) <= 2 and other[:1] == name[:1]][:2000]
    close = difflib.get_close_matches(name, candidates, n=3, cutoff=0.75)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


#: What to do about a text that cannot be read, where nothing more helpful is known.
AS_PRINTED = "give the whole text of a module, as XLA prints it"


def fail(
    text: str,
    position: int,
    message: str,
    *,
    remedy: str = AS_PRINTED,
    kind: type[HloSyntaxError | UnsupportedProgramError] = HloSyntaxError,
) -> NoReturn:
    """Raise an error at an offset of `text`, showing the line with a caret."""
    position = min(max(position, 0), len(text))
    if text and not text[position:].strip():
        message = f"the text ends here: {message}"
    start = text.rfind("\n", 0, position) + 1
    end = text.find("\n", position)
    end = len(text) if end < 0 else end
    line_number = text.count("\n", 0, position) + 1
    column = position - start + 1
    first = max(start, position - _EXCERPT)
    last = min(end, position + _EXCERPT)
    before = ("…" if first > start else "") + text[first:position]
    after = text[position:last].rstrip("\r") + ("…" if last < end else "")
    caret = "".join("\t" if character == "\t" else " " for character in before) + "^"
    raise kind(f"{message}\n  {before}{after}\n  {caret}", where=f"{line_number}:{column}", remedy=remedy) from None
