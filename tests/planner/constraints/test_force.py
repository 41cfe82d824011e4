"""Forced strategies are what an engineer calls by these names, in every instruction and on small programs too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.clusters.cluster import Cluster
from shardwright.errors import MicroBatchError, PlanError
from shardwright.hlo import parse
from shardwright.options.plan_options import PlanOptions
from shardwright.planner import plan
from shardwright.planner.graph.dataflow import build_dataflow
from shardwright.planner.graph.inlining import inline_calls
from shardwright.planner.microbatch import split_step
from shardwright.planner.search.batch_dims import find_batch_dims
from shardwright.plans.plan import Plan
from shardwright.plans.shardings import TensorSharding
from shardwright.reserved_names import ANNOTATION_TARGET
from tests.planner.programs import PROGRAMS, Program, cnn, gpt2, lower, mlp, scan, time_major

EIGHT = Cluster.local(8)

#: A batch size that no other dimension of the programs has, so that its dimensions can be told by their size.
BATCH = 24

LEARNING: dict[str, Program] = {
    "mlp": mlp(batch=BATCH),
    "gpt2": gpt2(batch=BATCH),
    "cnn": cnn(batch=BATCH),
    "scan": scan(batch=BATCH),
}


@cache
def force_plan(name: str, force: str) -> Plan:
    return plan(lower(LEARNING[name]), EIGHT, PlanOptions(force=force))


#: Instructions that make constants or hand on what others made (which nobody may read).
HANDING_ON = {"broadcast", "constant", "iota", "parameter", "get-tuple-element", "tuple", "while", "call"}


def results(planned: Plan) -> Iterator[tuple[tuple[int, ...], TensorSharding]]:
    """Dimensions and sharding of every array that an instruction computes."""
    entries = {entry.name: entry for entry in planned.instructions}
    for computation in parse(planned.require_hlo()).computations:
        for instruction in computation:
            if instruction.name in entries and instruction.opcode not in HANDING_ON:
                for leaf, sharding in zip(instruction.shape.leaves, entries[instruction.name].result, strict=True):
                    yield leaf.dimensions, sharding


def gradient_bytes(planned: Plan) -> int:
    """Bytes of the trained parameters, all float32, and so of their gradients."""
    return sum(
        4 * prod(variable.shape)
        for variable in planned.parameters
        if variable.name.startswith(("params[", "p[")) and variable.alias is not None
    )


@pytest.mark.parametrize("name", LEARNING)
@pytest.mark.parametrize("force", ["data", "fsdp"])
def test_activations_stay_split_along_the_batch(name: str, force: str) -> None:
    planned = force_plan(name, force)
    along = [(shape, sharding) for shape, sharding in results(planned) if BATCH in shape]
    assert len(along) > 10
    for shape, sharding in along:
        assert sharding.dims[shape.index(BATCH)] == ("data",), (shape, str(sharding))


@pytest.mark.parametrize("name", LEARNING)
def test_data_parallel_sums_each_gradient_once_and_moves_nothing_else(name: str) -> None:
    planned = force_plan(name, "data")
    assert {collective.kind for collective in planned.collectives} == {"all-reduce"}
    result = ("gradient of", "partial sum", "result of")
    assert all(collective.cause.startswith(result) for collective in planned.collectives)
    reduced = sum(collective.payload_bytes * collective.count for collective in planned.collectives)
    statistics = 4 * (1 + 4 * 8 + 2 * 16)  # the loss; a batch norm's means, forward and backward, at most
    assert gradient_bytes(planned) <= reduced <= gradient_bytes(planned) + statistics


@pytest.mark.parametrize("name", LEARNING)
def test_data_parallel_computes_the_update_whole(name: str) -> None:
    for shape, sharding in results(force_plan(name, "data")):
        if not any(size % BATCH == 0 for size in shape):
            assert not sharding.axes, (shape, str(sharding))  # a sum may stay partial until it is added to another


@pytest.mark.parametrize("name", ["mlp", "gpt2", "scan"])
def test_fully_sharded_gathers_weights_scatters_gradients_and_updates_shards(name: str) -> None:
    planned = force_plan(name, "fsdp")
    moved = Counter[str]()
    for collective in planned.collectives:
        moved[collective.kind] += collective.payload_bytes * collective.count
    assert set(moved) <= {"all-gather", "reduce-scatter", "all-reduce"}
    assert moved["reduce-scatter"] >= 0.9 * gradient_bytes(planned)
    assert moved["all-reduce"] < 0.1 * gradient_bytes(planned)
    stored = {variable.shape for variable in planned.parameters if variable.name.startswith("opt_state")}
    entries = {entry.name: entry for entry in planned.instructions}
    updates = [
        (instruction, entries[instruction.name])
        for instruction in parse(planned.require_hlo()).entry
        if instruction.opcode == "add" and instruction.shape.leaves[0].dimensions in stored
    ]
    assert all(entry.result[0].axes == ("data",) for _, entry in updates)


@pytest.mark.parametrize("name", ["mlp", "gpt2", "scan"])
def test_zero_1_keeps_weights_and_splits_what_only_the_update_reads(name: str) -> None:
    planned = force_plan(name, "zero1")
    moved = Counter[str]()
    for collective in planned.collectives:
        moved[collective.kind] += collective.payload_bytes * collective.count
    assert moved["reduce-scatter"] >= 0.9 * gradient_bytes(planned)
    assert moved["all-gather"] <= 1.1 * gradient_bytes(planned), "weights, once: none is gathered to compute with it"
    for variable in planned.parameters:
        is_weight = variable.name.startswith(("params[", "p["))
        if variable.alias is not None:
            divides = any(size % 8 == 0 for size in variable.shape)
            assert bool(variable.sharding.axes) == (divides and not is_weight), variable.name


@pytest.mark.parametrize("name", LEARNING)
def test_tensor_parallel_leaves_the_batch_whole(name: str) -> None:
    assert all(
        not sharding.dims[shape.index(BATCH)]
        for shape, sharding in results(force_plan(name, "tensor"))
        if BATCH in shape
    )


@pytest.mark.parametrize("name", LEARNING)
def test_mixed_splits_the_batch_over_the_first_axis_only(name: str) -> None:
    planned = force_plan(name, "mixed")
    data, model = planned.mesh.sizes
    for shape, sharding in results(planned):
        if BATCH in shape:
            assert sharding.dims[shape.index(BATCH)] == (data,), (shape, str(sharding))
        elif not any(size % BATCH == 0 for size in shape):
            assert data not in sharding.axes
    assert {c.kind for c in planned.collectives if data in c.axes} == {"all-reduce"}
    assert any(model in sharding.axes for _, sharding in results(planned))


@pytest.mark.parametrize("name", PROGRAMS)
def test_replicated_computes_everything_everywhere(name: str) -> None:
    planned = plan(lower(PROGRAMS[name]()), EIGHT, PlanOptions(force="replicated"))
    assert not planned.collectives
    assert all(sharding.is_replicated for _, sharding in results(planned))


def batches(planned: Plan) -> dict[str, tuple[tuple[str, ...], ...]]:
    return {variable.name: variable.sharding.dims for variable in planned.parameters if variable.alias is None}


def test_a_batch_that_the_axes_do_not_divide_is_padded_where_that_pays() -> None:
    planned = plan(lower(mlp(batch=30)), EIGHT, PlanOptions(force="data"))
    assert set(batches(planned).values()) == {(("data",), ())}
    assert all(variable.is_padded for variable in planned.parameters if variable.alias is None)
    assert all(sharding.dims[0] == ("data",) for shape, sharding in results(planned) if shape[:1] == (30,))


@pytest.mark.parametrize("force", ["data", "fsdp", "zero1"])
def test_a_batch_that_does_not_split_is_refused_with_input_and_sizes(force: str) -> None:
    reason = r"over 8 devices \(data=8\), but batch\[0\] has 9 elements of it, in dimension 0"
    with pytest.raises(PlanError, match=reason) as caught:
        plan(lower(mlp(batch=9)), EIGHT, PlanOptions(force=force))
    assert caught.value.where == "force"
    with pytest.raises(PlanError, match="has 30 elements"):
        plan(lower(mlp(batch=30)), EIGHT, PlanOptions(force=force, rewrites="none"))  # nothing is padded


@pytest.mark.parametrize("force", ["data", "fsdp", "zero1"])
def test_a_smaller_last_batch_is_kept_whole_where_the_state_lies_already(force: str) -> None:
    first = plan(lower(mlp()), EIGHT, PlanOptions(force=force))
    lies = {n: variable.sharding.dims for n, variable in enumerate(first.parameters) if variable.alias is not None}
    planned = plan(lower(mlp(batch=9)), EIGHT, PlanOptions(force=force, argument_axes=lies, mesh=first.mesh.sizes))
    assert set(batches(planned).values()) == {((), ())}
    assert {n: planned.parameters[n].sharding.dims for n in lies} == lies
    if force == "data":  # the others split something else
        assert any("computed whole on all 8 devices" in note for note in planned.notes)


def test_a_batch_norms_batch_is_no_feature() -> None:
    """Its statistics are of the whole batch; the loss could be cut along the features of what is wanted."""

    def step(p: Any, x: np.ndarray, wanted: np.ndarray) -> Any:
        def loss(p: Any) -> Any:
            y = x @ p["first"]
            y = (y - y.mean(0)) * jax.lax.rsqrt(y.var(0) + 1e-5)
            return jnp.mean((jax.nn.relu(y) @ p["second"] - wanted) ** 2)

        value, gradients = jax.value_and_grad(loss)(p)
        return jax.tree.map(lambda a, b: a - 0.1 * b, p, gradients), value

    p = {"first": np.ones((16, 32), np.float32), "second": np.ones((32, 8), np.float32)}
    arguments = p, np.ones((BATCH, 16), np.float32), np.ones((BATCH, 8), np.float32)
    planned = plan(lower((step, arguments, (0,))), EIGHT, PlanOptions(force="data"))
    assert set(batches(planned).values()) == {(("data",), ())}


def test_meshes_that_cannot_split_the_batch_are_passed_over() -> None:
    planned = plan(lower(mlp(batch=6)), EIGHT, PlanOptions(force="mixed", rewrites="none"))
    assert planned.mesh.sizes == {"data": 2, "model": 4}


@pytest.mark.parametrize("force", ["data", "fsdp", "megatron"])
def test_a_batch_behind_the_time_is_found(force: str) -> None:
    """Steps of a sequence follow each other: dimension 0 is no batch, though the largest arguments share it."""
    planned = plan(lower(time_major(batch=BATCH)), EIGHT, PlanOptions(force=force))
    assert set(batches(planned).values()) == {((), ("data",), ())}
    along = [sharding.dims[shape.index(BATCH)] for shape, sharding in results(planned) if BATCH in shape]
    assert len(along) > 10
    assert set(along) == {("data",)}


def test_a_table_larger_than_the_batch_is_none() -> None:
    table = np.ones((512, 16), np.float32)

    def step(p: np.ndarray, table: np.ndarray, rows: np.ndarray, wanted: np.ndarray) -> Any:
        value, gradient = jax.value_and_grad(lambda p: jnp.mean((table[rows] @ p - wanted) ** 2))(p)
        return p - 0.1 * gradient, value

    arguments = np.ones((16, 16), np.float32), table, np.zeros(BATCH, np.int32), np.ones((BATCH, 16), np.float32)
    planned = plan(lower((step, arguments, (0,))), EIGHT, PlanOptions(force="data"))
    assert batches(planned) == {"table": ((), ()), "rows": (("data",),), "wanted": (("data",), ())}


def _network(p: Any, x: Any) -> Any:
    return jnp.tanh(x @ p["first"]) @ p["second"] + p["bias"]


def _sample(p: Any, x: Any, key: Any) -> Any:
    def denoise(_: Any, carried: Any) -> Any:
        x, key = carried
        key, own = jax.random.split(key)
        return x - 0.1 * _network(p, x) + 0.1 * jax.random.normal(own, x.shape), key

    return jax.lax.fori_loop(0, 4, denoise, (x, key))


def _decode(p: Any, cache: Any, token: Any) -> Any:
    keys = jax.lax.dynamic_update_slice_in_dim(cache, p["table"][token][:, None], 3, 1)
    weights = jax.nn.softmax(jnp.einsum("bd,btd->bt", keys[:, 3], keys))
    return keys, (_network(p, jnp.einsum("bt,btd->bd", weights, keys)) @ p["table"].T).argmax(-1).astype(jnp.int32)


@pytest.mark.parametrize(
    ("step", "x", "others", "donated"),
    [
        (_network, (BATCH, 16), (), ()),
        (_network, (BATCH, 16), (), (1,)),
        (lambda p, x: jax.jacfwd(partial(_network, p))(x), (BATCH, 16), (), ()),
        (lambda p, x: jax.grad(lambda x: (_network(p, x) ** 2).sum())(x), (BATCH, 16), (), ()),
        (_sample, (BATCH, 16), (np.zeros(2, np.uint32),), ()),
        (_decode, (BATCH, 8, 16), (np.zeros(BATCH, np.int32),), (1,)),
    ],
    ids=["inference", "donated", "jacfwd", "gradient", "sampler", "decoding"],
)
def test_results_of_the_types_of_the_batch_make_it_no_state(
    step: Callable[..., Any], x: tuple[int, ...], others: tuple[Any, ...], donated: tuple[int, ...]
) -> None:
    p = {"first": (16, 64), "second": (64, 16), "bias": (16,), "table": (128, 16)}
    arguments = {name: np.ones(shape, np.float32) for name, shape in p.items()}, np.ones(x, np.float32), *others
    planned = plan(lower((step, arguments, donated)), EIGHT, PlanOptions(force="data"))
    split = {variable.name: variable.sharding.dims for variable in planned.parameters if variable.sharding.axes}
    shapes = {variable.name: variable.shape for variable in planned.parameters}
    assert split == {name: (("data",), *((),) * (len(shape) - 1)) for name, shape in shapes.items() if BATCH in shape}
    assert not planned.collectives


def test_a_batch_that_cannot_be_cut_is_found_by_the_work_along_it() -> None:
    """Normalized over the batch at every step of a sequence: no part of the batch can be computed for itself."""

    def step(p: np.ndarray, x: np.ndarray) -> Any:
        def normalized(h: Any, x: Any) -> Any:
            h = x @ p + h
            return (h - h.mean(0)) / (1e-3 + h.std(0)), None

        def loss(p: np.ndarray) -> Any:
            return jnp.mean(jax.lax.scan(normalized, jnp.zeros((BATCH, 8)), x)[0] ** 4)

        value, gradient = jax.value_and_grad(loss)(p)
        return p - 0.1 * gradient, value

    text = lower((step, (np.ones((16, 8), np.float32), np.ones((5, BATCH, 16), np.float32)), (0,)))
    module = inline_calls(parse(text))
    with pytest.raises(MicroBatchError):
        split_step(module)
    assert find_batch_dims(module, build_dataflow(module), PlanOptions()) == {1: 1}


def test_products_that_cannot_run_along_the_batch_are_noted() -> None:
    """32 rows in 4 micro-batches: the dimension that eight devices would split has 4 elements."""
    text = """HloModule accumulate, entry_computation_layout={(f32[64,16], f32[32,64])->f32[4,8,16]}

ENTRY main {
  w = f32[64,16] parameter(0)
  x = f32[32,64] parameter(1)
  parts = f32[4,8,64] reshape(x)
  ROOT y = f32[4,8,16] dot(parts, w), lhs_contracting_dims={2}, rhs_contracting_dims={0}
}
"""
    planned = plan(text, EIGHT, PlanOptions(force="data"))
    assert any("computed whole on all 8 devices" in note for note in planned.notes)


def test_keys_beside_the_batch_are_replicated() -> None:
    planned = plan(lower(PROGRAMS["control"]()), Cluster.local(2), PlanOptions(force="data"))
    key = next(variable for variable in planned.parameters if variable.element_type == "u32")
    assert key.shape == (2,)
    assert key.sharding.is_replicated


def test_annotations_hold_beside_a_forced_strategy() -> None:
    text = f"""HloModule annotated, entry_computation_layout={{(f32[16,8])->f32[16]}}

sum {{
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b)
}}

ENTRY main {{
  x = f32[16,8] parameter(0), metadata={{op_name="x"}}
  zero = f32[] constant(0)
  y = f32[16,8] tanh(x)
  pinned = f32[16,8] custom-call(y), custom_call_target="{ANNOTATION_TARGET}", backend_config="0:-,1:data"
  z = f32[16,8] exponential(pinned)
  ROOT s = f32[16] reduce(z, zero), dimensions={{1}}, to_apply=sum
}}
"""
    planned = plan(text, EIGHT, PlanOptions(force="data"))
    entries = {entry.name: entry.result[0].dims for entry in planned.instructions}
    assert entries["pinned"] == ((), ("data",))
    assert entries["y"] == entries["z"] == (("data",), ())
