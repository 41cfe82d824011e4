"""Mutations of text: bytes, tokens, lines, numbers, brackets, pieces of another text, repetitions."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[\w.\-]+|\s+|.', re.DOTALL)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
_STRANGE = [
    '"',
    "'",
    "\\",
    "\0",
    "\n",
    "é",
    "\u2028",
    "/*",
    "*/",
    "//",
    "%",
    "{",
    "}",
    "(",
    ")",
    "[",
    "]",
    ",",
    "=",
    "->",
    "<=",
    "...",
]
_NUMBERS = ["-1", "0", "1", "2", "99", str(2**31), str(2**63), str(2**64), "9" * 5000, "1e999", "nan", "-", "1.", "٣"]

Mutation = Callable[[random.Random, str, Sequence[str]], str]


def _span(rng: random.Random, length: int, longest: int) -> tuple[int, int]:
    start = rng.randrange(length + 1)
    return start, min(length, start + rng.randrange(longest + 1))


def change_bytes(rng: random.Random, text: str, _: Sequence[str]) -> str:
    start, end = _span(rng, len(text), 3)
    return text[:start] + rng.choice([*_STRANGE, "", chr(rng.randrange(1, 0x250))]) + text[end:]


def change_tokens(rng: random.Random, text: str, _: Sequence[str]) -> str:
    tokens = _TOKEN.findall(text)
    place = rng.randrange(len(tokens))
    tokens[place : place + rng.randrange(3)] = [rng.choice(tokens) for _ in range(rng.randrange(3))]
    return "".join(tokens)


def change_lines(rng: random.Random, text: str, _: Sequence[str]) -> str:
    lines = text.split("\n")
    place = rng.randrange(len(lines))
    lines[place : place + rng.randrange(3)] = [rng.choice(lines) for _ in range(rng.randrange(3))]
    return "\n".join(lines)


def change_number(rng: random.Random, text: str, _: Sequence[str]) -> str:
    match = rng.choice(list(NUMBER.finditer(text)) or [None])
    return text if match is None else text[: match.start()] + rng.choice(_NUMBERS) + text[match.end() :]


def truncate(rng: random.Random, text: str, _: Sequence[str]) -> str:
    return text[: rng.randrange(len(text) + 1)]


def repeat(rng: random.Random, text: str, _: Sequence[str]) -> str:
    start, end = _span(rng, len(text), 12)
    return text[:start] + text[start:end] * rng.choice([2, 10, 3000]) + text[end:]


def nest(rng: random.Random, text: str, _: Sequence[str]) -> str:
    place, depth = rng.randrange(len(text) + 1), rng.choice([3, 100, 5000])
    opening, closing = rng.choice([("(", ")"), ("{", "}"), ("[", "]"), ("{a=", "}"), ("(f32[], ", ")")])
    return text[:place] + opening * depth + rng.choice(["", closing * depth]) + text[place:]


def splice(rng: random.Random, text: str, others: Sequence[str]) -> str:
    other = rng.choice(others)
    start, end = _span(rng, len(other), 400)
    place = rng.randrange(len(text) + 1)
    return text[:place] + other[start:end] + text[place:]


MUTATIONS: tuple[Mutation, ...] = (
    change_bytes, change_tokens, change_lines, change_number, truncate, repeat, nest, splice
)  # fmt: skip


def mutate(rng: random.Random, texts: Sequence[str]) -> str:
    """One of the texts with one to four changes."""
    text = rng.choice(texts)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        text = rng.choice(MUTATIONS)(rng, text, texts) or " "
    return text
