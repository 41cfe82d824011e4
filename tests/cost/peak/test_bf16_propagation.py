"""What only products read is stored as bfloat16, through loops too."""

from __future__ import annotations

import pytest

from shardwright.cost.peak.bf16_propagation import round_for_products
from tests.cost.one_device import program_of

STACKED = """HloModule stacked

body {
  state = (s32[], f32[64,64]{1,0}, f32[4,64,64]{2,1,0}) parameter(0)
  count = s32[] get-tuple-element(state), index=0
  one = s32[] constant(1)
  zero = s32[] constant(0)
  next = s32[] add(count, one)
  w = f32[64,64]{1,0} get-tuple-element(state), index=1
  rows = f32[4,64,64]{2,1,0} get-tuple-element(state), index=2
  row = f32[1,64,64]{2,1,0} dynamic-slice(rows, count, zero, zero), dynamic_slice_sizes={1,64,64}
  flat = f32[64,64]{1,0} reshape(row)
  READ
  again = f32[1,64,64]{2,1,0} reshape(made)
  written = f32[4,64,64]{2,1,0} dynamic-update-slice(rows, again, count, zero, zero)
  ROOT all = (s32[], f32[64,64]{1,0}, f32[4,64,64]{2,1,0}) tuple(next, w, written)
}

more {
  carried = (s32[], f32[64,64]{1,0}, f32[4,64,64]{2,1,0}) parameter(0)
  number = s32[] get-tuple-element(carried), index=0
  limit = s32[] constant(4)
  ROOT goes_on = pred[] compare(number, limit), direction=LT
}

ENTRY main {
  a = f32[64,64]{1,0} parameter(0)
  start = s32[] constant(0)
  nothing = f32[] constant(0)
  empty = f32[4,64,64]{2,1,0} broadcast(nothing), dimensions={}
  first = (s32[], f32[64,64]{1,0}, f32[4,64,64]{2,1,0}) tuple(start, a, empty)
  loop = (s32[], f32[64,64]{1,0}, f32[4,64,64]{2,1,0}) while(first), condition=more, body=body
  kept = f32[4,64,64]{2,1,0} get-tuple-element(loop), index=2
  ROOT out = LAST
}
"""

PRODUCT = "f32[4,64,64]{2,1,0} dot(kept, a), lhs_contracting_dims={2}, rhs_contracting_dims={0}"
IN_BODY = "made = f32[64,64]{1,0} dot(flat, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}"


@pytest.mark.parametrize(
    ("operation", "last", "part"),
    [
        (IN_BODY, PRODUCT, 2),
        (IN_BODY, "f32[4,64,64]{2,1,0} sine(kept)", 1),  # read as it is after the loop
        ("made = f32[64,64]{1,0} sine(flat)", PRODUCT, 1),  # and in it
        (IN_BODY, "f32[4,64,64]{2,1,0} copy(kept)", 1),  # handed to the caller
    ],
)
def test_what_a_loop_carries(operation: str, last: str, part: int) -> None:
    program = program_of(STACKED.replace("READ", operation).replace("LAST", last), "tpu-v5e")
    round_for_products(program)
    sizes = {program.instructions[node].name: size for node, size in enumerate(program.sizes_bytes)}
    whole = 4 * 64 * 64 * 4
    assert sizes["loop"][2] == whole // part
    assert sizes["empty"] == (whole // part,)


def test_arguments_stay_as_they_are() -> None:
    text = """HloModule plain
ENTRY main {
  a = f32[64,64]{1,0} parameter(0)
  made = f32[64,64]{1,0} dot(a, a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  turned = f32[64,64]{1,0} transpose(made), dimensions={1,0}
  ROOT out = f32[64,64]{1,0} dot(turned, a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
    program = program_of(text, "tpu-v5e")
    round_for_products(program)
    sizes = {program.instructions[node].name: size for node, (size,) in enumerate(program.sizes_bytes)}
    assert sizes == {"a": 4 * 64 * 64, "made": 2 * 64 * 64, "turned": 2 * 64 * 64, "out": 4 * 64 * 64}
