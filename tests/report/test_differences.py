"""What differs between two plans, in text and in data, and the command that prints it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwright.cli import main
from shardwright.plans.plan_text import plan_to_json
from shardwright.plans.shardings import Mesh, TensorSharding
from shardwright.plans.variable_strategy import VariableStrategy
from shardwright.report.differences import compare_plans, explain_differences
from tests.report.test_text import MESH, collective, plan

ROWS = TensorSharding((("data",), ()))


def of_section(differences: Any, section: str) -> list[tuple[tuple[str, ...], str, str]]:
    return [(each.names, each.before, each.after) for each in differences if each.section == section]


def test_equal_plans_differ_in_nothing() -> None:
    assert compare_plans(plan(), plan()) == ()
    assert compare_plans(plan(), plan(planning_s=9.0)) == ()
    assert "the same" in explain_differences(plan(), plan())


def test_layouts_differ_by_tensor() -> None:
    before = plan()
    moved = tuple(replace(each, sharding=ROWS) if each.number < 3 else each for each in before.parameters)
    (layouts,) = of_section(compare_plans(before, plan(parameters=moved)), "arguments")
    assert layouts == (tuple(f"params['blocks'][{n}]['w']" for n in range(3)), "[-, model]", "[data, -]")
    text = explain_differences(before, plan(parameters=moved))
    assert "params['blocks'][0..2]['w']" in text
    assert "[data, -]" in text


def test_mesh_options_strategies_and_prices_differ() -> None:
    before = plan(strategies={"w": VariableStrategy(), "v": VariableStrategy(split=0)})
    after = plan(
        mesh=Mesh.of({"data": 4, "model": 2}),
        compile_options={"xla_bucket": 3},
        strategies={"w": VariableStrategy(split=1, local_copy=True), "v": VariableStrategy(split=0)},
        cost=replace(before.cost, compute_s=2 * before.cost.compute_s),
        memory=replace(before.memory, temporaries_bytes=1 << 40),
    )
    differences = compare_plans(before, after)
    assert (("mesh",), str(MESH), "data=4 × model=2") in of_section(differences, "plan")
    assert (("xla_bucket",), "–", "3") in of_section(differences, "plan")
    assert of_section(differences, "strategies") == [(("w",), "all-reduce", "slots split in dimension 1")]
    assert {name for names, _, _ in of_section(differences, "cost") for name in names} == {
        "step",
        "compute",
        "memory peak a device",
    }


def test_collectives_differ_by_kind_and_axes() -> None:
    before = plan(collectives=(collective("all-reduce", ("data",), "gradient of w", 1000),) * 2)
    after = plan(collectives=(collective("all-reduce", ("data",), "gradient of w", 1000, 4),))
    differences = of_section(compare_plans(before, after), "collectives")
    assert (("all-reduce over data",), "2, 2.93 KiB a device", "4, 5.86 KiB a device") in differences


def test_the_command_says_it_by_its_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    one.write_text(plan_to_json(plan()))
    other.write_text(plan_to_json(plan(hardware="h100")))
    assert main(["diff", str(one), str(one)]) == 0
    assert "the same" in capsys.readouterr().out
    assert main(["diff", str(one), str(other)]) == 3
    assert "h100" in capsys.readouterr().out
    assert main(["diff", "--json", str(one), str(other)]) == 3
    (row,) = json.loads(capsys.readouterr().out)["differences"]
    assert row == {"section": "plan", "names": ["hardware"], "before": "a100", "after": "h100"}
    assert main(["diff", str(one), str(tmp_path / "none.json")]) == 1
