"""Trip counts, against what XLA really runs: every program adds one to a float each time it goes round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from shardwright.hlo import ArrayShape, Module, parse
from shardwright.planner.graph.dataflow import Dataflow, Node, build_dataflow
from shardwright.planner.tuning import UNKNOWN_TRIPS

#: `once(c)` is the only addition of float scalars in a program.
ROWS = jax.ShapeDtypeStruct((6, 4), jnp.float32)


def once(count: Any) -> Any:
    return count + jnp.float32(1)


def scan(rows: Any, **options: Any) -> Any:
    return lax.scan(lambda c, row: (once(c), row * 2), jnp.float32(0), rows, **options)[0]


def from_to(first: Any, last: Any) -> Any:
    return lax.fori_loop(first, last, lambda i, c: once(c), jnp.float32(0))


def count_all(start: Any, test: Callable[[Any], Any], step: Callable[[Any], Any]) -> Any:
    return lax.while_loop(lambda s: test(s[0]), lambda s: (step(s[0]), once(s[1])), (start, jnp.float32(0)))[1]


def nested(rows: Any) -> Any:
    body = lambda c, row: (lax.fori_loop(0, 3, lambda i, d: once(d), c), None)  # noqa: E731
    return lax.scan(body, jnp.float32(0), rows)[0]


def limit_handed_down(rows: Any) -> Any:
    """The inner loop's limit is a constant that the outer one carries unchanged."""

    def body(carry: Any, row: Any) -> Any:
        count, limit = carry
        return (lax.fori_loop(0, limit, lambda i, d: once(d), count), limit), None

    return lax.scan(body, (jnp.float32(0), jnp.int32(7)), rows)[0][0]


def limit_from_outside(rows: Any) -> Any:
    limit = jnp.int32(3) + jnp.int32(4)
    body = lambda c, row: (lax.fori_loop(0, limit, lambda i, d: once(d), c), None)  # noqa: E731
    return lax.scan(body, jnp.float32(0), rows)[0]


def in_functions(rows: Any) -> Any:
    below, next_one = jax.jit(lambda i: i < 6), jax.jit(lambda i: i + 1)
    return count_all(0, below, next_one)


KNOWN: dict[str, Callable[[Any], Any]] = {
    "scan": scan,
    "reversed scan": lambda rows: scan(rows, reverse=True),
    "unrolled scan": lambda rows: scan(rows, unroll=2),
    "fori": lambda rows: from_to(2, 9),
    "computed limits": lambda rows: from_to(jnp.int32(1), jnp.minimum(jnp.int32(20), jnp.maximum(4, 3)) * 2),
    "limit from a shape": lambda rows: from_to(0, rows.shape[0] // 2),
    "empty": lambda rows: from_to(5, 5),
    "nested": nested,
    "limit handed down": limit_handed_down,
    "limit from outside": limit_from_outside,
    "down": lambda rows: count_all(9, lambda i: i > 0, lambda i: i - 2),
    "down to and with": lambda rows: count_all(9, lambda i: i >= 0, lambda i: i - 3),
    "up to and with": lambda rows: count_all(0, lambda i: i <= 9, lambda i: i + 3),
    "until equal": lambda rows: count_all(0, lambda i: i != 9, lambda i: 3 + i),
    "limit on the left": lambda rows: count_all(2, lambda i: i < 12, lambda i: i + 1),
    "small integers": lambda rows: count_all(jnp.uint8(0), lambda i: i < jnp.uint8(9), lambda i: i + jnp.uint8(2)),
    "in functions": in_functions,
}


def lower_text(function: Callable[[Any], Any]) -> Module:
    return parse(jax.jit(function).lower(ROWS).as_text("hlo"))


def additions(flow: Dataflow) -> list[Node]:
    return [n for n in flow.nodes if n.instruction.opcode == "add" and n.shapes[0] == ArrayShape("f32", ())]


@pytest.mark.parametrize("name", KNOWN)
def test_trips_that_the_text_fixes(name: str) -> None:
    flow = build_dataflow(lower_text(KNOWN[name]))
    executed = int(jax.jit(KNOWN[name])(jnp.ones(ROWS.shape)))
    assert sum(node.runs for node in additions(flow)) == executed
    assert sum(node.weight for node in additions(flow)) == executed
    assert flow.notes == []


UNKNOWN: dict[str, Callable[[Any], Any]] = {
    "data": lambda rows: lax.while_loop(lambda c: c < rows.sum(), once, jnp.float32(0)),
    "doubled": lambda rows: count_all(1, lambda i: i < 100, lambda i: i * 2),
    "wrong way": lambda rows: count_all(0, lambda i: i > -5, lambda i: i - rows.astype(int).sum()),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_trips_are_priced_as_a_stated_number_and_counted_once(name: str) -> None:
    flow = build_dataflow(lower_text(UNKNOWN[name]))
    (node,) = additions(flow)
    assert (node.weight, node.runs) == (UNKNOWN_TRIPS, 1)
    (note,) = flow.notes
    assert note.endswith(f"trip count unknown, priced as {UNKNOWN_TRIPS} trips")


def test_a_loop_that_may_end_early_is_priced_at_its_limit() -> None:
    def search(rows: Any) -> Any:
        test = lambda s: (s[0] < 9) & (s[1] < rows.sum())  # noqa: E731
        return lax.while_loop(test, lambda s: (s[0] + 1, once(s[1])), (0, jnp.float32(0)))[1]

    flow = build_dataflow(lower_text(search))
    (node,) = additions(flow)
    assert (node.weight, node.runs) == (9, 1)
    assert "may end early, priced as its limit of 9 trips" in flow.notes[0]


@pytest.mark.parametrize(
    "config", ['{"known_trip_count":{"n":"12"}}', '"{\\"known_trip_count\\":{\\"n\\":\\"12\\"}}"', "{}"]
)
def test_what_xla_says_of_a_loop_is_believed(config: str) -> None:
    text = lower_text(UNKNOWN["doubled"]).to_text()
    head, body, rest = text.partition("body=")
    name, comma, tail = rest.partition("\n")
    flow = build_dataflow(parse(f"{head}{body}{name}, backend_config={config}{comma}{tail}"))
    (node,) = additions(flow)
    assert node.runs == (12 if "known" in config else 1)
