"""What cannot be read is refused with line, column, the line, a caret and what was expected."""

from __future__ import annotations

import gc
import pickle
import time

import pytest

from shardwright.errors import HloSyntaxError
from shardwright.hlo import parse


def module(*lines: str, header: str = "HloModule m", before: str = "") -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"{header}\n{before}\nENTRY e {{\n  x = f32[2,3]{{1,0}} parameter(0)\n{body}\n}}\n"


REGION = "add { a = f32[] parameter(0) b = f32[] parameter(1) ROOT s = f32[] add(a, b) }"

CASES = {
    "no module": ("ENTRY e { ROOT p = f32[] parameter(0) }", "1:1", "expected 'HloModule'"),
    "nothing": ("", "1:1", "expected 'HloModule'"),
    "no name": ("HloModule", "1:10", "expected the module's name"),
    "no entry": ("HloModule m\nc { ROOT p = f32[] parameter(0) }", "2:34", "expected an ENTRY computation"),
    "two entries": (
        "HloModule m\nENTRY a { p = f32[] parameter(0) }\nENTRY b { p = f32[] parameter(0) }",
        "3:1",
        "a second ENTRY: 'a'",
    ),
    "computation twice": (f"HloModule m\n{REGION}\n{REGION}\n", "3:1", "computation 'add' is defined twice"),
    "no brace": ("HloModule m\nENTRY e p = f32[] parameter(0)", "2:9", "expected '{' and the instructions"),
    "truncated": ("HloModule m\nENTRY e {\n  p = f32[] parameter(0)\n", "4:1", "expected an instruction"),
    "cut in a line": ("HloModule m\nENTRY e {\n  p = f32[] param", "3:13", "unknown opcode 'param'"),
    "empty computation": ("HloModule m\nENTRY e {\n}", "3:1", "expected an instruction"),
    "no equals sign": (module("y f32[2,3] negate(x)"), "5:5", "expected '=' after the instruction's name 'y'"),
    "no shape": (module("y = negate(x)"), "5:7", "expected a shape such as"),
    "bad dimension": (module("y = f32[2,a] negate(x)"), "5:13", "expected a dimension"),
    "huge dimension": (module(f"y = f32[{10**19}] negate(x)"), "5:11", "63 bits"),
    "huge array": (module("y = f32[99999999999,99999999999] negate(x)"), "5:7", "does not fit in 63 bits"),
    "unknown type": (module("y = f31[2] negate(x)"), "5:7", "unknown element type 'f31'"),
    "bad layout": (module("y = f32[2,3]{1,0,2} negate(x)"), "5:15", "a layout that orders 2 dimensions"),
    "open tuple shape": (module("y = (f32[2] negate(x)"), "5:15", "expected ',' or '\\)' in a tuple shape"),
    "unknown opcode": (module("y = f32[2,3] negat(x)"), "5:16", "unknown opcode 'negat'; did you mean 'negate'"),
    "unknown operand": (module("y = f32[2,3] negate(X1)"), "5:23", "no instruction 'X1' before this one"),
    "near operand": (
        module("longname.1 = f32[2,3] negate(x)", "y = f32[2,3] negate(longname.2)"),
        "6:23",
        "did you mean 'longname.1'",
    ),
    "operand defined later": (module("y = f32[2,3] negate(z)", "z = f32[2,3] negate(x)"), "5:23", "no instruction 'z'"),
    "wrong operand shape": (module("y = f32[2,3] negate(f32[3,2] x)"), "5:32", "'x' does not have this shape"),
    "too many operands": (module("y = f32[2,3] negate(x, x)"), "5:3", "negate takes 1 operand, 'y' has 2"),
    "too few operands": (module("y = f32[2,3] add(x)"), "5:3", "add takes 2 operands, 'y' has 1"),
    "trailing comma": (module("y = f32[2,3] add(x, )"), "5:23", "expected an operand"),
    "elided operands": (module("y = f32[2,3] add(x, ...(+1))"), "5:23", "operands were left out"),
    "instruction twice": (module("x = f32[2,3] negate(x)"), "5:3", "instruction 'x' is defined twice"),
    "two roots": (module("ROOT y = f32[2,3] negate(x)", "ROOT z = f32[2,3] negate(x)"), "6:8", "a second ROOT"),
    "parameter gap": (module("y = f32[] parameter(2)"), "3:7", r"no parameter\(1\)"),
    "parameter twice": (module("y = f32[] parameter(0)"), "3:7", r"more than one parameter\(0\)"),
    "parameter number": (module("y = f32[] parameter(one)"), "5:23", "expected the parameter's number"),
    "no attribute": (module("y = f32[3,2] transpose(x)"), "5:3", "transpose needs the attribute dimensions="),
    "attribute twice": (
        module("y = f32[3,2] transpose(x), dimensions={1,0}, dimensions={1,0}"),
        "5:46",
        "'dimensions' is given twice",
    ),
    "not an attribute": (module("y = f32[2,3] negate(x), 5"), "5:27", "expected an attribute: name=value"),
    "no value": (module("y = f32[2,3] negate(x), a="), "6:1", "expected the value of attribute 'a'"),
    "open brace": (module("y = f32[2,3] negate(x), a={{1}"), "7:1", "expected an instruction"),
    "open string": (module('y = f32[2,3] negate(x), a="b'), "5:29", "this string never ends"),
    "open comment": (module("y = f32[2,3] /* negate(x)"), "5:16", "this comment never ends"),
    "wrong dimensions": (module("y = f32[3,2] transpose(x), dimensions={0,0}"), "5:3", "2 dimensions between 0 and 2"),
    "dimensions value": (
        module("y = f32[3,2] transpose(x), dimensions={a}"),
        "5:30",
        "attribute 'dimensions': expected numbers",
    ),
    "no computation": (
        module("z = f32[] constant(0)", "y = f32[] reduce(x, z), dimensions={0,1}, to_apply=ad", before=REGION),
        "6:43",
        "no computation 'ad' before this one; did you mean 'add'",
    ),
    "no predecessor": (module("y = f32[2,3] negate(x), control-predecessors={q}"), "5:25", "no instruction 'q'"),
    "call arity": (module("y = f32[] call(x), to_apply=add", before=REGION), "5:3", "add takes 2 parameters, not 1"),
    "tuple index": (
        module("t = (f32[2,3]) tuple(x)", "y = f32[] get-tuple-element(t), index=1"),
        "6:3",
        "index=1 is not",
    ),
    "window": (
        module("y = f32[2,3] reduce-window(x, x), window={size=2 stride=1x1}"),
        "5:37",
        "stride has 2 dimensions",
    ),
    "labels": (module("y = f32[2,3] convolution(x, x), dim_labels=bb_io->bf"), "5:35", "one 'b'"),
    "slice": (module("y = f32[1,3] slice(x), slice={[0:1]}"), "5:3", "slice needs 2 ranges"),
    "literal": (module("y = f32[2] constant({1, b})"), "5:27", "expected a number"),
    "too few values": (module("y = f32[3] constant({1, 2})"), "5:23", "expected a literal with 3 values"),
    "too many values": (module("y = f32[1] constant({1, 2})"), "5:23", "expected a literal with 1 values"),
    "wrong nesting": (module("y = f32[2,1] constant({1, 2})"), "5:25", "nested as \\[2,1\\]"),
    "literal range": (module("y = s8[2] constant({127, 128})"), "5:28", "128 is not a value of type s8"),
    "literal of pred": (module("y = s8[2] constant({true, 1})"), "5:23", "expected an integer"),
    "memory of a literal": (module("y = f32[99999999999] constant({1})"), "5:33", "expected 99999999999 values"),
    "groups": (
        module("y = f32[2,3] all-gather(x), dimensions={0}, replica_groups=[2,4]<=[9]"),
        "5:47",
        "as many devices",
    ),
    "too many devices": (
        module("y = f32[2,3] all-gather(x), dimensions={0}, replica_groups=[1,99999999]<=[99999999]"),
        "5:47",
        "more than",
    ),
    "sharding": (module("y = f32[2,3] negate(x), sharding={devices=[2,2]0,1}"), "5:27", "4 tiles, but 2 devices"),
    "sharding iota": (module("y = f32[2,3] negate(x), sharding={devices=[2,2]<=[2]}"), "5:27", "4 tiles, but"),
    "tuple arity": (module("y = (f32[2,3]) tuple(x, x)"), "5:3", "a tuple of 2 operands"),
    "tuple depth": (module("y = " + "(" * 65 + ")" * 65 + " tuple()"), "5:71", "tuple shapes nest deeper than 64"),
    "after a comment": (module("/* a */ y = f32[2,3] /* b */ negat(x)"), "5:32", "unknown opcode"),
    "alias": (module(header="HloModule m, input_output_alias={ {3}: (0, {}) }"), "1:14", "no such output or parameter"),
    "donor": (module(header="HloModule m, buffer_donor={ (0, {1}) }"), "1:14", "no such buffer: parameter 0"),
    "donors": (
        module(header="HloModule m, buffer_donor={ 0 }"),
        "1:14",
        "parameter index",
    ),
    "tables": (
        'HloModule m\n\nFileNames\n1 "a"\n\nENTRY e { p = f32[] parameter(0) }',
        "6:1",
        "expected 'FunctionNames'",
    ),
    "result": (
        "HloModule m\nENTRY e (p: f32[2]) -> f32[3] {\n  p = f32[2] parameter(0)\n}",
        "2:9",
        "differs from the shape of its root",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_says_where_and_what(name: str) -> None:
    text, where, message = CASES[name]
    with pytest.raises(HloSyntaxError, match=message) as caught:
        parse(text)
    assert caught.value.where == where, str(caught.value)


def test_shows_the_line_and_a_caret_below_the_place() -> None:
    with pytest.raises(HloSyntaxError) as caught:
        parse(module("y = f32[2,3] negat(x)  // said the planner"))
    said, line, caret = caught.value.message.split("\n")
    assert said.startswith("unknown opcode")
    assert line.endswith("// said the planner")
    assert line[caret.index("^") :].startswith("negat(x)")


def test_cuts_long_lines_around_the_place() -> None:
    with pytest.raises(HloSyntaxError) as caught:
        parse(module("y = f32[2,3] negate(x), " + "a" * 5000 + "={}, b=é"))
    _, line, caret = caught.value.message.split("\n")
    assert len(line) < 300
    assert line[len(caret) - 1] != " "


def test_crosses_a_process_boundary() -> None:
    with pytest.raises(HloSyntaxError) as caught:
        parse("HloModule")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize("depth", [70, 300, 100_000])
@pytest.mark.parametrize(
    "line", ["y = {open}f32[]{close} tuple()", "y = f32[2,3] negate(x), a={brace}", "y = () constant({open}1{close})"]
)
def test_deep_nesting_is_refused_not_recursed_into(line: str, depth: int) -> None:
    filled = line.format(open="(" * depth, close=")" * depth, brace="{" * depth + "}" * depth)
    if "a={" in line and depth == 70:
        parse(module(filled))  # attributes may nest deeper than shapes: backend_config is JSON
        return
    with pytest.raises(HloSyntaxError):
        parse(module(filled))


def many_devices(count: int) -> str:
    groups = "y{n} = f32[8] all-gather(p), dimensions={{0}}, replica_groups=[1,{devices}]<=[{devices}]\n"
    lines = [groups.format(n=n, devices=100_000 + n) for n in range(count)]
    return f"HloModule m\nENTRY e {{ p = f32[8] parameter(0)\n{''.join(lines)}}}"


def one_name(count: int) -> str:
    lines = [f"c{n} {{ x.1 = f32[] parameter(0) }}\n" for n in range(count)]
    return f"HloModule m\n{''.join(lines)}ENTRY e {{ p = f32[] parameter(0) }}"


OPEN = "HloModule m\nENTRY e { p = f32[8] parameter(0) y = f32[8] "
HOSTILE = {
    "open comments": "HloModule m " + "/*" * 300_000,
    "open strings": "HloModule m, a=" + '"\\' * 300_000,
    "commas": "HloModule m" + "," * 500_000,
    "names": "HloModule m\nENTRY e {\n" + "x" * 500_000,
    "same name": one_name(20_000),
    "dimensions": "HloModule m\nENTRY e { p = f32[" + "2," * 300_000 + "2] parameter(0) }",
    "groups": many_devices(2_000),
    "parentheses": OPEN + "add" + "(" * 300_000,
    "braces": OPEN + "add(p, p), a=" + "{}" * 300_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_texts_take_linear_time(name: str) -> None:
    start = time.process_time()
    try:
        parse(HOSTILE[name])
    except HloSyntaxError:
        assert name != "same name"
    assert time.process_time() - start < 5.0


def test_leaves_the_garbage_collector_as_it_was() -> None:
    assert gc.isenabled()
    with pytest.raises(HloSyntaxError):
        parse("HloModule")
    assert gc.isenabled()
    gc.disable()
    try:
        parse(module())
        assert not gc.isenabled()
    finally:
        gc.enable()
