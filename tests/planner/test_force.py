"""Forced strategies are what an engineer calls by these names, in every instruction and on small programs too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import prod

import pytest

from shardwright.cluster import Cluster
from shardwright.config import ANNOTATION_TARGET, PlanOptions
from shardwright.hlo import parse
from shardwright.planner import plan
from shardwright.plans import Plan, TensorSharding
from tests.planner.programs import PROGRAMS, Program, cnn, gpt2, lower, mlp, scan

EIGHT = Cluster.local(8)

#: A batch size that no other dimension of the programs has, so that its dimensions can be told by their size.
BATCH = 24

LEARNING: dict[str, Program] = {
    "mlp": mlp(batch=BATCH),
    "gpt2": gpt2(batch=BATCH),
    "cnn": cnn(batch=BATCH),
    "scan": scan(batch=BATCH),
}


def forced(name: str, force: str) -> Plan:
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
    planned = forced(name, force)
    along = [(shape, sharding) for shape, sharding in results(planned) if BATCH in shape]
    assert len(along) > 10
    for shape, sharding in along:
        assert sharding.dims[shape.index(BATCH)] == ("data",), (shape, str(sharding))


@pytest.mark.parametrize("name", LEARNING)
def test_data_parallel_sums_each_gradient_once_and_moves_nothing_else(name: str) -> None:
    planned = forced(name, "data")
    assert {collective.kind for collective in planned.collectives} == {"all-reduce"}
    known = ("gradient of", "partial sum", "result of")
    assert all(collective.cause.startswith(known) for collective in planned.collectives)
    reduced = sum(collective.payload_bytes * collective.count for collective in planned.collectives)
    statistics = 4 * (1 + 4 * 8 + 2 * 16)  # the loss; a batch norm's means, forward and backward, at most
    assert gradient_bytes(planned) <= reduced <= gradient_bytes(planned) + statistics


@pytest.mark.parametrize("name", LEARNING)
def test_data_parallel_computes_the_update_whole(name: str) -> None:
    for shape, sharding in results(forced(name, "data")):
        if not any(size % BATCH == 0 for size in shape):
            assert not sharding.axes, (shape, str(sharding))  # a sum may stay partial until it is added to another


@pytest.mark.parametrize("name", ["mlp", "gpt2", "scan"])
def test_fully_sharded_gathers_weights_scatters_gradients_and_updates_shards(name: str) -> None:
    planned = forced(name, "fsdp")
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
    planned = forced(name, "zero1")
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
        not sharding.dims[shape.index(BATCH)] for shape, sharding in results(forced(name, "tensor")) if BATCH in shape
    )


@pytest.mark.parametrize("name", LEARNING)
def test_mixed_splits_the_batch_over_the_first_axis_only(name: str) -> None:
    planned = forced(name, "mixed")
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


def test_a_batch_that_the_axes_do_not_divide_is_not_split() -> None:
    planned = plan(lower(mlp(batch=30)), EIGHT, PlanOptions(force="data"))
    assert not planned.collectives
    assert all(sharding.is_replicated for _, sharding in results(planned))
    assert any("computed whole on all 8 devices" in note for note in planned.notes)


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
