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


def interval(liveness: Liveness, name: str) -> tuple[str, str]:
    index = liveness.names.index(name)
    return liveness.order[liveness.starts[index]], liveness.order[liveness.ends[index]]


def test_values_are_live_from_their_definition_to_their_last_reader() -> None:
    result = liveness(parse(CHAIN))
    assert set(result.names) == {"a", "b", "c", "d"}  # no views, no parameters, no results
    assert interval(result, "a") == ("a", "d")
    assert interval(result, "c") == ("c", "d")


def test_a_value_that_is_written_over_ends_before_its_successor() -> None:
    result = liveness(parse(CHAIN))
    b, c = result.names.index("b"), result.names.index("c")
    assert result.ends[b] == result.starts[c] - 1
    assert result.live_bytes().max() == 3 * 8 * 8 * 4  # a, c and d


def test_bytes_at_a_position_are_those_of_its_live_values() -> None:
    result = liveness(parse(CHAIN))
    sizes = np.arange(1, len(result.names) + 1)
    live = result.live_bytes(sizes)
    for position in range(len(result.order)):
        assert live[position] == sizes[result.live_at(position)].sum()


def test_a_loop_needs_what_its_body_needs() -> None:
    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w) @ w, None), x, w)[0]

    text = jax.jit(step).lower(jnp.zeros((64, 16)), jnp.zeros((4, 16, 16))).as_text("hlo")
    result = liveness(parse(text))
    ((position, (body,)),) = result.bodies
    assert result.order[position].startswith("while")
    inside = int(body.live_bytes().max())
    assert inside >= 64 * 16 * 4
    assert result.live_bytes()[position] == result.live_bytes(result.sizes_bytes)[position] + inside


def test_peaks_are_the_largest_of_their_stretches() -> None:
    result = liveness(parse(CHAIN))
    live = result.live_bytes()
    assert live[result.peaks(1)[0]] == live.max()
    assert len(set(result.peaks(3))) == 3
