"""Strategies in a plan's document: written, edited, planned again; and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import shardwright as sw
from shardwright import strategies
from shardwright.builders.variables import Variable
from shardwright.plans.variable_strategy import VariableStrategy
from tests.builders.models import text_of

SCHEMA = json.loads((Path(__file__).resolve().parents[2] / "docs" / "plan-schema.json").read_text(encoding="utf-8"))


def planned(builder: Any, **options: Any) -> sw.Plan:
    made = sw.plan(text_of("embedding"), 8, force=builder, cache=False, **options)
    assert isinstance(made, sw.Plan)
    return made


class Answers(strategies.Builder):
    """A builder with a prepared answer."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def build(self, variables: Any, cluster: Any) -> Any:
        return self.answer


def test_strategies_are_part_of_the_document() -> None:
    made = planned(strategies.Parallax())
    data = made.as_dict()
    jsonschema.validate(data, SCHEMA)
    assert data["strategies"] == {
        "params['table']": {"split": 0, "local_copy": False},
        "params['w']": {"split": None, "local_copy": False},
    }
    assert sw.Plan.from_json(made.to_json()).strategies == made.strategies
    assert "strategies" not in planned(None).as_dict()


def test_an_edited_document_is_planned_again(tmp_path: Path) -> None:
    data = planned(strategies.Parallax()).as_dict()
    data["strategies"]["params['table']"] = {"split": 1, "local_copy": True}
    data["compile_options"] = {"xla_gpu_all_reduce_combine_threshold_bytes": 8 << 20}
    path = tmp_path / "edited.json"
    path.write_text(json.dumps(data))
    given = strategies.load(path)
    assert given.bucket == 8 << 20
    made = planned(given)
    lies = {variable.name: str(variable.sharding) for variable in made.parameters}
    assert (lies["params['table']"], lies["opt_state[0].trace['table']"]) == ("[-, -]", "[-, data]")
    assert made.strategies["params['table']"] == VariableStrategy(split=1, local_copy=True)


@pytest.mark.parametrize(
    ("strategy", "where"),
    [
        ({"split": "rows"}, "params['w'].split"),
        ({"split": -1}, "params['w'].split"),
        ({"split": 0, "local_copy": None}, "params['w'].local_copy"),
        ({}, "params['w'].split"),
        ({"split": 0, "local_copy": 1}, "params['w'].local_copy"),
        (3, "params['w']"),
    ],
)
def test_wrong_strategies_in_a_document_are_named(strategy: Any, where: str, tmp_path: Path) -> None:
    data = planned(strategies.AllReduce()).as_dict()
    data["strategies"]["params['w']"] = strategy
    with pytest.raises(sw.PlanError) as refusal:
        sw.Plan.from_json(json.dumps(data))
    assert where in refusal.value.where
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(data))
    with pytest.raises(sw.PlanError):
        strategies.load(path)


def test_a_document_without_strategies_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(planned(None).to_json())
    with pytest.raises(sw.OptionError, match="records no strategies"):
        strategies.load(path)
    with pytest.raises(sw.OptionError, match="cannot be read"):
        strategies.load(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"params['tabel']": VariableStrategy()}, "did you mean \"params['table']\"?"),
        ({"optimizer": VariableStrategy()}, "the variables are params['table'], params['w']"),
        ({"params['w']": VariableStrategy(split=2)}, "split one of 0 to 1"),
        ({"params['w']": VariableStrategy(split=True)}, "no dimension True"),
        ({"params['w']": "replicated"}, "VariableStrategy(split=0)"),
        (None, "it returned NoneType"),
    ],
)
def test_answers_that_fit_no_variable_are_refused(answer: Any, message: str) -> None:
    with pytest.raises(sw.OptionError) as refusal:
        planned(Answers(answer))
    assert message in str(refusal.value)
    assert refusal.value.where == "Answers.build"


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"rest": "replicated"}, "rest"),
        ({"mode": "propagate"}, "mode"),
        ({"stages": 2}, "stages"),
    ],
)
def test_options_that_a_builder_answers_are_refused_beside_it(options: dict[str, Any], where: str) -> None:
    with pytest.raises(sw.OptionError) as refusal:
        planned(strategies.Parallax(), **options)
    assert refusal.value.where == where


def test_what_is_no_builder_is_refused() -> None:
    with pytest.raises(sw.OptionError, match="class of builders"):
        planned(strategies.Parallax)
    with pytest.raises(sw.OptionError, match="force is"):
        planned(3)
    with pytest.raises(sw.OptionError, match="no builder to compare"):
        strategies.Auto([strategies.Auto()])
    with pytest.raises(AttributeError, match="did you mean 'Parallax'"):
        strategies.Paralax  # noqa: B018
    with pytest.raises(NotImplementedError, match="build"):
        planned(strategies.Builder())


@pytest.mark.parametrize("kind", [strategies.PS, strategies.PSLoadBalancing, strategies.PartitionedPS])
def test_asynchronous_updates_are_refused_with_what_there_is(kind: Any) -> None:
    for arguments in ({"sync": False}, {"staleness": 2}):
        with pytest.raises(sw.OptionError) as refusal:
            kind(**arguments)
        assert "staleness=" in str(refusal.value)
        assert "stale(optimizer, steps=" in refusal.value.remedy


def test_compression_is_refused_with_what_there_is() -> None:
    with pytest.raises(sw.OptionError, match="compression") as refusal:
        strategies.AllReduce(compression="fp16")  # type: ignore[arg-type]
    assert "bfloat16" in refusal.value.remedy


def test_a_builders_bucket_is_the_plans() -> None:
    gpus = sw.Cluster(name="gpus", platform="cuda", hardware="a100", nodes=sw.Cluster.local(8).nodes)
    text = text_of("embedding")

    def threshold(builder: strategies.Builder, **options: Any) -> Any:
        made = sw.plan(text, gpus, force=builder, cache=False, **options)
        assert isinstance(made, sw.Plan)
        return made.compile_options.get("xla_gpu_all_reduce_combine_threshold_bytes")

    assert threshold(strategies.AllReduce(bucket="1MiB")) == 1 << 20
    assert threshold(strategies.AllReduce(bucket="1MiB"), bucket=0) == 0
    assert threshold(strategies.Parallax()) is None


def test_variables_are_shown_to_builders_as_they_are() -> None:
    seen: list[Any] = []

    class Looks(strategies.Builder):
        def build(self, variables: Any, cluster: sw.Cluster) -> Any:
            seen.append((list(variables), cluster.device_count))
            return {}

    planned(Looks())
    table = Variable(
        name="params['table']", shape=(1000, 32), element_type="f32", is_sparse=True,
        slots=("opt_state[0].trace['table']",),
    )  # fmt: skip
    w = Variable(
        name="params['w']", shape=(32, 8), element_type="f32", is_sparse=False, slots=("opt_state[0].trace['w']",)
    )
    assert seen == [([table, w], 8)]
    assert table.bytes == 1000 * 32 * 4
