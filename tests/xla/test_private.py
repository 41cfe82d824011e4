"""One test per use of a private jaxlib name: an upgrade that breaks one is seen here by name."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.errors import HloSyntaxError, PlatformError, UnsupportedProgramError
from shardwright.xla import private

HLO = """HloModule jit_f, input_output_alias={ {1}: (0, {}, may-alias) }

ENTRY main.1 {
  x.1 = f32[8,4]{1,0} parameter(0)
  tanh.7 = f32[8,4]{1,0} tanh(x.1), metadata={op_name="jit(f)/tanh"}
  add.3 = f32[8,4]{1,0} add(tanh.7, x.1)
  ROOT tuple.1 = (f32[8,4]{1,0}, f32[8,4]{1,0}) tuple(tanh.7, add.3)
}
"""

MLIR = """
sdy.mesh @m = <["x"=4, "y"=2]>
func.func @main(%a: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@m, [{"x"}, {"y"}]>})
    -> (tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@m, [{"y"}, {}]>}, tensor<f32>) {
  %0 = stablehlo.tanh %a : tensor<8x4xf32>
  %1 = stablehlo.constant dense<1.0> : tensor<f32>
  return %0, %1 : tensor<8x4xf32>, tensor<f32>
}
"""


@pytest.fixture(scope="module")
def devices():
    return private.local_devices()


@pytest.fixture(scope="module")
def executable(devices):
    return private.compile_and_load(MLIR, devices, private.compile_options([d.id for d in devices]))


def test_every_name_is_there():
    private.check_platform()


def test_a_name_that_moved_is_one_clear_error():
    names = {**private.PRIVATE_NAMES, "jaxlib._hlo": ("hlo_module_from_text", "HloModule.gone")}
    with pytest.raises(PlatformError, match=r"lacks jaxlib\._hlo\.HloModule\.gone") as raised:
        private.check_platform(names)
    assert "pip install" in raised.value.remedy


def test_a_module_that_moved_is_the_same_error():
    with pytest.raises(PlatformError, match=r"lacks jaxlib\.nowhere"):
        private.check_platform({"jaxlib.nowhere": ("thing",)})


def test_canonical_hlo_is_a_fixed_point():
    once = private.canonical_hlo(HLO)
    assert private.canonical_hlo(once) == once


def test_xla_refuses_what_is_not_hlo():
    with pytest.raises(HloSyntaxError, match="refuses"):
        private.canonical_hlo("HloModule broken\nENTRY {")


def test_serialized_modules_are_printed_whole():
    text = HLO.replace(
        "add.3 = f32[8,4]{1,0} add(tanh.7, x.1)",
        f"c.1 = f32[32]{{0}} constant({{{', '.join(map(str, range(32)))}}})\n"
        "  r.1 = f32[8,4]{1,0} reshape(c.1)\n  add.3 = f32[8,4]{1,0} add(tanh.7, r.1)",
    )
    printed = private.hlo_of_proto(private.parse_hlo(text).as_serialized_hlo_module_proto())
    assert "29, 30, 31" in printed
    assert "{1}: (0, {}, may-alias)" in printed
    assert 'op_name="jit(f)/tanh"' in printed
    with pytest.raises(HloSyntaxError):
        private.hlo_of_proto(b"")


def test_stablehlo_becomes_hlo_text():
    lowered = jax.jit(lambda x: jnp.tanh(x) + 1, donate_argnums=0).lower(jnp.ones(4))
    for module in (lowered.as_text(debug_info=True).encode(), lowered.as_text(debug_info=True)):
        printed = private.hlo_of_stablehlo(module)
        assert "input_output_alias={ {}: (0, {}, may-alias) }" in printed
        assert 'op_name="x"' in printed
    with pytest.raises(HloSyntaxError, match="error"):
        private.hlo_of_stablehlo(b"module {")


def test_conversion_keeps_instruction_names_and_aliases():
    converted = private.stablehlo_of(HLO)
    assert "mhlo.input_output_alias = [{alias" in converted
    with private.mlir_context():
        module = private.parse_module(converted)
        main = module.body.operations[0]
        names = [private.location_name(op.location) for op in main.body.blocks[0].operations]
        assert names == ["tanh.7", "add.3", None]
        assert private.location_name(main.arguments[0].location) == "x.1"


def test_two_dimensional_dots_are_dot_others_dot_general():
    """Names, not operation kinds, are what emission looks for."""
    text = jax.jit(lambda a, b: (a[0] @ b[0], a @ b)).lower(jnp.ones((2, 4, 4)), jnp.ones((2, 4, 4))).as_text("hlo")
    converted = private.stablehlo_of(text)
    assert "stablehlo.dot " in converted
    assert "stablehlo.dot_general " in converted


def test_conversion_leaves_unused_copies_of_loop_regions():
    """The reason why emission walks from `main` and what it calls."""

    def loop(x):
        return jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x)

    converted = private.stablehlo_of(jax.jit(loop).lower(jnp.ones(4)).as_text("hlo"))
    assert converted.count("stablehlo.sine") == 2
    assert "call @region" not in converted


def test_an_instruction_without_stablehlo_is_refused():
    # An instruction of XLA's with no operation in StableHLO comes out as one MLIR cannot read.
    hlo = "HloModule m\nENTRY e {\n  a = u32[4] parameter(0)\n  ROOT r = u32[4] mulhi(a, a)\n}\n"
    with private.mlir_context(), pytest.raises(UnsupportedProgramError, match="no StableHLO form"):
        private.parse_module(private.stablehlo_of(hlo))


def test_verification_is_typed():
    text = 'func.func @main() { "stablehlo.reduce_scatter"() : () -> () return }'
    with private.mlir_context(), pytest.raises(UnsupportedProgramError):
        private.verify(private.parse_module(text))


def test_partitioned_by_shardy_over_the_given_devices(executable):
    text = private.hlo_of_executable(executable)
    assert "num_partitions=8" in text.split("\n", 1)[0]
    assert "all-to-all" in text or "collective-permute" in text or "all-gather" in text


def test_boundary_shardings_of_a_loaded_executable(executable):
    (argument,) = private.parameter_shardings(executable)
    # mesh x=4, y=2 row-major: device 2x + y holds row block x, column block y
    assert private.tile_coordinates(argument, 2, 8) == tuple((d // 2, d % 2) for d in range(8))
    split, scalar = private.output_shardings(executable)
    assert private.tile_coordinates(split, 2, 8) == tuple((d % 2, 0) for d in range(8))
    assert private.tile_coordinates(scalar, 0, 8) == ((),) * 8


def test_memory_figures_are_per_device(executable):
    arguments, outputs, alias, temporaries = private.memory_figures(executable)
    assert arguments == 8 * 4 * 4 // 8
    assert outputs >= 8 * 4 * 4 // 2 + 4
    assert alias == 0
    assert temporaries >= 0


def test_serialized_executables_run(executable, devices):
    payload = private.serialize_executable(executable)
    loaded = private.deserialize_executable(payload, devices, private.compile_options([d.id for d in devices]))
    mesh = jax.sharding.Mesh(np.array(devices).reshape(4, 2), ("x", "y"))
    x = np.arange(32, dtype=np.float32).reshape(8, 4) / 32
    array = jax.device_put(x, jax.NamedSharding(mesh, jax.P("x", "y")))
    handlers = [
        private.result_handler((8, 4), np.dtype("float32"), jax.NamedSharding(mesh, jax.P("y", None))),
        private.result_handler((), np.dtype("float32"), jax.NamedSharding(mesh, jax.P())),
    ]
    tanh, one = private.execute(loaded, [array], handlers)
    np.testing.assert_allclose(np.asarray(tanh), np.tanh(x), rtol=1e-6)
    assert float(one) == 1.0
    assert tanh.sharding.spec == jax.P("y", None)


def test_debug_options_reach_one_compilation(devices, tmp_path):
    options = private.compile_options([d.id for d in devices], overrides=[("xla_dump_to", str(tmp_path))])
    private.compile_and_load(MLIR, devices, options)
    assert list(tmp_path.glob("*after_optimizations.txt"))


ATTRIBUTE_ONLY = """
sdy.mesh @m = <["x"=8]>
func.func @main(%a: tensor<64x8xf32> {sdy.sharding = #sdy.sharding<@m, [{}, {}]>})
    -> (tensor<64x8xf32> {sdy.sharding = #sdy.sharding<@m, [{}, {}]>}) {
  %0 = stablehlo.tanh %a MARK : tensor<64x8xf32>
  CONSTRAINT
  return %RESULT : tensor<64x8xf32>
}
"""


def test_an_attribute_on_an_ordinary_operation_is_ignored_a_constraint_is_not(devices):
    """The reason why emission inserts constraints."""

    def collectives(mark: str, constraint: str, result: str) -> bool:
        text = ATTRIBUTE_ONLY.replace("MARK", mark).replace("CONSTRAINT", constraint).replace("RESULT", result)
        loaded = private.compile_and_load(text, devices, private.compile_options([d.id for d in devices]))
        return "all-gather" in private.hlo_of_executable(loaded)

    assert not collectives('{sdy.sharding = #sdy.sharding_per_value<[<@m, [{"x"}, {}]>]>}', "", "0")
    constraint = '%1 = sdy.sharding_constraint %0 <@m, [{"x"}, {}]> : tensor<64x8xf32>'
    assert collectives("", constraint, "1")


def test_barriers_are_kept_on_the_cpu_alone() -> None:
    """XLA:GPU refuses a program whose barriers nothing expands."""
    on_cpu, on_gpu = (dict(private.compile_options([0], platform=p).env_option_overrides) for p in ("cpu", "cuda"))
    assert on_cpu["xla_disable_hlo_passes"] == "cse_barrier_expander"
    assert not on_gpu["xla_disable_hlo_passes"]


class Elsewhere(jax.Array):
    """An array whose contents are read when they are needed; `reads` counts."""

    __slots__ = ("reads", "value")
    __hash__ = None
    _committed = False
    aval = property(lambda self: self.value.aval)
    shape = property(lambda self: self.value.shape)
    dtype = property(lambda self: self.value.dtype)
    ndim = property(lambda self: self.value.ndim)
    size = property(lambda self: self.value.size)
    nbytes = property(lambda self: self.value.nbytes)
    sharding = property(lambda self: self.value.sharding)

    def __init__(self, value: jax.Array) -> None:
        self.value, self.reads = value, 0

    def copy_to_host_async(self) -> None:
        pass

    def read(self) -> jax.Array:
        self.reads += 1
        return self.value


class KeyElsewhere(Elsewhere):
    __slots__ = ()


private.register_array_type(Elsewhere, Elsewhere.read)
private.register_array_type(KeyElsewhere, Elsewhere.read)
private.register_key_type(KeyElsewhere, Elsewhere.read)


def test_a_registered_array_computes_and_stays_a_constant_of_a_jaxpr():
    array = Elsewhere(jnp.arange(3.0))
    assert jax.lax.add(array, array).tolist() == [0, 2, 4]
    assert array.reads == 1, "once for both operands"
    assert jax.jit(lambda x: x * 2)(array).tolist() == [0, 2, 4]
    closed = jax.make_jaxpr(lambda x: jax.lax.mul(array, x) + jax.lax.sin(array))(jnp.ones(3))
    assert [constant is array for constant in closed.consts] == [True]
    assert jax.eval_shape(jnp.sin, array).shape == (3,)
    assert array.reads == 2
    assert jax.jit(lambda x: jax.lax.mul(array, x))(2.0 * jnp.ones(3)).tolist() == [0, 2, 4], "read for the text"


def test_a_traced_array_has_the_attributes_of_jax_arrays():
    array = Elsewhere(jnp.arange(6.0).reshape(2, 3))

    def function(x):
        first = private.attribute_while_traced(array, "__getitem__")(0)
        rows = list(private.attribute_while_traced(array, "__iter__")())
        total = private.attribute_while_traced(array, "sum")(axis=0)
        return first + rows[1] + total + private.attribute_while_traced(array, "T")[:, 1] + x

    closed = jax.make_jaxpr(function)(1.0)
    assert array.reads == 0
    assert np.asarray(jax.core.eval_jaxpr(closed.jaxpr, [array.value], 1.0)[0]).tolist() == [10, 15, 20]


def test_registered_keys_are_keys():
    value = jax.random.key(0)
    key = KeyElsewhere(value)
    assert float(jax.random.normal(key)) == float(jax.random.normal(value))
    assert (jax.random.key_data(jax.random.split(key)) == jax.random.key_data(jax.random.split(value))).all()
    assert jax.random.key_data(jax.device_get(key)).tolist() == jax.random.key_data(value).tolist()


def test_a_weak_type_is_given():
    value = private.make_weakly_typed(jnp.ones(3))
    assert value.weak_type
    assert (value * jnp.ones(3, jnp.bfloat16)).dtype == jnp.bfloat16


def test_the_trace_context_follows_settings():
    before = private.trace_context()
    with jax.default_matmul_precision("highest"):
        assert private.trace_context() != before
    assert private.trace_context() == before
    assert hash(private.trace_context()) == hash(before)


def test_a_coordination_service_listens_until_it_is_shut_down() -> None:
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as holder:
        port = holder.getsockname()[1]
    service = private.start_coordination_service(f"127.0.0.1:{port}", 2)
    socket.create_connection(("127.0.0.1", port), timeout=5).close()
    service.shutdown()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


_WITHOUT_JAX = """
import json, sys
from shardwright.xla import private
if sys.argv[1] == "jax":
    import jax
else:
    private.open_cpu_client()
devices = private.local_devices()
executable = private.compile_and_load(sys.argv[2], devices, private.compile_options([each.id for each in devices]))
from jaxlib._jax import custom_call_targets
print(json.dumps([
    sorted(custom_call_targets("Host")), [str(each) for each in devices], private.hlo_of_executable(executable),
    "jax" in sys.modules,
]))
"""

_BATCH_OF_FACTORS = """
sdy.mesh @m = <["x"=8]>
func.func @main(%a: tensor<8x4x4xf32> {sdy.sharding = #sdy.sharding<@m, [{"x"}, {}, {}]>})
    -> (tensor<8x4x4xf32> {sdy.sharding = #sdy.sharding<@m, [{"x"}, {}, {}]>}) {
  %0:2 = stablehlo.custom_call @lapack_spotrf_ffi(%a) {
      mhlo.backend_config = {uplo = 76 : ui8}, mhlo.frontend_attributes = {num_batch_dims = "1"}, api_version = 4 : i32,
      operand_layouts = [dense<[1, 2, 0]> : tensor<3xindex>],
      result_layouts = [dense<[1, 2, 0]> : tensor<3xindex>, dense<0> : tensor<1xindex>],
      output_operand_aliases = [#stablehlo.output_operand_alias<output_tuple_indices = [0], operand_index = 0,
          operand_tuple_indices = []>]
  } : (tensor<8x4x4xf32>) -> (tensor<8x4x4xf32>, tensor<8xi32>)
  return %0#0 : tensor<8x4x4xf32>
}
"""


def test_a_client_without_jax_compiles_as_jax_does():
    def compile_in_a_process(how: str) -> list[Any]:
        command = [sys.executable, "-c", _WITHOUT_JAX, how, _BATCH_OF_FACTORS]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    *mine, has_jax = compile_in_a_process("client")
    *theirs, _ = compile_in_a_process("jax")
    assert mine == theirs
    assert not has_jax
    assert "f32[1,4,4]" in mine[2]
    assert "all-gather" not in mine[2]
