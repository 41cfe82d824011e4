"""Task graphs as JSON and DOT: what is written is read back, and what is wrong is named."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from made_pieces import step_pieces

from shardwright.errors import PlanError
from shardwright.links import Link
from shardwright.tasks import Schedule, TaskGraph, task_graph


def graph(stages: int = 3, micro_batches: int = 4) -> TaskGraph:
    return task_graph(step_pieces(stages, micro_batches), Schedule.parse("1f1b"))


@pytest.mark.parametrize(("name", "chunks"), [("gpipe", 1), ("1f1b", 1), ("zero-bubble", 1), ("interleaved", 2)])
def test_json_brings_back_the_same_graph(name: str, chunks: int) -> None:
    made = step_pieces(3, 4, chunks=chunks, has_weight=name == "zero-bubble")
    links = {(a, b): Link(bandwidth_bytes_per_s=1e9, latency_s=a * 1e-6 or None) for a in range(3) for b in range(3)}
    whole = task_graph(replace(made, links=links), Schedule.parse(name))
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
    ("data", "message"),
    [
        ([], "not a task graph"),
        ({}, "not a task graph: KeyError 'values'"),
        (wrong(("forms", 0, "kind"), "dance"), "kind 'dance'"),
        (wrong(("stages", 0, 0, 0), -1), "-1 is no count"),
        (wrong(("stages", 0, 0, 0), True), "True is no count"),
        (wrong(("stages", 0, 0, 0), 10**6), "IndexError"),
        (wrong(("sizes", 0, "w.0"), 1.5), "1.5 is no count"),
        (wrong(("links",), [[0, 1, 0, None]]), "bandwidth 0"),
        (wrong(("stages", 1), []), "needs one send and one receive"),
    ],
)
def test_what_is_no_task_graph_is_refused(data: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        TaskGraph.from_dict(data)


def test_dot_has_every_task_and_an_edge_for_every_transfer() -> None:
    made = graph()
    text = made.to_dot()
    assert text.count(" [label=") == sum(1 for _ in made.tasks())
    assert text.count("style=dashed") == sum(task.kind == "send" for _, task in made.tasks())
    assert text.count("subgraph cluster_") == 3
    assert '"act.0@3"' in text
    assert text.count("{") == text.count("}")
