"""What a loop computes the same way in each pass is made before it."""

from __future__ import annotations

import pytest

from shardwright.cost import hardware_profile
from shardwright.cost.peak.liveness import liveness
from shardwright.cost.peak.loop_invariant_code_motion import find_invariants, hoist_invariants, loop_of
from shardwright.cost.peak.memory import temporaries_bytes
from shardwright.hlo import Module, parse
from shardwright.plans.shardings import Mesh
from tests.cost.one_device import program_of

BODY = """HloModule loops

body {
  carried = (s32[], f32[64,64]{1,0}, f32[64,64]{1,0}) parameter(0)
  count = s32[] get-tuple-element(carried), index=0
  one = s32[] constant(1)
  next = s32[] add(count, one)
  x = f32[64,64]{1,0} get-tuple-element(carried), index=1
  w = f32[64,64]{1,0} get-tuple-element(carried), index=2
  WEIGHT
  made = f32[64,64]{1,0} dot(x, weight), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  bounded = f32[64,64]{1,0} tanh(made)
  ROOT again = (s32[], f32[64,64]{1,0}, f32[64,64]{1,0}) tuple(next, bounded, LAST)
}

more {
  state = (s32[], f32[64,64]{1,0}, f32[64,64]{1,0}) parameter(0)
  number = s32[] get-tuple-element(state), index=0
  limit = s32[] constant(4)
  ROOT goes_on = pred[] compare(number, limit), direction=LT
}

ENTRY main {
  a = f32[64,64]{1,0} parameter(0)
  b = f32[64,64]{1,0} parameter(1)
  zero = s32[] constant(0)
  start = (s32[], f32[64,64]{1,0}, f32[64,64]{1,0}) tuple(zero, a, b)
  loop = (s32[], f32[64,64]{1,0}, f32[64,64]{1,0}) while(start), condition=more, body=body
  ROOT out = f32[64,64]{1,0} get-tuple-element(loop), index=1
}
"""


def loop(weight: str, last: str = "w") -> Module:
    return parse(BODY.replace("WEIGHT", f"weight = f32[64,64]{{1,0}} {weight}").replace("LAST", last))


def names(module: Module, what: str = "all", profile: str = "cpu") -> set[str]:
    (body,) = (each for each in module.computations if each.name == "body")
    program = program_of(body, profile)
    return {program.instructions[node].name for node in find_invariants(program, what)}


@pytest.mark.parametrize(
    ("weight", "last", "expected"),
    [
        ("exponential(w)", "w", {"weight"}),
        ("exponential(w)", "made", set()),  # another w in each pass
        ("add(w, x)", "w", set()),  # x is another one in each pass
        ("transpose(w), dimensions={1,0}", "w", set()),  # free where it is read
        ("opt-barrier(w)", "w", set()),
    ],
)
def test_hoisted_is_what_is_the_same_in_each_pass(weight: str, last: str, expected: set[str]) -> None:
    assert names(loop(weight, last)) == expected


def test_what_only_hoisted_values_read_needs_no_place_in_the_loop() -> None:
    chain = "exponential(w)\n  weight = f32[64,64]{1,0} negate(inner)"
    assert names(parse(BODY.replace("WEIGHT", f"inner = f32[64,64]{{1,0}} {chain}").replace("LAST", "w"))) == {"weight"}


@pytest.mark.parametrize(("last", "expected"), [("w", {"w"}), ("made", set())])
def test_what_products_read_is_rounded_before_a_loop_that_hands_it_on(last: str, expected: set[str]) -> None:
    text = BODY.replace("WEIGHT", "").replace("dot(x, weight)", "dot(x, w)").replace("LAST", last)
    assert names(parse(text), "roundings", "tpu-v5e") == expected
    assert names(parse(text), "none", "tpu-v5e") == set()


def test_nothing_but_roundings_is_made_before_a_loop_that_hoists_these_alone() -> None:
    assert names(loop("exponential(w)"), "roundings", "tpu-v5e") == set()


TWO_LOOPS = """HloModule loops

first {
  carried = (s32[], f32[64,64]{1,0}, f32[64,64]{1,0}, f32[64,64]{1,0}) parameter(0)
  count = s32[] get-tuple-element(carried), index=0
  one = s32[] constant(1)
  next = s32[] add(count, one)
  x = f32[64,64]{1,0} get-tuple-element(carried), index=1
  w = f32[64,64]{1,0} get-tuple-element(carried), index=2
  idle = f32[64,64]{1,0} get-tuple-element(carried), index=3
  weight = f32[64,64]{1,0} FIRST
  made = f32[64,64]{1,0} dot(x, weight), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT again = (s32[], f32[64,64]{1,0}, f32[64,64]{1,0}, f32[64,64]{1,0}) tuple(next, made, w, idle)
}

second {
  carried = (s32[], f32[64,64]{1,0}, f32[64,64]{1,0}) parameter(0)
  count = s32[] get-tuple-element(carried), index=0
  one = s32[] constant(1)
  next = s32[] add(count, one)
  x = f32[64,64]{1,0} get-tuple-element(carried), index=1
  w = f32[64,64]{1,0} get-tuple-element(carried), index=2
  other_weight = f32[64,64]{1,0} SECOND
  made = f32[64,64]{1,0} dot(x, other_weight), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT again = (s32[], f32[64,64]{1,0}, f32[64,64]{1,0}) tuple(next, made, w)
}

more {
  state = (s32[], f32[64,64]{1,0}, f32[64,64]{1,0}, f32[64,64]{1,0}) parameter(0)
  number = s32[] get-tuple-element(state), index=0
  idle = f32[64,64]{1,0} get-tuple-element(state), index=3
  limit = s32[] constant(4)
  ROOT goes_on = pred[] compare(number, limit), direction=LT
}

more_of_second {
  state = (s32[], f32[64,64]{1,0}, f32[64,64]{1,0}) parameter(0)
  number = s32[] get-tuple-element(state), index=0
  limit = s32[] constant(4)
  ROOT goes_on = pred[] compare(number, limit), direction=LT
}

ENTRY main {
  a = f32[64,64]{1,0} parameter(0)
  b = f32[64,64]{1,0} parameter(1)
  zero = s32[] constant(0)
  unused = f32[64,64]{1,0} sine(b)
  start = (s32[], f32[64,64]{1,0}, f32[64,64]{1,0}, f32[64,64]{1,0}) tuple(zero, a, b, unused)
  loop = (s32[], f32[64,64]{1,0}, f32[64,64]{1,0}, f32[64,64]{1,0}) while(start), condition=more, body=first
  x = f32[64,64]{1,0} get-tuple-element(loop), index=1
  start_again = (s32[], f32[64,64]{1,0}, f32[64,64]{1,0}) tuple(zero, x, b)
  last = (s32[], f32[64,64]{1,0}, f32[64,64]{1,0}) while(start_again), condition=more_of_second, body=second
  made = f32[64,64]{1,0} get-tuple-element(last), index=1
  READ
}
"""
PLAIN = "transpose(w), dimensions={0,1}"
MADE = "ROOT out = (f32[64,64]{1,0}) tuple(made)"
MADE_ALIKE = """alike = f32[64,64]{1,0} exponential(b)
  ROOT out = (f32[64,64]{1,0}, f32[64,64]{1,0}) tuple(made, alike)"""
READ_BEHIND = """behind = f32[64,64]{1,0} get-tuple-element(loop), index=3
  ROOT out = (f32[64,64]{1,0}, f32[64,64]{1,0}) tuple(made, behind)"""


def ahead(first: str, second: str, operation: str = MADE) -> list[str]:
    """Opcodes of what runs of the entry, beside its loops."""
    module = parse(TWO_LOOPS.replace("FIRST", first).replace("SECOND", second).replace("READ", operation))
    result = hoist_invariants(program_of(module.entry), lambda body: loop_of(program_of(body), "all"))
    return [opcode for opcode in result.opcodes if opcode in ("exponential", "sine", "tanh")]


@pytest.mark.parametrize(
    ("second", "expected"), [("exponential(w)", ["exponential"]), ("tanh(w)", ["exponential", "tanh"])]
)
def test_what_two_loops_hoist_alike_is_made_once(second: str, expected: list[str]) -> None:
    assert ahead("exponential(w)", second) == expected


@pytest.mark.parametrize(
    ("first", "expected"), [("exponential(w)", ["exponential"]), ("tanh(w)", ["tanh", "exponential"])]
)
def test_what_is_made_beside_a_loop_as_it_hoists_it_is_made_once(first: str, expected: list[str]) -> None:
    assert ahead(first, PLAIN, MADE_ALIKE) == expected
    before = MADE_ALIKE.replace("exponential(b)", "exponential(a)")  # of something else
    assert ahead(first, PLAIN, before) == [*expected[:1], "exponential"]


@pytest.mark.parametrize(("operation", "expected"), [(MADE, []), (READ_BEHIND, ["sine"])])
def test_what_a_loop_carries_in_vain_is_not_made(operation: str, expected: list[str]) -> None:
    assert ahead(PLAIN, PLAIN, operation) == expected


@pytest.mark.parametrize(
    ("first", "second", "operation", "temporary_bytes"),
    [
        ("tanh(w)", "exponential(w)", MADE, 49_348),
        ("exponential(w)", "exponential(w)", MADE, 32_964),
        ("tanh(w)", PLAIN, MADE, 32_964),
        ("tanh(w)", PLAIN, MADE_ALIKE, 32_964),
        ("exponential(w)", "exponential(w)", MADE_ALIKE, 16_580),
    ],
)
def test_what_a_loop_hoists_is_there_while_an_earlier_one_runs(
    first: str, second: str, operation: str, temporary_bytes: int
) -> None:
    """temporary_bytes: of the same module compiled by XLA:CPU (jaxlib 0.10.2, `get_compiled_memory_stats`), numbers of
    a few bytes among them."""
    module = parse(TWO_LOOPS.replace("FIRST", first).replace("SECOND", second).replace("READ", operation))
    (result,) = temporaries_bytes([module.entry], (), Mesh(axes=()), hardware_profile("cpu"))
    assert result == pytest.approx(temporary_bytes, abs=256)


def test_rows_of_the_search_count_it_once_from_where_it_is_made() -> None:
    """While both loops run, and in the body of neither."""
    outcome = "exponential(w)"
    module = parse(TWO_LOOPS.replace("FIRST", outcome).replace("SECOND", outcome).replace("READ", MADE))
    result = liveness(module, hardware_profile("cpu"))
    (value,) = (i for i, name in enumerate(result.names) if "weight" in name)
    loops = [position for position, _ in result.bodies]
    assert result.starts[value] < min(loops) < max(loops) <= result.ends[value]
    bodies = [body for _, found_there in result.bodies for body in found_there]
    assert len(bodies) == 2
    assert not any("weight" in name for body in bodies for name in body.names)
