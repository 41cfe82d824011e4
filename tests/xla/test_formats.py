"""Programs in every format: one plan; what is damaged is refused with a typed error, whatever it does to XLA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import export

import shardwright as sw
from shardwright.xla.formats import read_program

pytestmark = pytest.mark.dear


def step(params: Any, x: Any, key: Any) -> Any:
    def loss_of(params: Any) -> Any:
        return jnp.square(jnp.tanh(x @ params["w"]) + params["b"]).mean()

    loss, gradients = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), key + jnp.uint32(1), loss


def array(shape: tuple[int, ...], dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


ARGUMENTS = ({"w": array((256, 128)), "b": array((128,))}, array((512, 256)), array((2,), "uint32"))
DONATED = jax.jit(step, donate_argnums=(0, 2))


@pytest.fixture(scope="module")
def programs() -> dict[str, str | bytes]:
    lowered = DONATED.lower(*ARGUMENTS)
    module = lowered.compiler_ir("hlo")
    return {
        "text": lowered.as_text("hlo", debug_info=True),
        "proto": module.as_serialized_hlo_module_proto(),
        "stablehlo": lowered.as_text(debug_info=True),
        "bytecode": export.export(DONATED)(*ARGUMENTS).mlir_module_serialized,
    }


@pytest.fixture(scope="module")
def plan_of_text(programs: dict[str, str | bytes]) -> sw.Plan:
    return sw.plan(programs["text"], 8, cache=False)


def decisions(plan: sw.Plan) -> Any:
    """Everything in a plan that does not name an instruction."""
    variables = [(v.name, v.shape, v.sharding) for v in (*plan.parameters, *plan.outputs)]
    return plan.mesh, variables, plan.cost.step_s


@pytest.mark.parametrize("kind", ["proto", "stablehlo", "bytecode"])
def test_every_format_has_the_plan_of_the_text(
    programs: dict[str, str | bytes], plan_of_text: sw.Plan, kind: str
) -> None:
    plan = sw.plan(programs[kind], 8, cache=False)
    assert decisions(plan) == decisions(plan_of_text)
    assert [variable.name for variable in plan.parameters] == ["params['b']", "params['w']", "x", "key"]


def test_files_are_told_apart_by_content(programs: dict[str, str | bytes], tmp_path: Path) -> None:
    for kind, content in programs.items():
        path = tmp_path / f"{kind}.whatever"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        text = read_program(path)
        assert text.startswith("HloModule jit_step")
        assert (
            "input_output_alias={ {0}: (0, {}, may-alias), {1}: (1, {}, may-alias), {2}: (3, {}, may-alias) }" in text
        )
        assert "test_formats.py" in text, "source lines come along"
        assert read_program(path.read_bytes()) == text


def test_text_that_is_hlo_already_is_left_alone(programs: dict[str, str | bytes]) -> None:
    assert read_program(programs["text"]) is programs["text"]
    commented = "// made by hand\n/* twice */ HloModule m\nENTRY e { ROOT x = f32[] parameter(0) }"
    assert read_program(commented) is commented
    assert read_program(b"\xef\xbb\xbf" + commented.encode()) == commented


def test_text_without_source_lines_names_its_own(tmp_path: Path) -> None:
    path = tmp_path / "bare.mlir"
    path.write_text(jax.jit(step).lower(*ARGUMENTS).as_text())
    assert 'source_file="bare.mlir"' in read_program(path)


def test_dumps_of_xla_hold_a_module(programs: dict[str, str | bytes]) -> None:
    proto = programs["proto"]
    assert isinstance(proto, bytes)
    size, varint = len(proto), b""
    while size:
        size, part = size >> 7, size & 0x7F
        varint += bytes([part | (0x80 if size else 0)])
    assert read_program(b"\x0a" + varint + proto) == read_program(proto)


def test_names_beside_a_program(programs: dict[str, str | bytes]) -> None:
    names = ["bias", "weights", "x", "seed"]
    plan = sw.plan(programs["proto"], 8, names=names, force={"weights": {1: "data"}}, mesh="8")
    assert [variable.name for variable in plan.parameters] == names
    assert "weights" in plan.explain()
    some = sw.plan(programs["text"], 8, names={1: "weights", "x": "batch"}, mesh="8", force="data")
    assert [variable.name for variable in some.parameters] == ["params['b']", "weights", "batch", "key"]
    with pytest.raises(sw.OptionError, match="3 names, but the program has 4 arguments"):
        sw.plan(programs["text"], 8, names=["a", "b", "c"])


def test_what_jax_export_serializes_is_read(programs: dict[str, str | bytes], tmp_path: Path) -> None:
    path = tmp_path / "step.stablehlo"
    path.write_bytes(export.export(DONATED)(*ARGUMENTS).serialize())
    assert read_program(path) == read_program(programs["bytecode"])


@pytest.mark.parametrize("kind", ["HLO text", "StableHLO bytecode", "a serialized Exported"])
def test_sizes_that_are_not_fixed_are_said(kind: str, tmp_path: Path) -> None:
    (rows,) = export.symbolic_shape("rows")
    exported = export.export(jax.jit(lambda x: x + x.shape[0]))(array((rows, 8)))
    path = tmp_path / "step"
    if kind == "HLO text":
        path.write_text("HloModule m\n\nENTRY e {\n  x = f32[?,8]{1,0} parameter(0)\n  ROOT y = f32[?,8] negate(x)\n}")
    else:
        path.write_bytes(exported.mlir_module_serialized if "bytecode" in kind else exported.serialize())
    with pytest.raises(sw.UnsupportedProgramError, match="fixed shapes") as caught:
        sw.plan(path, 2, cache=False)
    assert "syntax" not in str(caught.value)
    assert ("(rows, 8)" in str(caught.value)) is ("Exported" in kind)


def test_programs_for_several_platforms_are_refused() -> None:
    exported = export.export(jax.jit(jnp.tanh), platforms=("cpu", "cuda"))(array((8,)))
    with pytest.raises(sw.UnsupportedProgramError, match="cpu, cuda at once"):
        read_program(bytes(exported.serialize()))


# ---- what cannot be read ---------------------------------------------------------------


@pytest.mark.parametrize("kind", ["proto", "stablehlo", "bytecode", "text"])
@pytest.mark.parametrize("part", [0.01, 0.3, 0.9, 0.999])
def test_cut_programs_are_refused(programs: dict[str, str | bytes], kind: str, part: float) -> None:
    whole = programs[kind]
    with pytest.raises(sw.HloSyntaxError) as caught:
        sw.plan(whole[: int(len(whole) * part)], 8, cache=False)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (bytes(range(256)), "or it is cut short"),
        (b"PK\x03\x04" + b"\xff" * 40, "not HLO text"),
        (b"\x0a\x03abc\x12\x03def", "a protocol buffer, but no HloModuleProto"),
        (b"\x10\x00\x00\x00\x0c\x00ML\xefR\r\xff", "cannot read a serialized jax.export.Exported"),
        (b"step.hlo", r"pathlib.Path\('step.hlo'\)"),
        (b"module {", "XLA cannot read StableHLO text"),
        (b"", "HloModule"),
        (b"hello,\nworld", "HloModule"),
    ],
)
def test_other_files_are_refused(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(data)
    with pytest.raises(sw.HloSyntaxError) as caught:
        sw.plan(path, 8, cache=False)
    with pytest.raises(sw.HloSyntaxError, match=message):
        raise caught.value


def test_symbolic_sizes_are_refused() -> None:
    x = jax.ShapeDtypeStruct(export.symbolic_shape("n, 4"), jnp.float32)
    data = export.export(jax.jit(lambda x: x * 2))(x).mlir_module_serialized
    with pytest.raises((sw.HloSyntaxError, sw.UnsupportedProgramError), match="fixed"):
        sw.plan(data, 8, cache=False)


def test_damaged_bytecode_ends_at_most_the_child(programs: dict[str, str | bytes]) -> None:
    bytecode = programs["bytecode"]
    assert isinstance(bytecode, bytes)
    damaged = 0
    for position in range(60, 400, 34):
        try:
            read_program(bytecode[:position] + b"\xff" + bytecode[position + 1 :])
        except sw.HloSyntaxError:
            damaged += 1
    assert damaged > 2


def test_a_missing_file_and_other_values_are_named(tmp_path: Path) -> None:
    with pytest.raises(sw.OptionError, match=r"gone\.pb: cannot be read \(No such file"):
        sw.plan(tmp_path / "gone.pb", 8)
    with pytest.raises(sw.OptionError, match="not int"):
        sw.plan(3, 8)
