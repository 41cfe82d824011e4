"""Shapes, attribute values, aliases and the structure of what is parsed."""

from __future__ import annotations

from typing import Any

import pytest

from shardwright.hlo import (
    Alias,
    ArrayShape,
    BufferShape,
    ConvDims,
    Instruction,
    OpaqueShape,
    TupleShape,
    Window,
    format_shape,
    parse,
    without_layout,
)

ATTRIBUTES: dict[str, tuple[str, Any]] = {
    "integer": ("a=3", 3),
    "negative": ("a=-1", -1),
    "float": ("a=0.001", 0.001),
    "true": ("a=true", True),
    "word": ("direction=EQ", "EQ"),
    "string": (r'a="x\"y\\z\n"', 'x"y\\z\n'),
    "octal bytes": (r'a="\303\251\000"', "é\0"),
    "not utf-8": (r'a="\377"', "ÿ"),
    "list": ("dimensions={1, 0}", (1, 0)),
    "empty list": ("dimensions={}", ()),
    "nested list": ("source_target_pairs={{0,1},{1,0}}", ((0, 1), (1, 0))),
    "words": ("operand_precision={highest,default}", ("highest", "default")),
    "booleans": ("parameter_replication={true,false}", (True, False)),
    "slice": ("slice={[0:3], [1:4:2]}", ((0, 3, 1), (1, 4, 2))),
    "padding": ("padding=0_0x1_-1_2", ((0, 0, 0), (1, -1, 2))),
    "window": (
        "window={size=3x2 stride=2x1 pad=1_1x0_-1 lhs_dilate=1x2 rhs_dilate=3x1 rhs_reversal=0x1}",
        Window(
            sizes=(3, 2), strides=(2, 1), padding_low=(1, 0), padding_high=(1, -1), lhs_dilation=(1, 2),
            rhs_dilation=(3, 1), reversal=(False, True),
        ),
    ),
    "window with defaults": (
        "window={size=4}",
        Window(
            sizes=(4,), strides=(1,), padding_low=(0,), padding_high=(0,), lhs_dilation=(1,), rhs_dilation=(1,),
            reversal=(False,),
        ),
    ),
    "convolution": (
        "dim_labels=b01f_01io->b01f",
        ConvDims(
            input_batch=0, input_feature=3, input_spatial=(1, 2), kernel_input_feature=2, kernel_output_feature=3,
            kernel_spatial=(0, 1), output_batch=0, output_feature=3, output_spatial=(1, 2),
        ),
    ),
    "metadata": (
        'metadata={op_type="dot" op_name="jit(f)/transpose(jvp(x))/a, b={c}" stack_frame_id=7 profile_type={1}}',
        {"op_type": "dot", "op_name": "jit(f)/transpose(jvp(x))/a, b={c}", "stack_frame_id": 7, "profile_type": (1,)},
    ),
    "frontend attributes": (
        r'frontend_attributes={xla.sdy.sharding="#sdy.sharding<@mesh, [{\"x\"}]>",b="2"}',
        {"xla.sdy.sharding": '#sdy.sharding<@mesh, [{"x"}]>', "b": "2"},
    ),
    "sharding": ("sharding={{replicated}, {devices=[2,1]<=[2]}}", "{{replicated}, {devices=[2,1]<=[2]}}"),
    "string config": (r'backend_config="{\"n\": 1}"', '{"n": 1}'),
    "json config": ('backend_config={"n":{"m":"}"},"k":[1, 2]}', '{"n":{"m":"}"},"k":[1, 2]}'),
    "groups as lists": ("replica_groups={{0,2},{1,3}}", ((0, 2), (1, 3))),
    "no groups": ("replica_groups={}", ()),
    "groups as iota": ("replica_groups=[2,2]<=[4]", ((0, 1), (2, 3))),
    "groups as transposed iota": ("replica_groups=[2,4]<=[4,2]T(1,0)", ((0, 2, 4, 6), (1, 3, 5, 7))),
    "groups as mesh": ("replica_groups=mesh['x'=2,'y'=2] {'x'}", ((0, 2), (1, 3))),
    "groups over all axes": ("replica_groups=mesh['x'=2,'y'=2] {'x','y'}", ((0, 1, 2, 3),)),
    "groups over part of an axis": ("replica_groups=mesh['x'=4] {'x':(1)2}", ((0, 2), (1, 3))),
    "groups over the minor part": ("replica_groups=mesh['x'=4] {'x':(2)2}", ((0, 1), (2, 3))),
    "something unknown": ("later={a=[1] b(2)}", "{a=[1] b(2)}"),
}  # fmt: skip


def instruction_with(attribute: str) -> Instruction:
    lines = f"p = f32[4]{{0}} parameter(0)\n  ROOT y = f32[4]{{0}} negate(p), {attribute}, last=1"
    return parse(f"HloModule m\nENTRY e {{\n  {lines}\n}}\n").entry.root


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_value_of(name: str) -> None:
    text, expected = ATTRIBUTES[name]
    root = instruction_with(text)
    assert root.get(text.partition("=")[0]) == expected
    assert root.get("last") == 1
    assert root.attributes[text.partition("=")[0]].text == text.partition("=")[2]


SHAPES = {
    "f32[]": ArrayShape("f32", ()),
    "bf16[8,128]{1,0:T(8,128)(2,1)S(1)}": ArrayShape("bf16", (8, 128), layout="1,0:T(8,128)(2,1)S(1)"),
    "s32[2,<=3]": ArrayShape("s32", (2, 3), (False, True)),
    "token[]": OpaqueShape("token"),
    "()": TupleShape(()),
    "(f32[2]{0}, ((), pred[]))": TupleShape(
        (ArrayShape("f32", (2,), layout="0"), TupleShape((TupleShape(()), ArrayShape("pred", ()))))
    ),
    "b(u8[4]{0})": BufferShape(ArrayShape("u8", (4,), layout="0")),
}


@pytest.mark.parametrize("text", SHAPES)
def test_shape_of(text: str) -> None:
    root = parse(f"HloModule m\nENTRY e {{ ROOT p = {text} parameter(0) }}").entry.root
    assert root.shape == SHAPES[text]
    assert format_shape(root.shape) == text


def test_sizes() -> None:
    assert ArrayShape("s4", (3,)).size_bytes == 2
    nested = SHAPES["(f32[2]{0}, ((), pred[]))"]
    assert nested.size_bytes == 9
    assert [leaf.element_type for leaf in nested.leaves] == ["f32", "pred"]
    assert format_shape(without_layout(nested)) == "(f32[2], ((), pred[]))"


TEXT = """HloModule jit_step, is_scheduled=true, num_partitions=8, input_output_alias={ {0}: (1, {}, must-alias), {1, 0}: (0, {2}) }

body {
  p = (s32[], f32[]) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  v = f32[] get-tuple-element(p), index=1
  ROOT t = (s32[], f32[]) tuple(i, v)
}

cond { p = (s32[], f32[]) parameter(0) ROOT yes = pred[] constant(true) }, execution_thread="main"

ENTRY main {
  x = (f32[], f32[], f32[]) parameter(0)
  y = f32[] parameter(1)
  zero = s32[] constant( 0 )
  start = (s32[], f32[]) tuple(zero, y)
  w = (s32[], f32[]) while(start), condition=cond, body=body, control-predecessors={y}
  u = (f32[]) tuple(y)
  ROOT r = (f32[], (f32[])) tuple(y, u)
}
"""  # noqa: E501


def test_structure() -> None:
    module = parse(TEXT)
    body, cond, main = module.computations
    loop = next(instruction for instruction in main if instruction.opcode == "while")
    assert (module.name, module.entry, main.is_entry) == ("jit_step", main, True)
    assert module.header["is_scheduled"].value is True
    assert module.header["num_partitions"].value == 8
    assert module.aliases == (Alias((0,), 1, (), "must-alias"), Alias((1, 0), 0, (2,), "may-alias"))
    assert loop.called == {"condition": (cond,), "body": (body,)}
    assert loop.get("body") == ("body",)
    assert cond.attributes["execution_thread"].value == "main"
    assert [(parameter.name, parameter.index) for parameter in main.parameters] == [("x", 0), ("y", 1)]
    assert loop.operands[0].operands == (main.instructions[2], main.parameters[1])
    assert (main.root.name, main.root.is_root, main.instructions[2].payload.strip()) == ("r", True, "0")
    assert [body.root.operands[1].index, loop.line, main.root.line] == [1, 17, 19]
    assert [instruction.name for instruction in cond] == ["p.1", "yes"]  # `p` is named in two computations


def test_equal_shapes_and_attributes_are_one_object() -> None:
    lines = "".join(f'  y{n} = f32[4]{{0}} negate(p), metadata={{op_name="a"}}\n' for n in range(3))
    module = parse(f"HloModule m\nENTRY e {{\n  p = f32[4]{{0}} parameter(0)\n{lines}}}")
    first, second = module.entry.instructions[1:3]
    assert first.shape is second.shape
    assert first.attributes["metadata"] is second.attributes["metadata"]
