"""Causes of collectives name tensors as the user does, and operations by source line."""

from __future__ import annotations

import re

import pytest

from shardwright.cluster import Cluster
from shardwright.config import PlanOptions
from shardwright.planner import plan
from tests.planner.programs import gpt2, lower, scan

EIGHT = Cluster.local(8)


@pytest.fixture(scope="module")
def text() -> str:
    return lower(gpt2(layers=2, batch=16))


def causes(text: str, force: str, kind: str) -> set[str]:
    return {c.cause for c in plan(text, EIGHT, PlanOptions(force=force)).collectives if c.kind == kind}


def test_gradients_carry_the_names_of_what_they_update(text: str) -> None:
    found = causes(text, "data", "all-reduce")
    names = {"params['wte']", "params['wpe']", "params['ln']['g']"} | {
        f"params['h{i}']['{layer}']['{part}']"
        for i in range(2)
        for layer, parts in {"ln1": "gb", "qkv": "wb", "proj": "wb", "ln2": "gb", "fc": "wb", "out": "wb"}.items()
        for part in parts
    }
    assert {f"gradient of {name}" for name in names} <= found
    (loss,) = (cause for cause in found if not cause.startswith("gradient of"))
    assert re.fullmatch(r"partial sum of sum \(programs\.py:\d+\)", loss)


def test_gathered_weights_are_named_with_their_use(text: str) -> None:
    found = causes(text, "fsdp", "all-gather")
    for name in ("params['h0']['qkv']['w']", "params['h1']['out']['w']", "params['wte']"):
        assert any(cause.startswith(f"{name} for ") and "(programs.py:" in cause for cause in found), name


def test_sums_inside_a_loop_name_their_line() -> None:
    assert all("(programs.py:" in cause for cause in causes(lower(scan()), "data", "all-reduce"))
