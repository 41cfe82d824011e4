"""Collectives that a compiler combines share a latency: which ones, and what the search makes of it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shardwright.clusters.cluster import Cluster
from shardwright.cost import Topology, hardware_profile, latency_share
from shardwright.cost.moves.tilings import along
from shardwright.errors import OptionError
from shardwright.options.plan_options import PlanOptions
from shardwright.planner import plan
from shardwright.plans.plan import Plan, count_combined
from shardwright.plans.shardings import Mesh
from shardwright.report.text import explain_plan
from tests.planner.programs import PLAIN_A100, gpt2, lower, mlp

NODE = {"ip": "127.0.0.1", "port": 2222, "gpu_ids": list(range(8))}
EIGHT = Cluster.from_json(json.dumps({"name": "a100", "hardware": "a100", "insecure": True, "master": NODE}))
MESH = Mesh.of({"data": 8})


def layers(count: int, width: int) -> str:
    """A step of gradient descent on `count` square layers."""

    def step(weights: list[Any], x: Any) -> Any:
        def loss(weights: list[Any]) -> Any:
            h = x
            for w in weights:
                h = jnp.tanh(h @ w)
            return (h**2).mean()

        value, gradients = jax.value_and_grad(loss)(weights)
        return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], value

    weight = jax.ShapeDtypeStruct((width, width), "float32")
    batch = jax.ShapeDtypeStruct((512, width), "float32")
    return jax.jit(step, donate_argnums=0, keep_unused=True).lower([weight] * count, batch).as_text("hlo")


def sizes_of_combined(step_plan: Plan) -> list[int]:
    return sorted(Counter(each.combined for each in step_plan.collectives if each.combined).values(), reverse=True)


def test_gradients_are_combined_as_xla_gpu_combines_them() -> None:
    """24 gradients of 4 MiB: XLA:GPU (jaxlib 0.10.2, A100) leaves 4 all-reduces, up to 30 MiB each."""
    step_plan = plan(layers(24, 1024), EIGHT, PlanOptions(force="data"))
    assert all(each.kind == "all-reduce" for each in step_plan.collectives)
    large = [each for each in step_plan.collectives if each.payload_bytes == 4 << 20]
    assert len(large) == 24
    assert len({each.combined for each in large}) == 4
    assert max(Counter(each.combined for each in large).values()) == 7
    assert count_combined(step_plan.collectives) <= 5  # and the loss, where it comes before the gradients


def test_what_waits_for_another_one_is_not_combined() -> None:
    """Of two products in a row, split by columns and by rows, the second ends in a sum that the next one waits for."""
    step_plan = plan(layers(4, 256), EIGHT, PlanOptions(force="megatron"))
    chain = [each for each in step_plan.collectives if each.axes == ("model",) and each.instruction.startswith("dot")]
    assert len(chain) >= 3
    assert count_combined(chain) == len(chain)


def test_combined_collectives_pay_one_latency() -> None:
    step_plan = plan(layers(24, 1024), EIGHT, PlanOptions(force="data", mesh={"data": 8}))
    profile = hardware_profile("a100")
    link = profile.intra_node
    for number in {each.combined for each in step_plan.collectives if each.combined}:
        members = [each for each in step_plan.collectives if each.combined == number]
        sending_s = (
            sum(each.wire_bytes for each in members) / link.bandwidth_bytes_per_s / profile.collective_efficiency
        )
        launches_s = len(members) * profile.launch_s
        assert sum(each.time_s for each in members) == pytest.approx(
            14 * link.latency_s + sending_s, abs=1.01 * launches_s
        )


@pytest.mark.parametrize("kind", ["all-reduce", "all-gather", "reduce-scatter"])
def test_shares_of_a_latency_add_up_to_no_more_than_are_paid(kind: str) -> None:
    topology = Topology.of(EIGHT, hardware_profile("a100"))
    atoms, most_bytes = along(("data",), MESH), topology.max_combined_bytes(kind, 8)
    for sizes in ([1 << 20] * 100, [1 << 10] * 3, [most_bytes] * 4, [3 << 20, 29 << 20, 31 << 20]):
        groups, room = 0, 0
        for size in sizes:  # in order, as a combiner takes them
            if size > room:
                groups, room = groups + 1, max(most_bytes, size)
            room -= size
        shares = [latency_share(kind, size, atoms, topology, sum(sizes)) for size in sizes]
        assert 0 < sum(shares) <= groups + 1e-9


@pytest.mark.dear
@pytest.mark.parametrize("build", [gpt2, mlp])
def test_no_plan_on_fewer_axes_is_nearly_as_fast(build: Any) -> None:
    step_plan = plan(lower(build()), EIGHT, PlanOptions())
    axes = len(step_plan.mesh.axes)
    fewer = [each.step_s for each in step_plan.candidates if each.step_s and len(each.mesh.axes) < axes]
    fastest_s = min(each.step_s for each in step_plan.candidates if each.step_s)
    assert step_plan.cost.step_s <= fastest_s * 1.0101
    assert all(step_s > fastest_s * 1.0099 for step_s in fewer)


def test_a_profile_of_ones_own_is_read_and_refused_by_name(tmp_path: Path) -> None:
    assert hardware_profile(PLAIN_A100).combiner_limits == ()
    with pytest.raises(OptionError, match="cannot be read"):
        hardware_profile(str(tmp_path / "none.toml"))
    broken = tmp_path / "broken.toml"
    broken.write_text('description = "half a profile"\n')
    with pytest.raises(OptionError, match="is no hardware profile"):
        hardware_profile(str(broken))


def test_a_plan_that_experts_write_says_so_in_its_first_line() -> None:
    step_plan = plan(layers(4, 256), EIGHT, PlanOptions())
    assert "known as 'replicated'" in step_plan.cost.bound_scope  # so small that no collective pays
    assert "replicated, found by search" in explain_plan(step_plan).splitlines()[1]
