"""`effort="measured"`: runners-up are run for some steps each, the fastest stays, and the next run begins with it."""

from __future__ import annotations

import csv
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import shardwright as sw
from shardwright.builders.choices import PlanChoice
from shardwright.builders.runner_ups import change_choice, list_runner_ups
from shardwright.client.tuning_record import TuningRow, read_record, record_path, write_record
from shardwright.clusters.cluster import Cluster
from shardwright.options.plan_options import PlanOptions
from tests.replan.training import Run, batch, init, train

LIMIT_S = 240.0
PINS = {"params[0]": {0: "data"}}


def train_until_settled(run: Run) -> list[str]:
    end_s = time.monotonic() + LIMIT_S
    run.go()
    assert run.step.wait_for_plans(LIMIT_S)
    while not {"kept", "went back"} & {change.kind for change in run.step.plan_changes}:
        assert time.monotonic() < end_s, run.step.plan_changes
        run.go()
    return [change.kind for change in run.step.plan_changes]


@pytest.mark.dear
def test_the_fastest_by_measurement_stays_and_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path))
    with sw.connect(devices=4) as session:
        run = Run(session.parallelize(train, donate_argnums=0, effort="measured"))
        kinds = train_until_settled(run)
        run.go(3)
        run.check_state()
        assert kinds[0] == "first plan"
        assert kinds.count("measured") == kinds.count("runner-up") >= 2
        settled = str(run.step.plan.mesh)

    (file,) = (tmp_path / "tuned").iterdir()
    with file.open(newline="") as text:
        rows = list(csv.DictReader(text))
    measured = [float(row["measured_ms"]) for row in rows]
    (kept,) = [row for row in rows if row["kept"] == "1"]
    assert len(rows) == 1 + kinds.count("measured")
    assert float(kept["measured_ms"]) == min(measured)
    assert json.loads(rows[0]["changes"]) == {}
    assert all(float(row["predicted_ms"]) > 0 for row in rows)

    with sw.connect(devices=4) as session:
        run = Run(session.parallelize(train, donate_argnums=0, effort="measured"))
        run.go(3)
        assert [change.kind for change in run.step.plan_changes] == ["remembered"]
        assert str(run.step.plan.mesh) == settled
        run.check_state()


def test_what_is_left_open_is_tried() -> None:
    plan = sw.plan(step_text(), 8, cache=False)
    choice = PlanChoice(options=PlanOptions())

    def names(choice: PlanChoice, cluster: Cluster) -> list[str]:
        return [each.name for each in list_runner_ups([choice], "", plan, cluster)]

    gpus = replace(Cluster.local(8), platform="cuda", hardware="a100")
    assert {"data", "zero1", "fsdp", "megatron"} <= set(names(choice, Cluster.local(8)))
    assert any(name.startswith("mesh ") for name in names(choice, Cluster.local(8)))
    assert not any(name.startswith("buckets") for name in names(choice, Cluster.local(8)))
    assert {"buckets of 8 MiB", "buckets of 128 MiB"} <= set(names(choice, gpus))
    assert names(PlanChoice(options=PlanOptions(force=PINS, mesh={"data": 8})), Cluster.local(8)) == []
    assert names(PlanChoice(options=PlanOptions(bucket_bytes=0, force="fsdp", mesh={"data": 8})), gpus) == []


def test_a_builders_other_strategies_are_tried() -> None:
    plan = sw.plan(step_text(), 8, force="data", cache=False)
    choices = [PlanChoice(options=PlanOptions(), name=name) for name in ("", "AllReduce()", "PartitionedPS()")]
    runner_ups = list_runner_ups(choices, "AllReduce()", plan, Cluster.local(8))
    assert [each.name for each in runner_ups] == ["search", "PartitionedPS()"]
    assert [change_choice(choices, each.changes) for each in runner_ups] == [choices[0], choices[2]]


def test_micro_batches_are_halved_and_doubled() -> None:
    plan = sw.plan(step_text(), 2, micro_batches=4, cache=False)
    counted = list_runner_ups([PlanChoice(options=PlanOptions())], "", plan, Cluster.local(2))
    assert [each.changes["micro_batches"] for each in counted if "micro" in each.name] == [8, 2]


def step_text() -> str:
    import jax

    params = jax.eval_shape(init, jax.random.key(0))
    return sw.lower(train, params, *batch(0), donate_argnums=0).hlo_text


def record(plan: str, measured_s: float, *, is_kept: bool, **changes: Any) -> TuningRow:
    return TuningRow(plan=plan, changes=changes, predicted_s=0.002, measured_s=measured_s, is_kept=is_kept)


def test_records_are_kept_by_program_options_and_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path))
    choices = [PlanChoice(options=PlanOptions())]
    path = record_path("train", "a program", choices, Cluster.local(4))
    assert path is not None
    rows = (record("data=4", 0.003, is_kept=False), record("fsdp", 0.0025, is_kept=True, force="fsdp"))
    write_record(path, rows)
    assert read_record(path) == rows
    assert path == record_path("train", "a program", choices, Cluster.local(4)), "whatever the port is"
    others = [
        record_path("train", "another", choices, Cluster.local(4)),
        record_path("train", "a program", [PlanChoice(options=PlanOptions(memory_budget=1))], Cluster.local(4)),
        record_path("train", "a program", choices, Cluster.local(8)),
    ]
    assert len({path, *others}) == 4
    assert all(read_record(other) == () for other in others)


@pytest.mark.parametrize("text", ["", "plan,kept\n", "\x00", "plan,changes,predicted_ms,measured_ms,kept\nx,3,1,1,1\n"])
def test_records_that_cannot_be_read_are_none(text: str, tmp_path: Path) -> None:
    path = tmp_path / "record.csv"
    path.write_text(text)
    assert read_record(path) == ()
    assert read_record(tmp_path / "missing") == ()


def test_nothing_is_kept_where_the_cache_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWRIGHT_CACHE", "off")
    assert record_path("train", "a program", [], Cluster.local(4)) is None


def test_plans_made_here_are_not_measured() -> None:
    with pytest.raises(sw.OptionError, match="not measured"):
        sw.plan("", 8, effort="measured")
