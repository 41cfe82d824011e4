"""The tokens that an operator gives to people: a name, a role, and the token or its hash.

One a line, in a file of mode 0600:

    # name   role      token, or sha256: and its hash
    alice    user      sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
    bob      operator  dGhpcyBpcyBhIHRva2VuIG9mIGJvYg
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from shardwright.spelling import did_you_mean

Role = Literal["user", "operator"]
ROLES: tuple[Role, ...] = get_args(Role)

#: The names of those who come with the nodes' own token, and with the local user's.
DEFAULT_NAME, LOCAL_NAME = "default", "local"

#: Fewer letters can be guessed.
MIN_TOKEN_LETTERS = 16

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,63}")
_HASH = "sha256:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who makes a call. A `user` works in sessions of their own; an `operator` sees all, may close them, and drain."""

    name: str
    role: Role

    @property
    def is_operator(self) -> bool:
        return self.role == "operator"


def hash_of(token: str) -> str:
    """SHA-256, hexadecimal: tokens are random and long, so that nothing slower is needed."""
    return hashlib.sha256(token.encode()).hexdigest()


def parse_tokens(text: str, refuse: Callable[[int, str, str], Exception]) -> Mapping[str, Caller]:
    """Callers by the hash of their tokens.

    refuse: makes the error of a line, of (its number, the problem, the remedy).
    """
    callers: dict[str, Caller] = {}
    names: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        problem = _problem_of(words)
        if problem is not None:
            raise refuse(number, *problem)
        name, role, token = words
        digest = token.removeprefix(_HASH).lower() if token.startswith(_HASH) else hash_of(token)
        if name in names:
            raise refuse(number, f"{name} has a token in line {names[name]} already", "one line for each name")
        if digest in callers:
            raise refuse(number, f"{name} has the token of {callers[digest].name}", "make a token of its own for each")
        names[name] = number
        callers[digest] = Caller(name=name, role="operator" if role == "operator" else "user")
    return callers


def _problem_of(words: list[str]) -> tuple[str, str] | None:
    """(problem, remedy) of a line's words; never shows a token."""
    if len(words) != 3:
        return f"{len(words)} words, where a name, a role and a token belong", "write: NAME user|operator TOKEN"
    name, role, token = words
    if not _NAME.fullmatch(name):
        return f"{name[:64]!r} is no name", "use up to 64 letters, digits and . _ @ + -"
    if name in (DEFAULT_NAME, LOCAL_NAME):
        return f"the name {name} is the nodes' own", "choose another name"
    if role not in ROLES:
        return f"{role[:64]!r} is no role", did_you_mean(role, ROLES) or f"use one of {', '.join(ROLES)}"
    if token.startswith(_HASH):
        if not re.fullmatch(r"[0-9a-fA-F]{64}", token.removeprefix(_HASH)):
            return f"the hash of {name} is no SHA-256", f"write {_HASH} and 64 hexadecimal digits"
    elif len(token) < MIN_TOKEN_LETTERS:
        return f"the token of {name} can be guessed: {len(token)} letters", "make one with `shardwright token NAME`"
    elif not (token.isascii() and token.isprintable()):
        return f"the token of {name} holds characters that no call can carry", "use printable ASCII characters"
    return None
