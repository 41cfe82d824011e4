"""Functions become HLO text that XLA's own parser takes, whatever their arguments look like."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jaxlib import _hlo

from shardwright.client.array_specs import ArrayType, array_spec, host_value, physical_shape, result_value, spec_of
from shardwright.client.frontends.jax import JaxFunction
from shardwright.client.frontends.jax.donations import aliases_of
from shardwright.client.frontends.program import Program
from shardwright.errors import OptionError, UnsupportedProgramError


def lower(fn: Any, *args: Any, platform: str = "cpu", donate: Any = (), static: Any = (), **kwargs: Any) -> Program:
    function = JaxFunction(fn, donate_argnums=donate, static_argnums=static)
    return function.lower(function.describe(args, kwargs, takes_types=True)[0], platform=platform)


def entry_types(program: Program) -> tuple[list[str], list[str]]:
    """(argument types, result types) as XLA's own parser sees them in the entry layout."""
    _hlo.hlo_module_from_text(program.hlo_text)
    header = program.hlo_text.splitlines()[0]
    arguments, results = re.search(r"entry_computation_layout=\{\((.*)\)->(.*?)\}(?:, [a-z_]+=|$)", header).groups()
    types = re.compile(r"\b[a-z]\w*\[[\d,]*\]")
    return types.findall(arguments), types.findall(results)


def assert_types_agree(program: Program) -> None:
    arguments, results = entry_types(program)
    for item, said in ((arguments, program.arguments), (results, program.outputs)):
        assert item == [f"{a.element_type}[{','.join(map(str, a.shape))}]" for a in said]


class Pair(NamedTuple):
    left: Any
    right: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    weights: Any
    none: Any
    count: Any


def test_names_follow_the_pytree_and_the_parameters() -> None:
    def step(state, pair, *rest, scale):
        return {"out": state.weights * scale + pair.left}, rest

    state = State(weights=jnp.ones((2, 3)), none=None, count=0)
    program = lower(step, state, Pair(1.0, jnp.arange(3)), np.ones(2), (np.ones(1),), scale=2.0)
    assert program.argument_names == (
        "state.weights", "state.count", "pair.left", "pair.right", "rest[0]", "rest[1][0]", "scale"
    )  # fmt: skip
    assert program.output_names == ("result[0]['out']", "result[1][0]", "result[1][1][0]")
    assert_types_agree(program)


def test_unused_arguments_and_forwarded_results_keep_their_numbers() -> None:
    program = lower(lambda a, b, c: (c, c, b), 1.0, np.ones(3, np.int32), np.ones(2))
    assert_types_agree(program)
    assert len(program.arguments) == 3
    assert len(program.outputs) == 3


def test_keyword_arguments_take_their_parameters_place() -> None:
    def step(a, b, mode="add"):
        return a + b if mode == "add" else a - b

    by_name = lower(step, 1.0, b=np.ones(3), mode="sub", static=2)
    assert by_name.argument_names == ("a", "b")
    assert "subtract" in by_name.hlo_text


def test_donated_arguments_are_aliased_by_flat_number() -> None:
    def step(params, count, batch):
        return jax.tree.map(lambda p: p + batch.sum(), params), batch.mean(), count + 1

    params = {"a": jnp.ones(3), "b": [jnp.ones((2, 2))]}
    program = lower(step, params, 0, np.ones(5, np.float32), donate=(0, 1))
    assert program.aliases == {0: 0, 1: 1, 3: 2}
    assert program.donated == {0, 1, 2}


def test_arguments_that_jax_gives_away_to_whichever_output_are_aliased_by_type() -> None:
    """As the planner pairs them (`buffer_donor`): who has a plan and who asked for it must agree."""
    mesh = AbstractMesh((1, 2), ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2)
    weights = ArrayType(name="w", element_type="f32", shape=(4, 2))
    loss = ArrayType(name="loss", element_type="f32", shape=())
    typed = jax.ShapeDtypeStruct((4, 2), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(None, "tp")))
    traced = jax.jit(lambda w: (w.sum(), w * 2), donate_argnums=0).trace(typed)
    text = traced.lower(lowering_platforms=("cpu",)).as_text("hlo")
    assert "buffer_donor={ (0, {}) }" in text.splitlines()[0]
    assert aliases_of(text, [weights], [loss, weights]) == {1: 0}


def test_donated_numbers_count_static_arguments() -> None:
    def step(mode, params, batch):
        return params + batch

    program = lower(step, "x", jnp.ones(3), jnp.ones(3), static=0, donate=1)
    assert program.argument_names == ("params", "batch")
    assert program.aliases == {0: 0}


def test_a_donation_that_nothing_can_use_warns_as_jax_does() -> None:
    with pytest.warns(UserWarning, match="donated buffers were not usable"):
        lower(lambda a: a.sum(), jnp.ones(3), donate=0)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_keys_travel_as_their_words(impl: str) -> None:
    key = jax.random.key(7, impl=impl)
    program = lower(lambda key: (jax.random.split(key, 3), jax.random.normal(key, (2,))), key)
    words = physical_shape(spec_of(key))
    assert program.arguments[0].shape == words
    assert program.outputs[0].shape == (3, *words)
    assert_types_agree(program)
    spec = program.results[0]
    keys = jax.random.split(key, 3)
    assert (result_value(host_value(keys, spec_of(keys)), spec) == keys).all()


def test_equal_types_are_one_object_and_weak_types_differ() -> None:
    assert spec_of(2.0) is spec_of(3.5)
    assert spec_of(2.0) is not spec_of(np.float32(2))
    assert spec_of(np.ones(3)) is array_spec((3,), np.dtype("float32"))  # as JAX without x64
    assert host_value(np.ones(3), spec_of(np.ones(3))).dtype == np.float32


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_lowering_is_for_the_clusters_platform(platform: str) -> None:
    program = lower(jnp.linalg.cholesky, np.eye(4, dtype=np.float32), platform=platform)
    assert ("lapack" in program.hlo_text) == (platform == "cpu")


# ---- closed-over constants -----------------------------------------------------

TABLE = np.arange(300, dtype=np.float32)


@jax.jit
def _scaled(x):
    return x * TABLE


def _nested_in_everything(x):
    def body(carry, i):
        return carry + _scaled(x) * i, None

    x, _ = jax.lax.scan(jax.checkpoint(body), x, jnp.arange(3.0))
    x = jax.lax.while_loop(lambda x: x.sum() < TABLE.sum(), lambda x: x + jnp.abs(_scaled(x)) + 1, x)
    return jax.lax.cond(x[0] > 1e9, lambda x: x, lambda x: jax.nn.relu(_scaled(x)), x)


@pytest.mark.parametrize(
    "fn",
    [lambda x: x + TABLE, _scaled, jax.grad(lambda y: _scaled(y).sum()), _nested_in_everything],
    ids=["closure", "jit", "grad", "nested"],
)
def test_large_constants_become_arguments(fn: Any) -> None:
    x = np.linspace(0.1, 1, 300, dtype=np.float32)
    program = lower(fn, x)
    assert {number: value.shape for number, value in program.constants.items()} == {1: (300,)}
    assert len(program.hlo_text) < 60_000
    assert not re.search(r"f32\[300\]\S* constant\(", program.hlo_text)
    assert_types_agree(program)


def test_hoisted_programs_compute_the_same() -> None:
    from shardwright.client.frontends.jax.jaxprs import hoist_constants

    x = np.linspace(0.1, 1, 300, dtype=np.float32)
    hoisted = hoist_constants(jax.make_jaxpr(_nested_in_everything)(x), "cpu")
    (result,) = jax.jit(hoisted.evaluate)(hoisted.constants, [x])
    np.testing.assert_allclose(result, jax.jit(_nested_in_everything)(x), rtol=1e-6)
    (doubled,) = jax.jit(hoisted.evaluate)([2 * c for c in hoisted.constants], [x])
    assert not np.allclose(doubled, result)


def test_constants_stand_between_positional_and_keyword_arguments() -> None:
    program = lower(lambda a, *, b: (a + TABLE).sum() + b, np.ones(300, np.float32), b=1.0)
    assert program.argument_names == ("a", "constants[0]", "b")
    assert list(program.constants) == [1]


def test_small_constants_stay_in_the_text() -> None:
    assert lower(lambda x: x + np.arange(4.0, dtype=np.float32), np.ones(4)).constants == {}


# ---- what cannot travel ----------------------------------------------------------


def _line_of(text: str) -> int:
    lines = open(__file__).read().splitlines()  # noqa: SIM115
    return next(n for n, line in enumerate(lines, 1) if line.strip() == text)


def test_callbacks_are_refused_by_name_and_line() -> None:
    def model(x):
        io_callback(print, None, x)
        return x * 2

    def step(x):
        y = jax.lax.fori_loop(0, 3, lambda i, y: model(y), x)
        return jax.pure_callback(np.sin, x, y)

    with pytest.raises(UnsupportedProgramError) as caught:
        lower(step, np.ones(3, np.float32))
    message = str(caught.value)
    assert "step holds what cannot run on a server" in message
    for name, line in (
        ("jax.experimental.io_callback", "io_callback(print, None, x)"),
        ("jax.pure_callback", "return jax.pure_callback(np.sin, x, y)"),
    ):
        assert re.search(rf"{re.escape(name)} at \S*test_lowering.py:{_line_of(line)}\b", message)
    assert "remedy" in message


def test_shard_map_is_lowered_as_jax_does() -> None:
    """Also one that reads a large array that is closed over, and in a scan."""
    mesh = jax.sharding.AbstractMesh((16,), ("d",))  # more devices than there are here
    spec, table = jax.P("d"), np.ones((64, 64), np.float32)

    def step(x: Any) -> Any:
        region = jax.shard_map(lambda x: jax.lax.psum(x @ table, "d"), mesh=mesh, in_specs=spec, out_specs=jax.P())
        return jax.lax.scan(lambda c, _: (c + region(c).sum(), None), x, None, length=2)[0]

    program = lower(step, np.ones((16, 64), np.float32))
    assert '["d"=16]' in program.hlo_text
    assert 'custom_call_target="xla.sdy.GlobalToLocalShape"' in program.hlo_text
    assert [argument.name for argument in program.arguments] == ["x", "constants[0]"]


def test_a_region_that_is_the_step_has_no_source_line_of_ours() -> None:
    mesh = jax.sharding.AbstractMesh((8,), ("d",))
    program = lower(jax.shard_map(jnp.tanh, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d")), np.ones(8))
    assert "/client/frontends" not in program.hlo_text
    assert "cluster_view" not in program.hlo_text


def test_pmap_is_refused() -> None:
    with pytest.raises(UnsupportedProgramError, match=r"(?s)jax\.pmap.*jax\.shard_map"):
        lower(jax.pmap(lambda x: x + 1), np.ones((8, 1), np.float32))


def test_wrong_arguments_of_parallelize_are_named() -> None:
    with pytest.raises(OptionError, match="not int"):
        JaxFunction(3)
    with pytest.raises(OptionError, match="both static and donated"):
        JaxFunction(lambda a: a, donate_argnums=0, static_argnums=0)
    with pytest.raises(OptionError, match="donate_argnums"):
        JaxFunction(lambda a: a, donate_argnums="ab")
    with pytest.raises(UnsupportedProgramError, match="static_argnums"):
        lower(lambda a, mode: a, 1.0, "text")


def test_source_lines_are_the_users() -> None:
    program = lower(lambda x: jnp.tanh(x) * 2, np.ones(3, np.float32))
    assert "client/frontends" not in program.hlo_text
    assert "test_lowering.py" in program.hlo_text
