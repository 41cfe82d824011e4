"""Mutations of JSON documents: values, keys and lists, and the text itself."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Sequence
from typing import Any

from tests.fuzz import texts

#: Values written in place of others. Python's `json` writes NaN and Infinity, and reads them.
STRANGE: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 1.5, -0.5, 2**31, 2**53, 2**63, -(2**63), 2**64, 10**400, 1e308, 1e-320,
    float("nan"), float("inf"), -float("inf"), "", " ", "0", "x", "\0", "a\0b", "é", "\u2028", "\ud800", "data",
    "x" * 5000, "../..", "~", "::1", [], [[]], [1], [[1]], [None], [True], ["x"], [1.5], [-1], [2**63], {}, {"": 1},
    {"x": 1}, {"x": [1]}, [{}],
)  # fmt: skip

#: Numbers that `json.dumps` cannot write, put into the text in place of one.
WRITTEN = ("1e999", "-1e999", "9" * 5000, "0." + "1" * 5000, "1E400", "-0", "00", "0x1")


def mutate(rng: random.Random, documents: Sequence[str]) -> str:
    """One of the documents with one to three changes of its values, or with changed text."""
    if rng.random() < 0.25:
        return texts.mutate(rng, documents)
    data = json.loads(rng.choice(documents))
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        data = _change(rng, data)
    text = json.dumps(data, ensure_ascii=rng.random() < 0.5)
    if rng.random() < 0.1:
        text = _write_number(rng, text)
    return text


def _change(rng: random.Random, data: Any) -> Any:
    places = [(parent, key) for parent, key, _ in _places(data)]
    if not places:
        return rng.choice(STRANGE)
    kind = rng.random()
    parent, key = rng.choice(places)
    if kind < 0.5:
        parent[key] = copy.deepcopy(rng.choice(STRANGE))
    elif kind < 0.65:
        other, other_key = rng.choice(places)
        parent[key] = copy.deepcopy(other[other_key])
    elif kind < 0.75:
        del parent[key]
    elif kind < 0.85 and isinstance(parent, dict):
        parent[rng.choice(["", "extra", "é", key + "_", *parent])] = parent.pop(key)
    elif isinstance(parent, list):
        parent[key:key] = [copy.deepcopy(parent[key])] * rng.choice([1, 2, 50])
    elif isinstance(parent[key], int | float) and not isinstance(parent[key], bool):
        parent[key] = rng.choice([-parent[key], parent[key] + 1, parent[key] * 2, parent[key] / 3, str(parent[key])])
    else:
        parent[key] = [copy.deepcopy(parent[key])]
    return data


def leaves(data: Any) -> list[Any]:
    """Everything that is neither a list nor an object, at any depth."""
    return [value for _, _, value in _places(data) if not isinstance(value, dict | list | tuple)]


def _places(data: Any) -> list[tuple[Any, Any, Any]]:
    """(list or object, position or key, value) of every entry, at any depth."""
    results: list[tuple[Any, Any, Any]] = []
    waiting = [data]
    while waiting:
        parent = waiting.pop()
        if isinstance(parent, dict | list | tuple):
            for key in list(parent) if isinstance(parent, dict) else range(len(parent)):
                results.append((parent, key, parent[key]))
                waiting.append(parent[key])
    return results


def _write_number(rng: random.Random, text: str) -> str:
    numbers = list(texts.NUMBER.finditer(text))
    if not numbers:
        return text
    number = rng.choice(numbers)
    return text[: number.start()] + rng.choice(WRITTEN) + text[number.end() :]
