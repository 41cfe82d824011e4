"""What devices may take of an attention, and what plans make of it on eight H100."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import shardwright as sw
from shardwright.attention import AttentionCall
from shardwright.clusters.cluster import Cluster
from shardwright.hlo import parse
from shardwright.planner.rules import Factor, rule_of
from shardwright.plans.plan import Plan
from tests.attention.calls import program_of

CALL = AttentionCall(
    backward=False, batch=8, heads=32, kv_heads=8, rows=2048, keys=2048, width=64, value_width=64, element_type="bf16",
    rows_first=True, scale=0.125, mask="causal",
)  # fmt: skip
BACKWARD = replace(CALL, backward=True, statistics=False)


def factors(call: AttentionCall) -> dict[str, Factor]:
    entry = parse(program_of(call)).entry
    op_rule = rule_of(next(instruction for instruction in entry if instruction.name == "attend"))
    return {each.name: each for each in (*op_rule.factors, *op_rule.exchange_factors)}


def test_key_heads_go_with_the_query_heads_that_read_them() -> None:
    heads = factors(BACKWARD)["heads"]
    assert heads.size == 8
    assert heads.operands == (2, 2, 2, 1, 2, 2)
    assert heads.results == (1, 1, 1, None)
    assert heads.summed == ()


def test_query_heads_alone_add_up_what_key_heads_get() -> None:
    heads = factors(BACKWARD)["query heads"]
    assert heads.size == 32
    assert heads.operands == (2, None, None, 1, 2, 2)
    assert heads.summed == (1, 2)
    assert factors(CALL)["query heads"].summed == ()


def test_rows_take_keys_whole() -> None:
    rows = factors(BACKWARD)["rows"]
    assert rows.operands == (1, None, None, 2, 1, 1)
    assert (rows.results, rows.summed) == ((2, None, None, None), (1, 2))


@pytest.mark.parametrize(("bias", "summed"), [((1, 32), {"batch"}), ((8, 1), {"heads"}), ((8, 32), set())])
def test_a_shared_bias_has_its_gradient_added_up(bias: tuple[int, int], summed: set[str]) -> None:
    call = replace(BACKWARD, kv_heads=32, bias=(*bias, 2048, 2048), bias_gradient=True)
    assert {name for name, each in factors(call).items() if 3 in each.summed} == summed


def test_lengths_count_from_the_first_row() -> None:
    assert "rows" not in factors(replace(CALL, mask="padding"))


def _plan(call: AttentionCall, devices: int) -> Plan:
    node = {"ip": "127.0.0.1", "port": 2222, "gpu_ids": list(range(devices))}
    links = {"intra_node": "nvlink-4"}
    cluster = Cluster.from_json(
        json.dumps({"name": "h100", "hardware": "h100", "links": links, "insecure": True, "master": node})
    )
    plan: Plan = sw.plan(program_of(call), cluster, cache=False)
    return plan


def test_a_plan_gives_each_device_its_part_of_the_work() -> None:
    one, eight = (_plan(BACKWARD, devices) for devices in (1, 8))
    assert eight.cost.compute_s < 0.14 * one.cost.compute_s
    assert not eight.collectives


def test_devices_share_few_key_heads() -> None:
    call = replace(CALL, batch=1, kv_heads=1, mask="padding")
    plan = _plan(call, 8)
    (entry,) = [each for each in plan.instructions if each.name == "attend"]
    (q,), (k,), *_ = entry.operands
    assert plan.mesh.size(q.dims[2]) == 8
    assert not k.axes
