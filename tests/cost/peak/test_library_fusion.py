"""What kernels of a library around reductions take in, on programs whose kernels XLA:CPU's optimized HLO shows."""

from __future__ import annotations

import pytest

from shardwright.cost.peak.library_fusion import OUTSIDE, library_kernels
from tests.cost.one_device import program_of

REGIONS = """sum {
  l = f32[] parameter(0)
  r = f32[] parameter(1)
  ROOT s = f32[] add(l, r)
}

"""

#: A softmax's gradient, as far as its divisor decides what is stored.
GRADIENT = """HloModule gradient, entry_computation_layout={(f32[S,S], f32[S,S])->(f32[S,S], f32[S,S])}

REGIONSENTRY main {
  e = f32[S,S]{1,0} parameter(0)
  x = f32[S,S]{1,0} parameter(1)
  zero = f32[] constant(0)
  total = f32[S]{0} reduce(e, zero), dimensions={1}, to_apply=sum
  divisor = f32[S,S]{1,0} broadcast(total), dimensions={0}
  forward = f32[S,S]{1,0} divide(e, divisor)
  gradient = f32[S,S]{1,0} dot(x, x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  weighted = f32[S,S]{1,0} multiply(gradient, e)
  summed = f32[S]{0} reduce(weighted, zero), dimensions={1}, to_apply=sum
  spread = f32[S,S]{1,0} broadcast(summed), dimensions={0}
  backward = f32[S,S]{1,0} divide(gradient, divisor)
  all = f32[S,S]{1,0} add(backward, spread)
  sine = f32[S,S]{1,0} sine(all)
  ROOT out = (f32[S,S]{1,0}, f32[S,S]{1,0}) tuple(forward, sine)
}
""".replace("REGIONS", REGIONS)

#: Two reductions in a row, the second with an operand that only the library takes in.
ROW = """HloModule row, entry_computation_layout={(f32[S,S]{1,0})->f32[S]{0}}

REGIONSENTRY main {
  x = f32[S,S]{1,0} parameter(0)
  zero = f32[] constant(0)
  total = f32[S]{0} reduce(x, zero), dimensions={1}, to_apply=sum
  spread = f32[S,S]{1,0} broadcast(total), dimensions={0}
  other = f32[S,S]{1,0} OTHER(x)
  weighted = f32[S,S]{1,0} multiply(spread, other)
  ROOT sums = f32[S]{0} reduce(weighted, zero), dimensions={1}, to_apply=sum
}
""".replace("REGIONS", REGIONS)


def kernels(text: str, size: int) -> dict[str, set[str]]:
    """What each kernel computes, by the name of what it stores."""
    program = program_of(text.replace("S]", f"{size}]").replace("[S,", f"[{size},"))
    entries: dict[str, set[str]] = {}
    for node, last in enumerate(library_kernels(program)):
        if last != OUTSIDE:
            entries.setdefault(program.instructions[last].name, set()).add(program.instructions[node].name)
    return entries


def test_a_divisor_that_a_quotient_outside_reads_too_stays_outside() -> None:
    # What is returned is read by others than the divisor: neither quotient multiplies by its inverse.
    returned = GRADIENT.replace("tuple(forward, sine)", "tuple(forward, sine, total)").replace(
        "S]{1,0}) tuple", "S]{1,0}, f32[S]{0}) tuple"
    )
    assert kernels(returned, 4096) == {
        "total": {"total"},
        "all": {"gradient", "weighted", "summed", "spread", "backward", "all"},
    }


def test_the_quotient_that_does_not_multiply_by_the_inverse_takes_its_divisor_in() -> None:
    assert kernels(GRADIENT, 4096) == {
        "total": {"total"},
        "all": {"divisor", "gradient", "weighted", "summed", "spread", "backward", "all"},
    }


def test_a_divisor_that_nobody_else_reads_is_taken_in() -> None:
    result = kernels(GRADIENT.replace("tuple(forward,", "tuple(e,"), 4096)
    assert result == {"all": {"total", "divisor", "gradient", "weighted", "summed", "spread", "backward", "all"}}


def test_the_inverse_of_a_short_divisor_is_computed_apart() -> None:
    result = kernels(GRADIENT.replace("tuple(forward,", "tuple(e,"), 512)
    assert result == {
        "total": {"total"},
        "all": {"divisor", "gradient", "weighted", "summed", "spread", "backward", "all"},
    }


def test_what_is_small_is_no_library_kernel() -> None:
    assert kernels(GRADIENT, 32) == {}


@pytest.mark.parametrize(
    ("other", "members"),
    [
        ("exponential", {"total", "spread", "other", "weighted", "sums"}),
        ("cosine", {"total", "spread", "weighted", "sums"}),
    ],
)
def test_a_kernel_takes_in_the_reduction_before_it_and_what_the_library_computes(other: str, members: set[str]) -> None:
    assert kernels(ROW.replace("OTHER", other), 512) == {"sums": members}
