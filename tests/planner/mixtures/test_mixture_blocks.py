"""Mixtures in blocks give JAX's numbers, send rows by all-to-all, and count what is over the bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

import shardwright
from shardwright.clusters.cluster import Cluster
from shardwright.cost import hardware_profile
from shardwright.hlo import Instruction, Module, parse
from shardwright.options.plan_options import PlanOptions
from shardwright.planner.graph.inlining import inline_calls
from shardwright.planner.mixtures import Blocks, block_mixtures, find_all_mixtures, list_blocks, write
from shardwright.planner.mixtures.layouts import AsReceived, InOrder, Layout, choose_layout
from shardwright.planner.mixtures.sizes import sizes_of
from shardwright.planner.rewrites.top_k import expand_top_k
from shardwright.planner.search.search import Search
from tests.planner.attention.written_out import run
from tests.planner.mixtures import mixture_steps
from tests.planner.running import xla_outputs

pytestmark = pytest.mark.dear


def _lowered(step: Callable[..., Any], *arguments: Any) -> Module:
    return inline_calls(parse(shardwright.lower(step, *arguments, platform="cuda").as_text()))


def _count(module: Module, opcode: str) -> int:
    return sum(each.opcode == opcode for each in module.instructions())


def _assert_close(expected: Any, outputs: Sequence[Any], tolerance: float = 1e-5) -> None:
    for one, other in zip(jax.tree.leaves(expected), outputs, strict=True):
        wanted, given = (np.asarray(each, np.float32) for each in (one, other))
        np.testing.assert_allclose(wanted, given, rtol=0, atol=tolerance * float(np.abs(wanted).max() + 1e-9))


@pytest.mark.parametrize("layers", ["once", "again", "scan"])
@pytest.mark.parametrize("mixture", ["taken", "scattered", "read_in_order"])
def test_numbers_are_jax_s(mixture: str, layers: str) -> None:
    """Unequal groups, an empty one; replicas of blocks; no ragged product is left."""
    step, values = mixture_steps.train(getattr(mixture_steps, mixture), layers), mixture_steps.arguments()
    blocked = block_mixtures(_lowered(step, *values), Blocks(replicas=2, experts=4), None)
    assert _count(blocked, "ragged-dot") == 0
    _assert_close(jax.jit(step)(*values), run(expand_top_k(blocked), jax.tree.leaves(values)))


@pytest.mark.parametrize("mixture", ["taken", "scattered", "read_in_order"])
def test_numbers_of_rows_that_are_not_sent_are_jax_s(mixture: str) -> None:
    step, values = mixture_steps.train(getattr(mixture_steps, mixture), "again"), mixture_steps.arguments()
    blocked = block_mixtures(_lowered(step, *values), Blocks(replicas=8, experts=1), None)
    assert _count(blocked, "ragged-dot") == 0
    _assert_close(jax.jit(step)(*values), run(expand_top_k(blocked), jax.tree.leaves(values)))


#: Blocks, the layout that rows have for the kernel, and axes of the matrices' groups: tokens are split over all.
BY_KERNEL: dict[str, tuple[Blocks, type[Layout], str | None]] = {
    "as received": (Blocks(replicas=2, experts=4), AsReceived, "expert"),
    "in order": (Blocks(replicas=2, experts=4), InOrder, "expert"),
    "not sent": (Blocks(replicas=8, experts=1), AsReceived, None),
}


@pytest.mark.parametrize("case", BY_KERNEL)
@pytest.mark.parametrize("mixture", ["taken", "read_in_order"])
def test_the_kernel_s_numbers_are_one_device_s(mixture: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planned for eight H100, computed on CPU devices, forward and backward, in bfloat16."""
    blocks, layout, axis = BY_KERNEL[case]
    monkeypatch.setattr(write, "choose_layout", lambda *_: layout)
    step, values = mixture_steps.train(getattr(mixture_steps, mixture), "once"), mixture_steps.wide_arguments()
    text = shardwright.lower(step, *values, platform="cuda").as_text()
    cluster = replace(Cluster.local(8), hardware="h100")
    force = {f"p['{name}']": {0: axis} for name in ("gate", "up", "down") if axis}
    options = PlanOptions(mesh={"data": 2, "expert": 4}, force={**force, "x": {0: "data"}}, effort="fast")
    plan = Search(text, cluster, options, blocks=blocks).run_and_clear()
    calls = [each for each in plan.instructions if each.opcode == "custom-call" and "ragged_dot" in each.name]
    assert len(calls) == mixture_steps.PRODUCTS[mixture]
    _assert_close(jax.jit(step)(*values), xla_outputs(plan, *jax.tree.leaves(values)), 2e-2)


def test_the_layout_is_the_cheaper_one() -> None:
    """As received where matrices are few, in order where copies of them outweigh the moves, tiles without a kernel."""

    def layout(experts: int, blocks: Blocks, hardware: str) -> str:
        products = 3 * _wide_products(experts)  # gate, up and down
        profile = hardware_profile(hardware)
        sizes = sizes_of(8 * 32_768 * 6, experts, blocks, profile, "bf16")
        return choose_layout(products, sizes, profile).__name__

    sent, kept = Blocks(replicas=1, experts=8, bound=1.1), Blocks(replicas=8, experts=1)
    assert layout(16, sent, "h100") == "AsReceived"
    assert layout(64, sent, "h100") == "InOrder"
    assert layout(64, kept, "h100") == "AsReceived"
    assert layout(16, sent, "a100") == layout(16, sent, "tpu-v5e") == "Tiles"


def _wide_products(experts: int) -> tuple[Instruction, ...]:
    """Of DeepSeek-V2-Lite's experts, 32,768 tokens on each of eight devices."""
    rows = 8 * 32_768 * 6

    def step(x: Any, w: Any, sizes: Any) -> Any:
        return jax.grad(lambda x, w: jax.lax.ragged_dot(x, w, sizes).astype("float32").sum(), (0, 1))(x, w)

    shapes = [jax.ShapeDtypeStruct(each, "bfloat16") for each in ((rows, 2048), (experts, 2048, 1408))]
    module = _lowered(step, *shapes, jax.ShapeDtypeStruct((experts,), "int32"))
    return tuple(each for each in module.instructions() if each.opcode == "ragged-dot")


@pytest.mark.parametrize("layers", ["once", "scan"])
def test_rows_are_not_sorted_over_all_tokens(layers: str) -> None:
    """Each block sorts its own, and once more for the way back; in a scan, forward and backward."""
    step, values = mixture_steps.train(mixture_steps.taken, layers), mixture_steps.arguments()
    blocked = block_mixtures(_lowered(step, *values), Blocks(replicas=1, experts=4), None)
    sorts = [each.shape.leaves[0].dimensions for each in blocked.instructions() if each.opcode == "sort"]
    assert sorts == [(1, 4, 32)] * (2 if layers == "once" else 4)


def test_what_is_not_counted_by_expert_stays() -> None:
    """Sizes that do not count what rows are sorted by; groups that blocks do not divide."""

    def other_sizes(p: Any, x: Any) -> Any:
        order = jax.numpy.argsort((x[:, 0] * 100).astype("int32"))
        return jax.lax.ragged_dot(x[order], p["gate"], p["sizes"])

    params, tokens = mixture_steps.arguments()
    module = _lowered(other_sizes, params | {"sizes": np.full(8, 8, np.int32)}, tokens)
    assert find_all_mixtures(module) == []
    step = mixture_steps.train(mixture_steps.taken, "once")
    mixtures = find_all_mixtures(_lowered(step, params, tokens))
    assert [(each.rows, each.groups, len(each.products)) for each in mixtures] == [(128, 8, 9)]
    assert list_blocks(mixtures, Cluster.local(3), PlanOptions()) == []
    assert list_blocks(mixtures, Cluster.local(4), PlanOptions()) == [
        Blocks(replicas=4, experts=1),
        Blocks(replicas=1, experts=4),
    ]
    assert list_blocks(mixtures, Cluster.local(4), PlanOptions(expert_capacity=1.1)) == [
        Blocks(replicas=1, experts=4, bound=1.1),
        Blocks(replicas=4, experts=1),
    ]


@pytest.mark.parametrize("layers", ["once", "again", "scan"])
def test_rows_over_the_bound_are_counted_once(layers: str) -> None:
    """What a block has for another one beyond its room, of each layer once: backward sends the same again."""
    params, tokens = mixture_steps.arguments()
    step = mixture_steps.train(mixture_steps.taken, layers)
    over = jax.ffi.ffi_call("shardwright.rows_over", jax.ShapeDtypeStruct((), "int32"))
    module = _lowered(lambda p, x: (step(p, x), over()), params, tokens)
    counts = {
        bound: int(run(expand_top_k(block_mixtures(module, blocks, None)), jax.tree.leaves((params, tokens)))[-1])
        for bound, blocks in ((bound, Blocks(replicas=1, experts=4, bound=bound)) for bound in (4.0, 1.0))
    }
    assert counts[4.0] == 0
    if layers == "once":
        assert counts[1.0] == _rows_over(params, tokens)
    else:
        assert 0 < counts[1.0] <= 2 * 128


def _rows_over(params: Any, tokens: Any) -> int:
    """By hand: four blocks of 16 tokens, 32 pairs each, 8 of which have room for each pair of experts."""
    scores = tokens @ params["router"]
    chosen = np.argsort(-scores, axis=-1, kind="stable")[:, : mixture_steps.K].reshape(4, 32) // 2
    counts = (chosen[..., None] == np.arange(4)).sum(1)
    return int(np.maximum(counts - 8, 0).sum())


@pytest.mark.parametrize(
    "mesh", [{"expert": 8}, {"data": 2, "expert": 4}, {"data": 2, "expert": 2, "tensor": 2}], ids=str
)
def test_plans_run_on_devices_as_on_one(mesh: dict[str, int]) -> None:
    """Experts, rows and hidden units over devices, forward and backward; the collectives are those that it says."""
    step, values = mixture_steps.train(mixture_steps.taken, "once"), mixture_steps.arguments()
    text = shardwright.lower(step, *values, platform="cuda").as_text()
    kept, sent, *_ = list_blocks(find_all_mixtures(inline_calls(parse(text))), Cluster.local(8), PlanOptions(mesh=mesh))
    assert (kept.experts, sent.experts) == (1, 8)
    for blocks in (kept, sent):
        search = Search(text, Cluster.local(8), PlanOptions(mesh=mesh, effort="fast"), blocks=blocks)
        plan = search.run_and_clear()
        _assert_close(jax.jit(step)(*values), xla_outputs(plan, *jax.tree.leaves(values)))
