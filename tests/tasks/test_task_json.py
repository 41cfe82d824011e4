"""Task graphs as JSON and DOT: what is written is read back, and what is wrong is named."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import pytest
from made_pieces import step_pieces

from shardwright.clusters.links import Link
from shardwright.errors import PlanError
from shardwright.tasks import Schedule, TaskGraph, task_graph


def graph(stages: int = 3, micro_batches: int = 4) -> TaskGraph:
    return task_graph(step_pieces(stages, micro_batches), Schedule.parse("1f1b"))


@pytest.mark.parametrize(("name", "chunks"), [("gpipe", 1), ("1f1b", 1), ("zero-bubble", 1), ("interleaved", 2)])
def test_json_brings_back_the_same_graph(name: str, chunks: int) -> None:
    result = step_pieces(3, 4, chunks=chunks, has_weight=name == "zero-bubble")
    links = {(a, b): Link(bandwidth_bytes_per_s=1e9, latency_s=a * 1e-6 or None) for a in range(3) for b in range(3)}
    whole = task_graph(replace(result, links=links), Schedule.parse(name))
    text = whole.to_json()
    assert TaskGraph.from_dict(json.loads(text)) == whole
    assert TaskGraph.from_dict(json.loads(text)).to_json() == text


def test_tasks_of_more_micro_batches_add_rows_only() -> None:
    few, many = (len(graph(4, count).to_json()) for count in (16, 32))
    assert (many - few) / (16 * 4) < 200  # bytes a stage and micro-batch, all its tasks and transfers


def wrong(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    data = json.loads(graph().to_json())
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return dict(data)


@pytest.mark.parametrize(
    ("data", "where", "message"),
    [
        ([], "tasks", "expected an object"),
        ({}, "tasks.values", "missing"),
        (wrong(("forms", 0, "kind"), "dance"), "tasks.forms[0].kind", "found 'dance'"),
        (wrong(("stages", 0, 0, 0), -1), "tasks.stages", "rows of a form"),
        (wrong(("stages", 0, 0, 0), True), "tasks.stages", "rows of a form"),
        (wrong(("stages", 0, 0, 0), 10**6), "tasks.stages", "rows of a form"),
        (wrong(("stages", 0, 0, 1), 2**64), "tasks.stages", "a micro-batch and a transfer"),
        (wrong(("sizes", 0, "w.0"), 1.5), "tasks.sizes[0].w.0", "found 1.5"),
        (wrong(("sizes",), [[1]]), "tasks.sizes[0]", "expected an object"),
        (wrong(("sizes",), [{}]), "tasks", "sizes are given for 1 stages"),
        (wrong(("sent_bytes",), 1.5), "tasks.sent_bytes", "expected an object"),
        (wrong(("links",), [[0, 1, 0, None]]), "tasks.links", "a bandwidth above 0"),
        (wrong(("links",), [[0, 1, 1, float("nan")]]), "tasks.links", "a latency"),
        (wrong(("stages", 1), []), "stage 0, task", "needs one send and one receive"),
    ],
)
def test_what_is_no_task_graph_is_refused(data: Any, where: str, message: str) -> None:
    with pytest.raises(PlanError, match=message) as refusal:
        TaskGraph.from_dict(data)
    assert refusal.value.where.startswith(where)


def test_dot_has_every_task_and_an_edge_for_every_transfer() -> None:
    result = graph()
    text = result.to_dot()
    assert text.count("<TD PORT=") == sum(1 for _ in result.tasks())
    assert text.count("style=dashed") == sum(task.kind == "send" for _, task in result.tasks())
    assert text.count("subgraph cluster_") == 3
    assert '"act.0@3"' in text
    assert text.count("{") == text.count("}")
    ports = set(re.findall(r'PORT="(t\d+)"', text))
    assert {end.split(":")[1] for end in re.findall(r"s\d:t\d+", text)} <= ports


def test_dot_is_about_as_high_as_wide() -> None:
    """Rows wrap: a stage of a thousand tasks is no strip of twenty thousand pixels."""
    text = graph(stages=4, micro_batches=64).to_dot()
    rows = [row.count("<TD ") for row in text.splitlines() if "<TR>" in row]
    assert max(rows) <= 24
    assert len(rows) <= 8 * max(rows)
    ElementTree.fromstring(re.findall(r"<(<TABLE.*?</TABLE>)>", text, re.DOTALL)[0])
