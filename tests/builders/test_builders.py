"""Every builder: five steps are those of one device, and the plan is what the builder's name promises."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import pytest

import shardwright as sw
from shardwright import strategies
from tests.builders.models import model, text_of, trained


class BiggestSplit(strategies.Builder):
    """The example of the documents: variables of 1 KiB and more in parts, along their largest dimension."""

    def build(
        self, variables: Sequence[strategies.Variable], cluster: sw.Cluster
    ) -> Mapping[str, strategies.VariableStrategy]:
        chosen = {}
        for variable in variables:
            dims = variable.even_dims(cluster.device_count)
            if variable.bytes >= 1024 and dims:
                split = max(dims, key=lambda dim: variable.shape[dim])
                chosen[variable.name] = strategies.VariableStrategy(split=split)
        return chosen


BUILDERS = [
    strategies.AllReduce(bucket="25MB"),
    strategies.PS(),
    strategies.PSLoadBalancing(),
    strategies.PartitionedPS(local_proxy_variable=True),
    strategies.PartitionedPS(local_proxy_variable=False),
    strategies.UnevenPartitionedPS(),
    strategies.PartitionedAR(),
    strategies.RandomAxisPartitionAR(seed=3),
    strategies.Parallax(),
    strategies.Auto(),
    BiggestSplit(),
]
DEAR = pytest.mark.dear
MODELS = ["embedding", pytest.param("mlp", marks=DEAR), pytest.param("gpt2", marks=DEAR)]


def planned(name: str, builder: Any, **options: Any) -> sw.Plan:
    made = sw.plan(text_of(name), 8, force=builder, cache=False, micro_batches=1, **options)
    assert isinstance(made, sw.Plan)
    return made


def kinds(step_plan: sw.Plan) -> Mapping[str, int]:
    return Counter(collective.kind for collective in step_plan.collectives)


def layouts(step_plan: sw.Plan) -> dict[str, str]:
    return {variable.name: str(variable.sharding) for variable in step_plan.parameters}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("builder", BUILDERS, ids=repr)
def test_five_steps_are_those_of_one_device(session: sw.Session, builder: strategies.Builder, name: str) -> None:
    trains, (expected, expected_losses) = model(name), trained(name)
    step = session.parallelize(trains.step, donate_argnums=(0, 1), force=builder, stages=1, micro_batches=1)
    state: Any = trains.state
    for batch, expected_loss in zip(trains.batches, expected_losses, strict=True):
        *state, loss = step(*state, *batch)
        assert float(loss) == pytest.approx(expected_loss, abs=1e-5)
    for ours, theirs in zip(jax.tree.leaves(state[0]), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=1e-5, atol=1e-5)
    if not isinstance(builder, strategies.Auto):
        assert step.plan.origin == f"strategy: {builder!r}"
        assert len(step.plan.strategies) == len(jax.tree.leaves(trains.params))


# ---- what the plans are -----------------------------------------------------------------


def test_all_reduce_sums_every_gradient_and_keeps_everything_whole() -> None:
    made = planned("mlp", strategies.AllReduce())
    assert kinds(made) == {"all-reduce": 7}
    state = {name: layout for name, layout in layouts(made).items() if name.startswith(("params", "opt"))}
    assert all("data" not in layout for layout in state.values())
    assert made.mesh.sizes == {"data": 8}


def test_parameter_servers_are_said_to_be_zero1() -> None:
    for builder in (strategies.PS(), strategies.PSLoadBalancing()):
        made = planned("mlp", builder)
        assert any("ZeRO-1" in note and builder.name in note for note in made.notes)
        lies = layouts(made)
        assert lies["params[1]['weight']"] == "[-, -]"
        assert lies["opt_state[0].trace[1]['weight']"] == "[data, -]"
        assert lies["opt_state[0].trace[0]['weight']"] == "[-, data]"  # 2 rows are not in 8 parts
        assert {"reduce-scatter", "all-gather"} <= kinds(made).keys()


def test_partitioned_without_a_proxy_keeps_a_part_of_the_variable_only() -> None:
    proxy, none = (planned("mlp", strategies.PartitionedPS(local_proxy_variable=each)) for each in (True, False))
    assert layouts(proxy)["params[1]['weight']"] == "[-, -]"
    assert layouts(none)["params[1]['weight']"] == layouts(none)["opt_state[0].trace[1]['weight']"] == "[data, -]"
    assert none.memory.arguments_bytes < proxy.memory.arguments_bytes / 2
    assert proxy.memory.arguments_bytes < planned("mlp", strategies.AllReduce()).memory.arguments_bytes / 1.5


def test_uneven_parts_are_stored_padded() -> None:
    made = planned("mlp", strategies.UnevenPartitionedPS())
    stored = {variable.name: variable.stored_shape for variable in made.parameters}
    assert stored["params[0]['weight']"] == (8, 256)
    assert stored["params[2]['bias']"] == stored["opt_state[0].trace[2]['bias']"] == (8,)


def test_random_axes_follow_the_seed() -> None:
    drawn = [
        tuple(strategy.split for strategy in planned("mlp", strategies.RandomAxisPartitionAR(seed)).strategies.values())
        for seed in (0, 0, 1, 2, 3)
    ]
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) > 1


def test_parallax_splits_tables_and_all_reduces_the_rest() -> None:
    made = planned("embedding", strategies.Parallax())
    lies = layouts(made)
    assert (lies["params['table']"], lies["params['w']"]) == ("[data, -]", "[-, -]")
    assert any("params['table'] in parts by rows" in note for note in made.notes)


@pytest.mark.parametrize("name", ["embedding", pytest.param("mlp", marks=DEAR), pytest.param("gpt2", marks=DEAR)])
def test_auto_is_never_above_the_best_builder(name: str) -> None:
    auto = planned(name, strategies.Auto())
    others = [planned(name, builder) for builder in BUILDERS if not isinstance(builder, strategies.Auto)]
    assert auto.cost.step_s <= min(made.cost.step_s for made in others[:-1])
    compared = {candidate.name for candidate in auto.candidates}
    assert {repr(strategies.AllReduce()), repr(strategies.PS())} <= compared


def test_auto_leaves_out_what_cannot_be_planned() -> None:
    trains = model("embedding")
    three = [each[:3] for each in trains.batches[0]]
    text = sw.lower(trains.step, *trains.state, *three, donate_argnums=(0, 1)).hlo_text
    with pytest.raises(sw.PlanError, match="splits the batch over 8 devices"):
        sw.plan(text, 8, force=strategies.PS(), cache=False)
    made = sw.plan(text, 8, force=strategies.Auto(), cache=False)
    assert isinstance(made, sw.Plan)
    assert made.origin == "search"


def test_a_mesh_of_two_axes_is_split_over_both() -> None:
    made = planned("embedding", strategies.Parallax(), mesh={"data": 2, "model": 4})
    assert layouts(made)["params['table']"] == "[data·model, -]"
    assert layouts(made)["batch[0]"] == "[data·model, -]"


@pytest.mark.dear
def test_a_smaller_last_batch_keeps_the_layouts(session: sw.Session) -> None:
    trains = model("embedding")
    step = session.parallelize(trains.step, donate_argnums=(0, 1), force=strategies.Auto())
    reference = jax.jit(trains.step)
    state, expected = trains.state, trains.state
    for rows in (64, 10, 64):
        batch = tuple(each[:rows] for each in trains.batches[0])
        *state, loss = step(*state, *batch)
        *expected, expected_loss = reference(*expected, *batch)
        assert float(loss) == pytest.approx(float(expected_loss), abs=1e-5)
    np.testing.assert_allclose(np.asarray(state[0]["table"]), np.asarray(expected[0]["table"]), atol=1e-5)
