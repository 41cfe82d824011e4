"""Programs whose text leaves constants out: planned as if the values were arguments, proven, never run."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jaxlib import _hlo

import shardwright as sw
from shardwright.cli import main
from shardwright.errors import UnsupportedProgramError
from shardwright.plans.plan import Plan
from shardwright.xla import CompileService

_TABLE = np.linspace(0, 1, 64 * 32, dtype=np.float32).reshape(64, 32)


def _step(x: Any, w: Any) -> Any:
    def body(y: Any, row: Any) -> tuple[Any, None]:
        return jnp.tanh(y @ w) * row, None

    return lax.scan(body, x * _TABLE[:32, 0], _TABLE)[0]


def _elided_text() -> str:
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 32), (32, 32))]
    return str(jax.jit(_step).lower(*shapes).compiler_ir("hlo").as_hlo_text())


@pytest.fixture(scope="module")
def planned() -> Plan:
    text = _elided_text()
    assert "constant({...})" in text
    step_plan = sw.plan(text, 8, cache=False)
    assert isinstance(step_plan, Plan)
    return step_plan


def test_what_jax_prints_by_default_is_planned_and_says_so(planned: Plan) -> None:
    (note,) = [note for note in planned.notes if "leaves the value out" in note]
    assert "--xla_dump_large_constants" in note
    assert "print_large_constants=True" in note
    assert "leaves the value out" in planned.explain(width=500)


def test_plan_is_that_of_the_whole_text(planned: Plan) -> None:
    """No rule looks at what the constants hold."""
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 32), (32, 32))]
    whole = sw.plan(jax.jit(_step).lower(*shapes).as_text("hlo"), 8, cache=False)
    assert isinstance(whole, Plan)
    assert whole.cost.step_s == planned.cost.step_s
    assert [each.sharding for each in whole.parameters] == [each.sharding for each in planned.parameters]


def test_constants_take_their_bytes_on_every_device_as_xla_keeps_them(planned: Plan) -> None:
    """Printed or left out; split like `_TABLE` or not. XLA's peak of one device has them too."""
    assert planned.memory.constants_bytes >= _TABLE.nbytes
    assert planned.memory.peak_bytes >= planned.memory.constants_bytes + planned.memory.arguments_bytes
    with pytest.raises(sw.MemoryBudgetError, match="constants of the program"):
        sw.plan(_elided_text(), 8, cache=False, memory_budget=_TABLE.nbytes)
    assert sw.Plan.from_json(planned.to_json()).memory == planned.memory
    large = np.linspace(0, 1, 1 << 18, dtype=np.float32).reshape(512, 512)
    compiled = jax.jit(lambda x: x @ large).lower(jax.ShapeDtypeStruct((8, 512), jnp.float32)).compile()
    figures = compiled.memory_analysis()
    assert figures.peak_memory_in_bytes >= large.nbytes > figures.temp_size_in_bytes


def test_it_is_proven_but_neither_emitted_nor_compiled_to_run(planned: Plan) -> None:
    assert planned.prove().holds
    with pytest.raises(UnsupportedProgramError, match="left out when the text was printed") as caught:
        planned.emit()
    assert "--xla_dump_large_constants" in caught.value.remedy
    with CompileService(8) as service, pytest.raises(UnsupportedProgramError, match="left out"):
        service.compile(planned.require_hlo(), planned)


def test_constants_inside_fusions_are_planned_too() -> None:
    """What XLA prints of a compiled program by default."""
    function = jax.jit(lambda x: jnp.sin(x) * jnp.asarray(np.tanh(_TABLE) ** 2))
    executable = function.lower(jax.ShapeDtypeStruct((64, 32), jnp.float32)).compile().runtime_executable()
    assert executable is not None
    options = _hlo.HloPrintOptions()
    options.print_large_constants = False
    text = executable.hlo_modules()[0].to_string(options)
    assert "fusion(" in text
    assert "constant({...})" in text
    planned = sw.plan(text, 8, cache=False)
    assert isinstance(planned, Plan)
    assert not planned.outputs[0].sharding.is_replicated
    assert any("leaves the value out" in note for note in planned.notes)


def test_the_command_plans_and_refuses_to_emit(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "step.hlo", tmp_path / "step.mlir"
    path.write_text(_elided_text())
    arguments = ["plan", str(path), "--cluster", "8", "--no-cache"]
    assert main(arguments) == 0
    assert main([*arguments, "--emit", str(out)]) == 1
    assert "--xla_dump_large_constants" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("table", "used"),
    [
        ("f32[64]{0} constant({...})", "b = f32[8,64]{1,0} broadcast(t), dimensions={1}"),
        ("pred[8,64]{1,0} constant({...})", "b = f32[8,64]{1,0} convert(t)"),
        ("s32[8,64]{1,0} constant({ {...}, {0} })", "b = f32[8,64]{1,0} convert(t)"),
        ("c64[8,64]{1,0} constant({...})", "b = f32[8,64]{1,0} real(t)"),
        ("(f32[8,64]{1,0}, f32[]) constant(({...}, 0))", "b = f32[8,64]{1,0} get-tuple-element(t), index=0"),
    ],
)
def test_constants_of_every_type_are_planned(table: str, used: str) -> None:
    text = f"""HloModule m
    ENTRY main {{
      x = f32[8,64]{{1,0}} parameter(0)
      t = {table}
      {used}
      ROOT r = f32[8,64]{{1,0}} add(x, b)
    }}"""
    assert sw.plan(text, 8, cache=False).mesh.device_count == 8


def test_a_loop_whose_limit_is_in_a_left_out_constant_has_an_unknown_number_of_trips() -> None:
    text = """HloModule m
    body {
      p = (s32[], s32[12]{0}, f32[8]{0}) parameter(0)
      i = s32[] get-tuple-element(p), index=0
      limits = s32[12]{0} get-tuple-element(p), index=1
      x = f32[8]{0} get-tuple-element(p), index=2
      one = s32[] constant(1)
      j = s32[] add(i, one)
      y = f32[8]{0} sine(x)
      ROOT t = (s32[], s32[12]{0}, f32[8]{0}) tuple(j, limits, y)
    }
    condition {
      p = (s32[], s32[12]{0}, f32[8]{0}) parameter(0)
      i = s32[] get-tuple-element(p), index=0
      limits = s32[12]{0} get-tuple-element(p), index=1
      first = s32[1]{0} slice(limits), slice={[0:1]}
      limit = s32[] reshape(first)
      ROOT c = pred[] compare(i, limit), direction=LT
    }
    ENTRY main {
      x = f32[8]{0} parameter(0)
      zero = s32[] constant(0)
      limits = s32[12]{0} constant({...})
      t = (s32[], s32[12]{0}, f32[8]{0}) tuple(zero, limits, x)
      w = (s32[], s32[12]{0}, f32[8]{0}) while(t), condition=condition, body=body
      ROOT r = f32[8]{0} get-tuple-element(w), index=2
    }"""
    assert any("trip count unknown" in note for note in sw.plan(text, 8, cache=False).notes)
