"""Short runs of the mutation fuzzer, and single cases that it found; `make fuzz` runs it for longer."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

import shardwright as sw
from shardwright.clusters.cluster import Cluster
from shardwright.errors import ClusterConfigError, HloSyntaxError, PlanError
from shardwright.plans import pipeline_json
from shardwright.plans.plan_json import decode
from tests.fuzz.readers import READERS

#: Texts a reader, and seconds of CPU after which a busy machine has seen enough of them.
COUNT, LIMIT_S = 1000, 5.0


@pytest.mark.dear
@pytest.mark.parametrize("name", READERS)
def test_mutated_documents_are_read_or_refused_with_a_place(name: str) -> None:
    reader, rng = READERS[name], random.Random(20240229)
    documents = reader.documents()
    end_s = time.process_time() + LIMIT_S
    count = 0
    while count < COUNT and time.process_time() < end_s:
        text = reader.mutate(rng, documents)
        problem = reader.check(text)
        assert problem is None, f"{problem}\nin text {count}:\n{text[:2000]}"
        count += 1
    assert count > 50 * reader.share


def _with(path: tuple[str | int, ...], value: Any, document: str) -> str:
    """The document with another value at a path; `value` is JSON text."""
    data = json.loads(document)
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = "<here>"
    return json.dumps(data).replace('"<here>"', value)


CLUSTER_VALUES = [
    (("memory_gib",), "NaN", "cluster.json:1:", "NaN"),
    (("memory_gib",), "Infinity", "cluster.json:1:", "Infinity"),
    (("memory_gib",), "1e308", "memory_gib", "out of range"),
    (("memory_gib",), "1e999", "memory_gib", "out of range"),
    (("master", "memory_bytes"), "9" * 5000, "cluster.json:1:", "too many digits"),
    (("master", "memory_bytes"), "9" * 50, "master.memory_bytes", "out of range"),
    (("master", "memory_bytes"), "-1", "master.memory_bytes", "out of range"),
    (("master", "gpu_ids"), f"[{2**64}]", "master.gpu_ids[0]", "out of range"),
    (("master", "ip"), '"\\u0000"', "master.ip", "cannot be printed"),
    (("name",), '"\\ud800"', "name", "cannot be printed"),
    (("security", "token_file"), '"to\\u0000ken"', "security.token_file", "cannot be printed"),
    (("links", "overlap"), "NaN", "cluster.json:1:", "NaN"),
    (("links", "overlap"), "1.1", "links.overlap", "out of range"),
    (("links", "inter_node", "bandwidth_gb_per_s"), "1e300", "links.inter_node", "out of range"),
    (("links", "inter_node", "latency_us"), "-Infinity", "cluster.json:1:", "Infinity"),
]


@pytest.mark.parametrize(("path", "value", "where", "message"), CLUSTER_VALUES)
def test_a_cluster_file_takes_numbers_that_mean_something(
    path: tuple[str, ...], value: str, where: str, message: str
) -> None:
    document = READERS["cluster"].documents()[0]
    with pytest.raises(ClusterConfigError, match=message) as refusal:
        Cluster.from_json(_with(path, value, document), source="cluster.json", directory=Path("/nowhere"))
    assert where in refusal.value.where


def test_a_token_that_no_call_can_carry_is_refused() -> None:
    node = {"ip": "127.0.0.1", "port": 1}
    with pytest.raises(ClusterConfigError, match="no call can carry") as refusal:
        Cluster.from_json(json.dumps({"master": node, "security": {"token": "schlüssel"}}), source="c.json")
    assert refusal.value.where == "c.json: security.token"


PIPELINE_VALUES = [
    (("tasks", "sizes"), "[[1]]", "plan.tasks.sizes[0]"),
    (("tasks", "sent_bytes"), "1.5", "plan.tasks.sent_bytes"),
    (("tasks", "micro_batches"), str(2**70), "plan.tasks.micro_batches"),
    (("stages", 0, "busy_s"), "1" + "0" * 400, "plan.stages[0].busy_s"),
    (("stages", 0, "first_device"), str(2**64), "plan.stages[0].first_device"),
    (("step_s",), "NaN", "plan"),
    (("notes",), '["\\ud800"]', "plan.notes"),
    (("programs", 0, "plan", "rewritten"), '{"original_sha256": "", "hlo_gzip_base64": "é"}', "hlo_gzip_base64"),
    (("values", 0, "variable", "stored_shape"), "[]", "plan.values[0].variable.stored_shape"),
]


@pytest.mark.parametrize(("path", "value", "where"), PIPELINE_VALUES)
def test_a_pipeline_names_the_field_that_is_wrong(path: tuple[str | int, ...], value: str, where: str) -> None:
    document = READERS["pipeline"].documents()[0]
    with pytest.raises(PlanError) as refusal:
        pipeline_json.decode(_with(path, value, document))
    assert where in refusal.value.where


def test_keys_of_a_plan_stand_once() -> None:
    document = READERS["plan"].documents()[0]
    with pytest.raises(PlanError, match="twice"):
        decode(document[:-1] + ', "notes": []}')


def _batch_norm(feature_index: int) -> str:
    results = "f32[8,4,4,16]{3,2,1,0}, f32[16]{0}, f32[16]{0}"
    return f"""HloModule norm
ENTRY main {{
  x = f32[8,4,4,16]{{3,2,1,0}} parameter(0)
  s = f32[16]{{0}} parameter(1)
  ROOT r = ({results}) batch-norm-training(x, s, s), epsilon=0.001, feature_index={feature_index}
}}
"""


@pytest.mark.parametrize("feature_index", [4, -1, 2**63])
def test_a_feature_that_is_no_dimension_is_refused_with_its_line(feature_index: int) -> None:
    with pytest.raises(HloSyntaxError, match="feature_index") as refusal:
        sw.plan(_batch_norm(feature_index), 4, cache=False)
    assert refusal.value.where.startswith("5:")


def test_a_program_that_xla_refuses_too_is_said_to_be_none() -> None:
    text = """HloModule short
ENTRY main {
  x = f32[8,16]{1,0} parameter(0)
  w = f32[16,4]{1,0} parameter(1)
  ROOT r = f32[8]{0} convolution(x, w), window={size=1}, dim_labels=b0f_0io->b0f
}
"""
    with pytest.raises(PlanError, match="no valid program"):
        sw.plan(text, 4, cache=False)
