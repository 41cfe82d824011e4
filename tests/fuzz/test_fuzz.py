"""A short run of the mutation fuzzer, and properties of whatever hypothesis can write down."""

from __future__ import annotations

import random
import time

import fuzz


def test_mutated_texts_parse_or_are_refused_with_a_place() -> None:
    rng = random.Random(20240229)
    texts = fuzz.corpus(10_000)
    deadline = time.monotonic() + 4.0
    count = 0
    while time.monotonic() < deadline and count < 4000:
        text = fuzz.mutate(rng, texts)
        problem = fuzz.check(text)
        assert problem is None, f"{problem}\nin text {count}:\n{text[:2000]}"
        count += 1
    assert count > 100
