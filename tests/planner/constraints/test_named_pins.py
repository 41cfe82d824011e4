"""Pins of whole tensors by name, and what becomes of the arguments that no pin names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardwright.client.lowering import lower
from shardwright.clusters.cluster import Cluster
from shardwright.errors import OptionError, PlanError
from shardwright.options.plan_options import PlanOptions
from shardwright.planner import plan
from shardwright.plans.plan import Plan
from tests.planner.running import xla_outputs

EIGHT = Cluster.local(8)
SLOTS = {f"state[0].{slot}['w1']": {0: "data"} for slot in ("mu", "nu")}
TABLE: dict[str, Any] = {name: {0: "data"} for name in ("params['table']", "state[0].trace['table']")}


def shape(*dimensions: int, kind: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dimensions, kind)


def train(loss: Any, optimizer: Any) -> Any:
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, x, y)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def text_of(loss: Any, params: Any, *batch: Any, optimizer: Any) -> str:
    arguments = (params, jax.eval_shape(optimizer.init, params), *batch)
    return lower(train(loss, optimizer), *arguments, donate_argnums=(0, 1)).hlo_text


@pytest.fixture(scope="module")
def mlp() -> str:
    def loss(p: Any, x: Any, y: Any) -> Any:
        return jnp.mean((jax.nn.relu(x @ p["w1"] + p["b1"]) @ p["w2"] - y) ** 2)

    params = {"w1": shape(64, 256), "b1": shape(256), "w2": shape(256, 8)}
    return text_of(loss, params, shape(512, 64), shape(512, 8), optimizer=optax.adam(1e-3))


@pytest.fixture(scope="module")
def embedding() -> str:
    def loss(p: Any, x: Any, y: Any) -> Any:
        return jnp.mean((p["table"][x].mean(1) @ p["w"] - y) ** 2)

    params = {"table": shape(50_000, 128), "w": shape(128, 8)}
    batch = (shape(512, 20, kind="int32"), shape(512, 8))
    return text_of(loss, params, *batch, optimizer=optax.sgd(0.1, momentum=0.9))


def planned(text: str, force: Any = None, rest: str = "search", **options: Any) -> Plan:
    if force is None and rest != "search":
        force = {}
    options = {"mesh": {"data": 8}, "micro_batches": 1, "stages": 1} | options
    made = plan(text, EIGHT, PlanOptions(force=force, rest=rest, **options))
    assert isinstance(made, Plan)
    return made


def kinds(step_plan: Plan) -> Mapping[str, int]:
    return Counter(collective.kind for collective in step_plan.collectives)


def layout(step_plan: Plan, name: str) -> str:
    return next(str(variable.sharding) for variable in step_plan.parameters if variable.name == name)


def test_a_whole_tensor_is_pinned_by_one_word(mlp: str) -> None:
    free = planned(mlp)
    names = ["params['w1']", *SLOTS]
    assert any(layout(free, name) != "[-, -]" for name in names)
    made = planned(mlp, force=dict.fromkeys(names, "replicated"))
    assert {layout(made, name) for name in names} == {"[-, -]"}
    assert layout(made, "params['w2']") == layout(free, "params['w2']")


def test_what_no_pin_names_is_replicated(mlp: str) -> None:
    made = planned(mlp, force={"params['w1']": {1: "data"}, "x": {0: "data"}}, rest="replicated")
    split = {variable.name for variable in made.parameters if not variable.sharding.is_replicated}
    assert split == {"params['w1']", "x"}
    assert made.origin == "forced: pins, the rest replicated"


def test_with_no_pins_the_rest_is_data_parallelism(mlp: str) -> None:
    rest, forced = planned(mlp, rest="data"), planned(mlp, force="data")
    assert kinds(rest) == kinds(forced) == {"all-reduce": 4}
    assert rest.cost == forced.cost or rest.cost.step_s == pytest.approx(forced.cost.step_s)
    assert rest.parameters == forced.parameters


def test_the_update_of_one_variable_is_split_and_all_others_are_whole(mlp: str) -> None:
    made = planned(mlp, force=SLOTS, rest="data")
    assert kinds(made) == {"all-reduce": 3, "reduce-scatter": 1, "all-gather": 1}
    (scattered,) = (collective for collective in made.collectives if collective.kind == "reduce-scatter")
    assert scattered.payload_bytes == 64 * 256 * 4
    assert layout(made, "params['w1']") == layout(made, "state[0].mu['w2']") == "[-, -]"


def test_a_split_table_is_looked_up_where_its_rows_are(embedding: str) -> None:
    made = planned(embedding, force=TABLE, rest="data")
    table_bytes = 50_000 * 128 * 4
    assert max(collective.payload_bytes for collective in made.collectives) < table_bytes / 4
    assert layout(made, "params['w']") == "[-, -]"
    assert layout(made, "x") == "[data, -]"
    assert made.cost.step_s < planned(embedding, force="data").cost.step_s / 4


def test_a_replicated_table_exchanges_the_rows_that_were_read(embedding: str) -> None:
    made = planned(embedding, rest="data")
    assert layout(made, "params['table']") == "[-, -]"
    assert sum(collective.wire_bytes for collective in made.collectives) < 50_000 * 128 * 4 / 2
    assert made.cost.step_s < planned(embedding, force="data").cost.step_s


def test_uneven_pins_are_stored_padded() -> None:
    def loss(p: Any, x: Any, y: Any) -> Any:
        return jnp.mean((jax.nn.relu(x @ p["w"]) @ p["v"] + p["b"] - y) ** 2)

    params = {"w": shape(2, 256), "v": shape(256, 2), "b": shape(2)}
    text = text_of(loss, params, shape(512, 2), shape(512, 2), optimizer=optax.sgd(0.1, momentum=0.9))
    pins = {f"{where}['{name}']": {0: "data"} for where in ("params", "state[0].trace") for name in "wb"}
    made = planned(text, force=pins, rest="data")
    stored = {variable.name: variable.stored_shape for variable in made.parameters}
    assert (stored["params['w']"], stored["state[0].trace['b']"], stored["params['v']"]) == ((8, 256), (8,), (256, 2))


def test_a_batch_that_cannot_be_split_is_refused() -> None:
    text = text_of(
        lambda p, x, y: jnp.mean((x @ p["w"] - y) ** 2), {"w": shape(64, 8)}, shape(3, 64), shape(3, 8),
        optimizer=optax.sgd(0.1),
    )  # fmt: skip
    with pytest.raises(PlanError, match="rest='data' splits the batch over 8 devices") as refusal:
        planned(text, rest="data")
    assert refusal.value.where == "rest"


def test_unknown_names_are_answered_with_near_ones(mlp: str) -> None:
    with pytest.raises(OptionError, match="no argument is named") as refusal:
        planned(mlp, force={"params['v1']": "replicated"})
    assert "params['w1']" in refusal.value.remedy


def test_micro_batches_keep_the_layouts(mlp: str) -> None:
    made = planned(mlp, force={"params['w1']": "replicated", **SLOTS}, rest="data", micro_batches=2)
    assert made.micro_batches == 2
    assert layout(made, "params['w1']") == "[-, -]"
    assert layout(made, "state[0].mu['w1']") == "[data, -]"


def test_planned_so_the_step_computes_the_same() -> None:
    def loss(p: Any, x: Any, y: Any) -> Any:
        return jnp.mean((jnp.tanh(p["table"][x].mean(1)) @ p["w"] - y) ** 2)

    optimizer, random = optax.sgd(0.1, momentum=0.9), np.random.default_rng(0)
    params = {"table": random.normal(size=(64, 16)).astype("f"), "w": random.normal(size=(16, 8)).astype("f")}
    x = random.integers(0, 64, size=(16, 4)).astype("int32")
    arguments = (params, optimizer.init(params), x, random.normal(size=(16, 8)).astype("f"))
    text = lower(train(loss, optimizer), *arguments, donate_argnums=(0, 1)).hlo_text
    made = planned(text, force=TABLE, rest="data")
    alone = jax.tree.leaves(train(loss, optimizer)(*arguments))
    for mine, theirs in zip(xla_outputs(made, *map(np.asarray, jax.tree.leaves(arguments))), alone, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)
