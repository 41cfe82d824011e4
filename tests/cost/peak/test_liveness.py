"""When values are live: against memory's own figure, and intervals by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.cost.peak.liveness import Liveness, liveness
from shardwright.hlo import parse

CHAIN = """HloModule chain, entry_computation_layout={(f32[8,8]{1,0})->f32[8,8]{1,0}}

ENTRY main {
  x = f32[8,8]{1,0} parameter(0)
  a = f32[8,8]{1,0} dot(x, x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  b = f32[8,8]{1,0} dot(a, x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  view = f32[64]{0} reshape(b)
  back = f32[8,8]{1,0} reshape(view)
  c = f32[8,8]{1,0} tanh(back)
  d = f32[8,8]{1,0} dot(c, a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT e = f32[8,8]{1,0} negate(d)
}
"""


def interval(found: Liveness, name: str) -> tuple[str, str]:
    index = found.names.index(name)
    return found.order[found.starts[index]], found.order[found.ends[index]]


def test_values_are_live_from_their_definition_to_their_last_reader() -> None:
    found = liveness(parse(CHAIN))
    assert set(found.names) == {"a", "b", "c", "d"}  # no views, no parameters, no results
    assert interval(found, "a") == ("a", "d")
    assert interval(found, "c") == ("c", "d")


def test_a_value_that_is_written_over_ends_before_its_successor() -> None:
    found = liveness(parse(CHAIN))
    b, c = found.names.index("b"), found.names.index("c")
    assert found.ends[b] == found.starts[c] - 1
    assert found.live_bytes().max() == 3 * 8 * 8 * 4  # a, c and d


def test_bytes_at_a_position_are_those_of_its_live_values() -> None:
    found = liveness(parse(CHAIN))
    sizes = np.arange(1, len(found.names) + 1)
    live = found.live_bytes(sizes)
    for position in range(len(found.order)):
        assert live[position] == sizes[found.live_at(position)].sum()


def test_a_loop_needs_what_its_body_needs() -> None:
    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w) @ w, None), x, w)[0]

    text = jax.jit(step).lower(jnp.zeros((64, 16)), jnp.zeros((4, 16, 16))).as_text("hlo")
    found = liveness(parse(text))
    ((position, (body,)),) = found.bodies
    assert found.order[position].startswith("while")
    inside = int(body.live_bytes().max())
    assert inside >= 64 * 16 * 4
    assert found.live_bytes()[position] == found.live_bytes(found.sizes_bytes)[position] + inside


def test_peaks_are_the_largest_of_their_stretches() -> None:
    found = liveness(parse(CHAIN))
    live = found.live_bytes()
    assert live[found.peaks(1)[0]] == live.max()
    assert len(set(found.peaks(3))) == 3
