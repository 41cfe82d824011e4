"""Whatever can be written down comes back: shapes, strings, literals, device groups, whole modules."""

from __future__ import annotations

import random
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from referee import print_by_xla

from shardwright.errors import HloSyntaxError
from shardwright.hlo import ArrayShape, OpaqueShape, Shape, TupleShape, format_shape, parse
from shardwright.hlo.replica_groups import parse_replica_groups
from shardwright.hlo.shapes import ELEMENT_BITS
from shardwright.hlo.strings import unescape

#: Seeded, and without a deadline: the machine may be busy.
repeatable = settings(max_examples=60, deadline=None, derandomize=True)

ELEMENTS = sorted(ELEMENT_BITS)


@st.composite
def array_shapes(draw: st.DrawFn) -> ArrayShape:
    dimensions = tuple(draw(st.lists(st.integers(0, 50), max_size=4)))
    dynamic: tuple[bool, ...] = tuple(draw(st.booleans()) for _ in dimensions)
    layout = None
    if dimensions and draw(st.booleans()):
        order = draw(st.permutations(range(len(dimensions))))
        layout = ",".join(map(str, order)) + draw(st.sampled_from(["", ":T(8,128)", ":T(8,128)(2,1)S(5)", ":S(1)"]))
    return ArrayShape(draw(st.sampled_from(ELEMENTS)), dimensions, dynamic if any(dynamic) else (), layout)


shapes = st.recursive(
    array_shapes() | st.just(OpaqueShape("token")),
    lambda inner: st.lists(inner, max_size=4).map(lambda elements: TupleShape(tuple(elements))),
    max_leaves=8,
)


def escape(text: str) -> str:
    """A string literal, quotes included, that stands for `text`."""
    body = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")
    return f'"{body}"'


def module_of(line: str) -> str:
    return f"HloModule m\nENTRY e {{\n  ROOT r = {line}\n}}\n"


@repeatable
@given(shapes)
def test_shapes(shape: Shape) -> None:
    text = module_of(f"{format_shape(shape)} parameter(0)")
    module = parse(text)
    assert module.entry.root.shape == shape
    assert print_by_xla(module.to_text()) == print_by_xla(text)


@repeatable
@given(st.text(st.characters(min_codepoint=1, max_codepoint=0x2FF, exclude_categories=["Cs"])))
def test_strings(value: str) -> None:
    assert unescape(escape(value)) == value
    text = module_of(f'f32[] parameter(0), frontend_attributes={{a={escape(value)},b="2"}}')
    module = parse(text)
    assert module.entry.root.get("frontend_attributes") == {"a": value, "b": "2"}
    assert print_by_xla(module.to_text()) == print_by_xla(text)


@repeatable
@given(st.binary(max_size=30))
def test_bytes_in_strings(value: bytes) -> None:
    literal = '"' + "".join(f"\\{byte:03o}" for byte in value) + '"'
    try:
        assert unescape(literal) == value.decode()
    except UnicodeDecodeError:
        assert unescape(literal) == value.decode("latin-1")


FINITE = st.floats(allow_nan=False, allow_infinity=False, width=32).map(lambda number: f"{number:.9g}")
VALUES = {
    "f32": FINITE | st.sampled_from(["nan", "-nan", "inf", "-inf"]),
    "s8": st.integers(-128, 127).map(str),
    "u64": st.integers(0, 2**64 - 1).map(str),
    "pred": st.sampled_from(["true", "false", "0", "1"]),
    "c64": st.tuples(FINITE, FINITE).map(lambda pair: f"({pair[0]}, {pair[1]})"),
}


def nested(values: list[str], dimensions: list[int]) -> str:
    if not dimensions:
        return values[0]
    step = len(values) // dimensions[0] if dimensions[0] else 0
    parts = [nested(values[n * step : (n + 1) * step], dimensions[1:]) for n in range(dimensions[0])]
    return "{" + ", ".join(parts) + "}"


@repeatable
@given(st.data())
def test_literals(data: st.DataObject) -> None:
    element = data.draw(st.sampled_from(sorted(VALUES)))
    dimensions = data.draw(st.lists(st.integers(1, 4), max_size=3))
    count = prod(dimensions)
    values = data.draw(st.lists(VALUES[element], min_size=count, max_size=count))
    shape = f"{element}[{','.join(map(str, dimensions))}]"
    text = module_of(f"{shape} constant({nested(values, dimensions)})")
    assert print_by_xla(parse(text).to_text()) == print_by_xla(text)
    for wrong in ([*dimensions[:-1], dimensions[-1] + 1], [*dimensions, 1]) if dimensions else ([2],):
        sizes = ",".join(map(str, wrong))
        with pytest.raises(HloSyntaxError):
            parse(text.replace(f"{shape} constant", f"{element}[{sizes}] constant"))


@repeatable
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_groups_in_all_three_forms(sizes: list[int], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(sizes))))
    cut = data.draw(st.integers(0, len(sizes)))
    devices = np.arange(prod(sizes)).reshape(sizes).transpose(order)
    rows = devices.reshape(prod(devices.shape[:cut]), -1).tolist()
    expected = tuple(tuple(row) for row in rows)
    iota = f"[{len(rows)},{len(rows[0])}]<=[{','.join(map(str, sizes))}]T({','.join(map(str, order))})"
    assert parse_replica_groups(iota) == expected
    assert parse_replica_groups("{" + ",".join("{" + ",".join(map(str, row)) + "}" for row in rows) + "}") == expected
    axes = ",".join(f"'a{n}'={size}" for n, size in enumerate(sizes))
    free, grouped = sorted(order[:cut]), order[cut:]
    by_axes = np.arange(prod(sizes)).reshape(sizes).transpose([*free, *grouped]).reshape(len(rows), -1).tolist()
    if grouped:
        names = ",".join(f"'a{n}'" for n in grouped)
        mesh = f"mesh[{axes}] {{{names}}}"
        assert parse_replica_groups(mesh) == tuple(tuple(row) for row in by_axes)


OPS = {"negate": 1, "tanh": 1, "add": 2, "multiply": 2, "select": 3, "tuple": None, "call": 2}


@repeatable
@given(st.integers(0, 2**32))
def test_modules(seed: int) -> None:
    """A random graph, spelled at random: with and without sigils, operand shapes, comments, line breaks."""
    rng = random.Random(seed)
    names: list[str] = []
    model: list[tuple[str, str, list[str]]] = []

    def space() -> str:
        return rng.choice([" ", "  ", "\n    ", " /* note */ ", "\t", " // rest\n "])

    def use(name: str) -> str:
        shape = rng.choice(["", "f32[2]{0} ", "f32[2] "])
        return shape + rng.choice(["", "%"]) + name

    lines = []
    for number in range(rng.randrange(1, 25)):
        name = f"{rng.choice(['x', 'add', 'jit.f', 'a-b_c'])}.{number}"
        opcode = rng.choice(["parameter", *OPS]) if names else "parameter"
        count = OPS.get(opcode) if opcode != "tuple" else rng.randrange(4)
        operands = [rng.choice(names) for _ in range(count or 0)]
        inside = ("," + space()).join(use(operand) for operand in operands)
        shape = f"({', '.join(['f32[2]{0}'] * len(operands))})" if opcode == "tuple" else "f32[2]{0}"
        if opcode == "parameter":
            inside = str(sum(known == "parameter" for _, known, _ in model))
        callee = rng.choice(["", "%"]) + "body"
        tail = f",{space()}to_apply={callee}" if opcode == "call" else ""
        lines.append(f"  {rng.choice(['', '%'])}{name} ={space()}{shape}{space()}{opcode}({inside}){tail}{space()}")
        model.append((name, opcode, operands))
        if opcode != "tuple":
            names.append(name)
    body = "body { p = f32[2]{0} parameter(0) q = f32[2]{0} parameter(1) ROOT s = f32[2]{0} add(p, q) }"
    text = f"HloModule m\n{body}\nENTRY e {{\n" + "\n".join(lines) + "\n}\n"
    module = parse(text)
    assert [(i.name, i.opcode, [operand.name for operand in i.operands]) for i in module.entry] == model
    assert module.entry.root.name == model[-1][0]
    assert print_by_xla(module.to_text()) == print_by_xla(text)


NAMES = st.sampled_from(
    ["x", "x.1", "x.2", "x.0", "x.01", "y.3", "y", "y.z", "y.3.1", "x.1.1", "a-b.7", "x.-1", "x.-0", "x.007", "_"]
)


@repeatable
@given(st.lists(st.lists(NAMES, min_size=1, max_size=6, unique=True), min_size=1, max_size=5))
def test_names_used_in_several_computations_are_numbered_as_xla_numbers_them(computations: list[list[str]]) -> None:
    lines = []
    for number, names in enumerate(computations):
        last = number == len(computations) - 1
        body = "\n".join(f"  %{name} = f32[] parameter({index})" for index, name in enumerate(names))
        lines.append(f"{'ENTRY ' if last else ''}%c{number} {{\n{body}\n}}\n")
    text = "HloModule m\n" + "\n".join(lines)
    module = parse(text)
    every = [instruction.name for instruction in module.instructions()]
    assert len(set(every)) == len(every)
    assert print_by_xla(module.to_text()) == print_by_xla(text)
