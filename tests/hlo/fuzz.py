"""Mutation fuzzing of the parser: `python tests/hlo/fuzz.py [--seconds 60] [--seed 0]`.

Takes texts of the corpus, breaks them (bytes, tokens, lines, numbers, brackets, pieces of another text,
repetitions) and parses what comes out. Either it parses, and then prints as something that parses
again, or HloSyntaxError says where it is wrong. Any other exception, and a parse that takes longer
than a text of that size may, is a defect: the text is kept and the exit code is 1.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from shardwright.errors import HloSyntaxError
from shardwright.hlo import parse

CORPUS = Path(__file__).parent / "corpus"

#: A parse may take this long, and this much more for each byte; generous, as the machine may be busy.
BASE_TIME_S = 2.0
TIME_PER_BYTE_S = 2e-5

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[\w.\-]+|\s+|.', re.DOTALL)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
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

Mutation = Callable[[random.Random, str, list[str]], str]


def _span(rng: random.Random, length: int, longest: int) -> tuple[int, int]:
    start = rng.randrange(length + 1)
    return start, min(length, start + rng.randrange(longest + 1))


def change_bytes(rng: random.Random, text: str, _: list[str]) -> str:
    start, end = _span(rng, len(text), 3)
    return text[:start] + rng.choice([*_STRANGE, "", chr(rng.randrange(1, 0x250))]) + text[end:]


def change_tokens(rng: random.Random, text: str, _: list[str]) -> str:
    tokens = _TOKEN.findall(text)
    place = rng.randrange(len(tokens))
    tokens[place : place + rng.randrange(3)] = [rng.choice(tokens) for _ in range(rng.randrange(3))]
    return "".join(tokens)


def change_lines(rng: random.Random, text: str, _: list[str]) -> str:
    lines = text.split("\n")
    place = rng.randrange(len(lines))
    lines[place : place + rng.randrange(3)] = [rng.choice(lines) for _ in range(rng.randrange(3))]
    return "\n".join(lines)


def change_number(rng: random.Random, text: str, _: list[str]) -> str:
    match = rng.choice(list(_NUMBER.finditer(text)) or [None])
    return text if match is None else text[: match.start()] + rng.choice(_NUMBERS) + text[match.end() :]


def truncate(rng: random.Random, text: str, _: list[str]) -> str:
    return text[: rng.randrange(len(text) + 1)]


def repeat(rng: random.Random, text: str, _: list[str]) -> str:
    start, end = _span(rng, len(text), 12)
    return text[:start] + text[start:end] * rng.choice([2, 10, 3000]) + text[end:]


def nest(rng: random.Random, text: str, _: list[str]) -> str:
    place, depth = rng.randrange(len(text) + 1), rng.choice([3, 100, 5000])
    opening, closing = rng.choice([("(", ")"), ("{", "}"), ("[", "]"), ("{a=", "}"), ("(f32[], ", ")")])
    return text[:place] + opening * depth + rng.choice(["", closing * depth]) + text[place:]


def splice(rng: random.Random, text: str, others: list[str]) -> str:
    other = rng.choice(others)
    start, end = _span(rng, len(other), 400)
    place = rng.randrange(len(text) + 1)
    return text[:place] + other[start:end] + text[place:]


MUTATIONS: tuple[Mutation, ...] = (
    change_bytes, change_tokens, change_lines, change_number, truncate, repeat, nest, splice
)  # fmt: skip


def corpus(largest: int = 20_000) -> list[str]:
    """Texts of the corpus that are small enough to be parsed many times a second."""
    texts = [path.read_text() for path in sorted(CORPUS.glob("*.hlo"))]
    return [text for text in texts if len(text) <= largest]


def mutate(rng: random.Random, texts: list[str]) -> str:
    """One text of the corpus with one to four changes."""
    text = rng.choice(texts)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        text = rng.choice(MUTATIONS)(rng, text, texts) or " "
    return text


def check(text: str) -> str | None:
    """What is wrong with the parser, shown by this text; None where it did as it must."""
    start = time.process_time()
    try:
        printed = parse(text).to_text()
    except HloSyntaxError as error:
        if not re.fullmatch(r"\d+:\d+", error.where) or "^" not in error.message:
            return f"an error without a place: {error}"
    except Exception:
        return traceback.format_exc()
    else:
        try:
            parse(printed)
        except HloSyntaxError as error:
            return f"what was printed does not parse: {error}"
    took_s = time.process_time() - start
    if took_s > BASE_TIME_S + TIME_PER_BYTE_S * len(text):
        return f"{took_s:.1f} s for {len(text)} bytes"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    texts = corpus()
    deadline = time.monotonic() + options.seconds
    count = 0
    while time.monotonic() < deadline:
        text = mutate(rng, texts)
        problem = check(text)
        count += 1
        if problem is not None:
            with tempfile.NamedTemporaryFile("w", suffix=".hlo", delete=False, errors="surrogatepass") as file:
                file.write(text)
            print(f"{problem}\nafter {count} texts with --seed {options.seed}; the text is in {file.name}")
            return 1
    print(f"{count} mutated texts: each parsed or was refused with a place")
    return 0


if __name__ == "__main__":
    sys.exit(main())
