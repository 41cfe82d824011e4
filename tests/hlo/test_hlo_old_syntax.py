"""What older printers wrote, and XLA's parser still reads, is read as the same module."""

from __future__ import annotations

import pytest
from referee import print_by_xla

from shardwright.errors import HloSyntaxError
from shardwright.hlo import parse


def _module(*, head: str = "HloModule m", entry: str = "ENTRY e", body: str = "ROOT r = f32[2,3]{1,0} tanh(x)") -> str:
    return f"{head}\n\n{entry} {{\n  x = f32[2,3]{{1,0}} parameter(0)\n  {body}\n}}\n"


def _constant(text: str) -> str:
    return f"HloModule m\n\nENTRY e {{\n  ROOT c = {text}\n}}\n"


_READ = {
    "colon after the name": _module(head="HloModule convolution.1:"),
    "colon and attributes": _module(head="HloModule m:, is_scheduled=true"),
    "parameters without colons": _module(entry="ENTRY %e.v2 (x f32[2,3]) -> f32[2,3]"),
    "sigils without colons": _module(entry="ENTRY %e.v2 (%x f32[2,3]) -> f32[2,3]"),
    "shapes with layouts": _module(entry="ENTRY e (x f32[2,3]{1,0}) -> f32[2,3]{1,0}"),
    "operands with shapes": _module(body="ROOT %r = f32[2,3]{1,0} tanh(f32[2,3]{1,0} %x)"),
    "numbers of operands": _module(body="ROOT r = f32[2,3] add(x, /*index=1*/x) // sum"),
    "u64 below zero": _constant("u64[] constant(-1)"),
    "u64 array below zero": _constant("u64[2,1]{1,0} constant({ {-9223372036854775808}, {18446744073709551615} })"),
    "s64 above its largest": _constant("s64[2]{0} constant({18446744073709551615, -3})"),
    "pred as an integer": _constant("pred[3]{0} constant({2, 0, -1})"),
    "one number without braces": _constant("f32[1,1]{1,0} constant(-2.5)"),
    "numbered braces": _constant("f32[2,1]{1,0} constant({ /*i0=0*/ {1}, /*i0=1*/ {nan} })"),
    "tiles": _module(body="ROOT r = f32[2,3]{1,0:T(8,128)} tanh(x)"),
    "bounded sizes": _module(body='ROOT r = f32[<=2,3]{1,0} custom-call(x), custom_call_target="a"'),
    "escaped backend_config": _module(body='ROOT r = f32[2,3] tanh(x), backend_config="{\\"a\\":1}"'),
}


@pytest.mark.parametrize("kind", _READ)
def test_old_text_is_the_same_module_to_xla(kind: str) -> None:
    text = _READ[kind]
    assert print_by_xla(parse(text).to_text()) == print_by_xla(text)


@pytest.mark.parametrize(
    ("constant", "payload"),
    [
        ("u64[] constant(-1)", "18446744073709551615"),
        ("s64[] constant(18446744073709551615)", "-1"),
        ("pred[2] constant({2, 0})", "{1, 0}"),
        ("u32[] constant(7)", "7"),
    ],
)
def test_numbers_are_those_of_their_type(constant: str, payload: str) -> None:
    assert parse(_constant(constant)).entry.root.payload == payload


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (_constant("u32[] constant(-1)"), "-1 is not a value of type u32"),
        (_constant("u64[] constant(-9223372036854775809)"), "is not a value of type u64"),
        (_constant("s64[] constant(18446744073709551616)"), "is not a value of type s64"),
        (_constant("f32[3] constant(7)"), "expected 3 values"),
        (_module(entry="ENTRY e (f32[2,3]) -> f32[2,3]"), "expected a shape"),
        (_module(body="ROOT r = f32[2,3] add(x, f32[2,3] tanh(x))"), "a name and a line of its own"),
        (_module(head="HloModule m::n"), "expected a computation"),
    ],
)
def test_what_is_not_read_says_what_to_write(text: str, message: str) -> None:
    with pytest.raises(HloSyntaxError, match=message):
        parse(text)
