"""Constants and identities that are spelled in several instructions: found, folded, the same numbers."""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np
import pytest

from shardwright.clusters.cluster import Cluster
from shardwright.hlo import Module, parse
from shardwright.options.plan_options import PlanOptions
from shardwright.planner import plan
from shardwright.planner.rewrites.constant_folding import fold_constants
from shardwright.planner.rewrites.initial_values import neutralize_initial_values
from shardwright.planner.rewrites.literals import bitcast_literal, convert_literal, negate_literal
from shardwright.planner.rules.reduction import reduction_of
from shardwright.user_plans import compile_and_prove
from tests.planner.rewrites.rewrite_programs import run

X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(8, 12)).astype(np.float32)

REGIONS = """
add {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(b, a)
}

largest {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  m = f32[] maximum(a, b)
  ROOT c = f32[] convert(m)
}
"""


def reducing(lines: str, *, start: str = "start", region: str = "add", regions: str = REGIONS) -> str:
    """A program that reduces the rows of its argument from what `lines` make."""
    return f"""HloModule reducing
{regions}
ENTRY main {{
  x = f32[16,8] parameter(0)
  {lines}
  ROOT sums = f32[8] reduce(x, {start}), dimensions={{0}}, to_apply={region}
}}
"""


def same_numbers(text: str, module: Module, arguments: Sequence[np.ndarray]) -> None:
    for expected, item in zip(run(text, arguments), run(module.to_text(), arguments), strict=True):
        np.testing.assert_array_equal(item, expected)


#: How a zero is written, and the literal that it is.
ZEROS = {
    "converted": "zero = s32[] constant(0)\n  start = f32[] convert(zero)",
    "converted to its own type": "zero = f32[] constant(0)\n  start = f32[] convert(zero)",
    "copied": "zero = f32[] constant(-0)\n  start = f32[] copy(zero)",
    "reshaped": "zero = f32[1,1] constant({{0}})\n  start = f32[] reshape(zero)",
    "bitcast": "zero = f32[1] constant({0})\n  start = f32[] bitcast(zero)",
    "of its bits": "zero = s32[] constant(0)\n  start = f32[] bitcast-convert(zero)",
    "spread": "zero = f32[] constant(0)\n  start = f32[] broadcast(zero), dimensions={}",
    "turned": "zero = f32[] constant(0)\n  start = f32[] transpose(zero), dimensions={}",
    "of a larger array": "zero = f32[] constant(0)\n  many = f32[4] broadcast(zero), dimensions={}\n"
    "  one = f32[1] slice(many), slice={[2:3]}\n  start = f32[] reshape(one)",
    "of a tuple": "zero = f32[] constant(0)\n  both = (f32[16,8], f32[]) tuple(x, zero)\n"
    "  start = f32[] get-tuple-element(both), index=1",
    "behind a barrier": "zero = f32[] constant(0)\n  both = (f32[16,8], f32[]) tuple(x, zero)\n"
    "  held = (f32[16,8], f32[]) opt-barrier(both)\n  start = f32[] get-tuple-element(held), index=1",
    "of a boolean": "no = pred[] constant(false)\n  narrow = bf16[] convert(no)\n  start = f32[] convert(narrow)",
    "in many steps": "zero = s64[] constant(0)\n  a = s32[] convert(zero)\n  b = s32[1] reshape(a)\n"
    "  c = s32[1] copy(b)\n  d = s32[] reshape(c)\n  start = f32[] convert(d)",
}


@pytest.mark.parametrize("lines", ZEROS.values(), ids=ZEROS)
def test_a_zero_is_a_constant_however_it_is_written(lines: str) -> None:
    text = reducing(lines)
    module = fold_constants(parse(text))
    start = module.entry.root.operands[1]
    assert start.opcode == "constant"
    assert float(start.payload) == 0
    same_numbers(text, module, [X])
    assert fold_constants(module) is module


def test_the_start_of_a_maximum_is_negated_infinity() -> None:
    text = reducing("most = f32[] constant(inf)\n  start = f32[] negate(most)", region="largest")
    module = fold_constants(parse(text))
    assert [each.payload for each in module.entry if each.opcode == "constant"] == ["-inf"]
    assert reduction_of(module.entry.root.called["to_apply"][0]) == "maximum"
    same_numbers(text, module, [X])


LOOP = """HloModule looping

add {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b)
}

turn {
  state = (s32[], f32[], f32[], f32[16,8]) parameter(0)
  i = s32[] get-tuple-element(state), index=0
  start = f32[] get-tuple-element(state), index=1
  counted = f32[] get-tuple-element(state), index=2
  x = f32[16,8] get-tuple-element(state), index=3
  one = s32[] constant(1)
  next = s32[] add(i, one)
  sums = f32[8] reduce(x, start), dimensions={0}, to_apply=add
  spread = f32[16,8] broadcast(sums), dimensions={1}
  fraction = f32[] convert(next)
  scale = f32[16,8] broadcast(counted), dimensions={}
  scaled = f32[16,8] multiply(spread, scale)
  y = f32[16,8] subtract(x, scaled)
  kept = f32[] copy(start)
  ROOT after = (s32[], f32[], f32[], f32[16,8]) tuple(next, kept, fraction, y)
}

more {
  state.1 = (s32[], f32[], f32[], f32[16,8]) parameter(0)
  i.1 = s32[] get-tuple-element(state.1), index=0
  limit = s32[] constant(3)
  ROOT is_less = pred[] compare(i.1, limit), direction=LT
}

ENTRY main {
  x.1 = f32[16,8] parameter(0)
  none = s32[] constant(0)
  zero = f32[] convert(none)
  before = (s32[], f32[], f32[], f32[16,8]) tuple(none, zero, zero, x.1)
  loop = (s32[], f32[], f32[], f32[16,8]) while(before), condition=more, body=turn
  ROOT y.1 = f32[16,8] get-tuple-element(loop), index=3
}
"""


def test_a_loop_hands_on_what_it_does_not_change() -> None:
    module = fold_constants(parse(LOOP))
    body = next(each for each in module.computations if each.name == "turn")
    opcodes = {each.name: each.opcode for each in body}
    assert opcodes["start"] == "constant"
    assert opcodes["counted"] == "get-tuple-element", "what the loop changes is not known"
    same_numbers(LOOP, module, [X])


def region(*lines: str, element: str = "bf16") -> str:
    return (
        f"region {{\n  a = {element}[] parameter(0)\n  b = {element}[] parameter(1)\n  " + "\n  ".join(lines) + "\n}\n"
    )


WIDE = ("wa = f32[] convert(a)", "wb = f32[] convert(b)")
CALLED = "f {\n  p = f32[] parameter(0)\n  q = f32[] parameter(1)\n  ROOT s = f32[] add(q, p)\n}\n"
PLAIN = {
    "in a wider type": region(*WIDE, "s = f32[] add(wa, wb)", "ROOT r = bf16[] convert(s)"),
    "turned round": region(*WIDE, "s = f32[] add(wb, wa)", "ROOT r = bf16[] convert(s)"),
    "called": CALLED + region(*WIDE, "s = f32[] call(wa, wb), to_apply=f", "ROOT r = bf16[] convert(s)"),
    "with identities": region("ca = bf16[] copy(a)", "s = bf16[] add(ca, b)", "ROOT r = bf16[] convert(s)"),
    "there and back": region("wa = f32[] convert(a)", "na = bf16[] convert(wa)", "ROOT r = bf16[] add(na, b)"),
    "of a tuple": region("t = (bf16[], bf16[]) tuple(a, b)", "p = bf16[] get-tuple-element(t), index=1",
                         "ROOT r = bf16[] add(a, p)"),
}  # fmt: skip


def summing(regions: str, element: str = "bf16") -> str:
    return f"""HloModule summing

{regions}
ENTRY main {{
  x = {element}[16,8] parameter(0)
  zero = {element}[] constant(0)
  ROOT sums = {element}[8] reduce(x, zero), dimensions={{0}}, to_apply=region
}}
"""


@pytest.mark.parametrize("regions", PLAIN.values(), ids=PLAIN)
def test_a_region_that_adds_is_an_addition(regions: str) -> None:
    text = summing(regions)
    module = fold_constants(parse(text))
    (result,) = module.entry.root.called["to_apply"]
    assert reduction_of(result) == "add"
    assert len(module.computations) == 2
    same_numbers(text, module, [X.astype(ml_dtypes.bfloat16)])


def test_a_sum_that_the_wider_type_rounds_otherwise_stays() -> None:
    wide = ("wa = f16[] convert(a)", "wb = f16[] convert(b)", "s = f16[] add(wa, wb)", "ROOT r = f32[] convert(s)")
    narrowed = parse(summing(region(*wide, element="f32"), "f32"))
    assert fold_constants(narrowed) is narrowed
    products = ("wa = f32[] convert(a)", "wb = f32[] convert(b)", "s = f32[] subtract(wa, wb)")
    other = parse(summing(region(*products, "ROOT r = bf16[] convert(s)")))
    assert fold_constants(other) is other


@pytest.mark.parametrize("narrow", [np.float16, ml_dtypes.bfloat16])
def test_a_wider_type_rounds_sums_and_products_to_the_same(narrow: type) -> None:
    """What the rule about significant bits says, tried on numbers of all magnitudes."""
    bits = np.random.default_rng(3).integers(0, 2**16, size=(2, 200_000), dtype=np.uint16)
    with np.errstate(all="ignore"):
        a, b = (half.view(narrow).astype(np.float64) for half in bits)
    normal = np.isfinite(a) & np.isfinite(b)
    a, b = a[normal], b[normal]
    with np.errstate(all="ignore"):
        for exact in (a + b, a * b):  # in 53 bits, more than twice what f32 has
            at_once = exact.astype(narrow).astype(np.float64)
            twice = exact.astype(np.float32).astype(narrow).astype(np.float64)
            tiny = np.abs(exact) < np.finfo(np.float32).tiny  # flushed or not, as the device does
            np.testing.assert_array_equal(at_once[~tiny], twice[~tiny])


DENSE = """HloModule a_inference_step_168__.20, input_output_alias={{ {{1}}: (2, {{}}, may-alias) }}

add_float_.12 {{
  x.9 = f32[] parameter(0)
  y.9 = f32[] parameter(1)
  ROOT add.6 = f32[] add(x.9, y.9)
}}

ENTRY main {{
  arg0 = f32[64,8] parameter(0), metadata={{op_name="XLA_Args"}}
  arg1 = f32[64,12] parameter(1), metadata={{op_name="XLA_Args"}}
  w = f32[8,12] parameter(2), metadata={{op_name="XLA_Args"}}
  {x}
  h = f32[64,12] dot({use}, w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  e = f32[64,12] subtract(h, arg1)
  {zero}
  rows = f32[12] reduce({e}, {start}), dimensions={{0}}, to_apply=add_float_.12
  loss = f32[] reduce(rows, {start}), dimensions={{0}}, to_apply=add_float_.12
  g = f32[8,12] dot(arg0, e), lhs_contracting_dims={{0}}, rhs_contracting_dims={{0}}
  new = f32[8,12] subtract(w, g)
  ROOT out = (f32[], f32[8,12]) tuple(loss, new)
}}
"""

CLEAN = DENSE.format(x="", use="arg0", zero="zero = f32[] constant(0)", e="e", start="zero")
AS_TENSORFLOW_WRITES = DENSE.format(
    x="xi = f32[64,8] convert(arg0)\n  xr = f32[64,8] reshape(xi)",
    use="xr",
    zero="n = s32[] constant(0)\n  c = f32[] convert(n)\n  z = f32[] convert(c)\n  ec = f32[64,12] convert(e)",
    e="ec",
    start="z",
)


@pytest.mark.dear
def test_the_plan_is_that_of_the_clean_text() -> None:
    for options in (PlanOptions(mesh={"data": 4}, force="data"), PlanOptions()):
        clean, written = (plan(text, Cluster.local(4), options) for text in (CLEAN, AS_TENSORFLOW_WRITES))
        assert written.cost == clean.cost
        assert written.collectives == clean.collectives
        assert [each.sharding for each in written.parameters] == [each.sharding for each in clean.parameters]
        assert not written.notes
        assert compile_and_prove(written).holds


def test_with_rewrites_none_the_program_stays() -> None:
    step_plan = plan(
        AS_TENSORFLOW_WRITES, Cluster.local(2), PlanOptions(rewrites="none", mesh={"data": 2}, force="data")
    )
    assert any("initial value is not known to be 0" in note for note in step_plan.notes)


PRED = "or {\n  a = pred[] parameter(0)\n  b = pred[] parameter(1)\n  ROOT c = pred[] or(a, b)\n}\n"


@pytest.mark.parametrize(
    ("opcode", "start"),
    [("add", "5"), ("multiply", "2"), ("maximum", "-3.4028235e+38"), ("maximum", "0.5"), ("minimum", "0")],
)
def test_an_initial_value_of_its_own_is_taken_out(opcode: str, start: str) -> None:
    regions = f"r {{\n  a = f32[] parameter(0)\n  b = f32[] parameter(1)\n  ROOT c = f32[] {opcode}(a, b)\n}}\n"
    text = reducing(f"start = f32[] constant({start})", region="r", regions=regions)
    module = neutralize_initial_values(parse(text))
    assert module.entry.root.name == "sums"
    assert module.entry.root.opcode == opcode
    for expected, item in zip(run(text, [X]), run(module.to_text(), [X]), strict=True):
        np.testing.assert_allclose(item, expected, rtol=1e-6, atol=1e-5)
    step_plan = plan(text, Cluster.local(4), PlanOptions(mesh={"data": 4}, force={"x": {0: "data"}}))
    assert [each.kind for each in step_plan.collectives] == ["all-reduce"]


def test_an_initial_value_that_is_an_argument_is_taken_out() -> None:
    text = reducing("start = f32[] parameter(1)")
    module = neutralize_initial_values(parse(text))
    start = np.float32(3)
    for expected, item in zip(run(text, [X, start]), run(module.to_text(), [X, start]), strict=True):
        np.testing.assert_allclose(item, expected, rtol=1e-6, atol=1e-5)


def test_booleans_start_from_true_or_false() -> None:
    text = f"""HloModule any
{PRED}
ENTRY main {{
  x = f32[16,8] parameter(0)
  half = f32[] constant(0.5)
  halves = f32[16,8] broadcast(half), dimensions={{}}
  above = pred[16,8] compare(x, halves), direction=GT
  one = s32[] constant(1)
  start = pred[] convert(one)
  ROOT any = pred[8] reduce(above, start), dimensions={{0}}, to_apply=or
}}
"""
    module = neutralize_initial_values(fold_constants(parse(text)))
    assert [each.payload for each in module.entry if each.opcode == "constant"] == ["0.5", "true", "false"]
    same_numbers(text, module, [X])


LITERALS = [
    ("0", "s32", "f32", "0.0"), ("-1", "s8", "pred", "true"), ("true", "pred", "s32", "1"),
    ("3.7", "f32", "s32", "3"), ("-3.7", "f32", "s32", "-3"), ("300", "s32", "s8", None),
    ("nan", "f32", "s32", None), ("inf", "f32", "bf16", "inf"), ("1e30", "f32", "f16", "inf"),
    ("1.00390625", "f32", "bf16", "1.0"), ("16777217", "s32", "f32", "16777216.0"),
    ("(1, 0)", "c64", "f32", None), ("1", "f32", "c64", None),
]  # fmt: skip


@pytest.mark.parametrize(("literal", "source", "target", "expected"), LITERALS)
def test_literals_are_converted_as_xla_converts(literal: str, source: str, target: str, expected: str | None) -> None:
    assert convert_literal(literal, source, target) == expected
    if expected is not None:
        text = f"""HloModule one

ENTRY main {{
  c = {source}[] constant({literal})
  ROOT r = {target}[] convert(c)
}}
"""
        (result,) = run(text, [])
        assert float(result) == (float(expected) if expected not in ("true", "false") else expected == "true")


def test_literals_of_bits_and_negated_ones() -> None:
    assert bitcast_literal("-8388608", "s32", "f32") == "-inf"
    assert bitcast_literal("1", "f32", "u32") == "1065353216"
    assert bitcast_literal("0", "s32", "f64") is None
    assert bitcast_literal("2143289344", "s32", "f32") is None, "no number"
    assert negate_literal("inf", "bf16") == "-inf"
    assert negate_literal("-128", "s8") == "-128"
