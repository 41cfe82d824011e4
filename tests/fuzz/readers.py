"""What is fuzzed: each reader with the documents that mutations begin at, and what must hold of whatever it is given.

A reader either raises its typed error with the place, or gives a value that is written and read back again.
"""

from __future__ import annotations

import json
import math
import random
import re
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import shardwright as sw
from shardwright.clusters.cluster import Cluster
from shardwright.errors import (
    ClusterConfigError,
    HloSyntaxError,
    InternalError,
    PlanCheckError,
    PlanError,
    UnsupportedProgramError,
)
from shardwright.hlo import parse
from shardwright.plans import pipeline_json
from shardwright.plans.plan_json import decode
from shardwright.plans.plan_text import plan_from_json, plan_to_json
from shardwright.report.pipeline import explain_pipeline
from shardwright.report.text import explain_plan
from tests.fuzz import documents, texts

ROOT = Path(__file__).parents[2]

#: A text may take this long to be read, in seconds of CPU, and this much more for each byte.
BASE_TIME_S = 2.0
TIME_PER_BYTE_S = 2e-5

_HLO = """HloModule small
ENTRY main {
  x = f32[8,16]{1,0} parameter(0)
  w = f32[16,16]{1,0} parameter(1)
  h = f32[8,16]{1,0} dot(x, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  t = f32[8,16]{1,0} tanh(h)
  ROOT r = (f32[8,16]{1,0}, f32[16,16]{1,0}) tuple(t, w)
}
"""

_CLUSTER = {
    "name": "everything",
    "master": {"ip": "10.0.0.1", "port": 2222, "data_port": 2223, "gpu_ids": [0, 1], "hardware": "a100"},
    "workers": [
        {"ip": "10.0.0.2", "port": 2222, "gpu_ids": [0, 1], "memory_gib": 40},
        {"ip": "h", "port": 1, "gpu_ids": [0]},
    ],
    "platform": "cuda",
    "hardware": "h100",
    "memory_gib": 80.5,
    "links": {
        "intra_node": {"kind": "nvlink-3"},
        "inter_node": {"bandwidth_gb_per_s": 25, "latency_us": 8},
        "overlap": 0.5,
    },
    "insecure": True,
    "security": {"token_file": "token"},
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """documents: valid ones. read: reads one, and writes and reads back what it holds. error: what it may raise.
    base_time_s: seconds of CPU that the shortest text may take. share: of a run's texts, as this reader takes long.
    """

    name: str
    documents: Callable[[], Sequence[str]]
    mutate: Callable[[random.Random, Sequence[str]], str]
    read: Callable[[str], None]
    error: type[sw.ShardwrightError] | tuple[type[sw.ShardwrightError], ...]
    place: re.Pattern[str]
    base_time_s: float = BASE_TIME_S
    share: float = 1.0

    def check(self, text: str) -> str | None:
        """What is wrong with the reader, shown by this text; None where it did as it must."""
        start = time.process_time()
        try:
            self.read(text)
        except self.error as error:
            if not self.place.search(error.where):
                return f"an error without a place: {error.where!r}: {error}"
            try:
                str(error).encode()
            except UnicodeEncodeError:
                return f"an error that cannot be printed: {error!r}"
        except Exception:
            return traceback.format_exc()
        took_s = time.process_time() - start
        if took_s > self.base_time_s + TIME_PER_BYTE_S * len(text):
            return f"{took_s:.1f} s for {len(text)} bytes"
        return None


# ---- HLO text --------------------------------------------------------------


def _corpus() -> Sequence[str]:
    """Texts of the corpus that are small enough to be parsed many times a second."""
    files = [path.read_text() for path in sorted((ROOT / "tests/hlo/corpus").glob("*.hlo"))]
    return [text for text in files if len(text) <= 10_000]


def _read_hlo(text: str) -> None:
    printed = parse(text).to_text()
    try:
        parse(printed)
    except HloSyntaxError as error:
        raise AssertionError(f"what was printed does not parse: {error}") from None


@cache
def _small_programs() -> Sequence[str]:
    """Texts of the corpus that are planned in a moment, and one with a product and two results."""
    return [_HLO, *(text for text in _corpus() if len(text) <= 1500)]


def _mutate_parsed(rng: random.Random, programs: Sequence[str]) -> str:
    """A mutated program that parses; a program as it was, where none of many mutants does."""
    for _ in range(200):
        text = texts.mutate(rng, programs)
        try:
            if text not in programs and parse(text):
                return text
        except (HloSyntaxError, UnsupportedProgramError):
            pass
    return rng.choice(programs)


def _plan_program(text: str) -> None:
    try:
        explain_plan(sw.plan(text, 4, cache=False, effort="fast", deadline=5))
    except (InternalError, PlanCheckError) as error:
        raise AssertionError(f"a defect of ours: {error}") from None


# ---- plans -----------------------------------------------------------------


@cache
def _plans() -> Sequence[str]:
    return [
        sw.plan(_HLO, 4, cache=False, **options).to_json() for options in ({}, {"force": "tensor"}, {"mesh": "2x2"})
    ]


@cache
def _pipelines() -> Sequence[str]:
    from tests.server.hand_plans import pipeline_plan

    return [plan_to_json(pipeline_plan(2, "1f1b"))]


def _read_plan(text: str) -> None:
    plan = decode(text)
    if decode(plan_to_json(plan)) != plan:
        raise AssertionError("the plan differs once it is written and read")
    explain_plan(plan)


def _read_pipeline(text: str) -> None:
    plan = pipeline_json.decode(text)
    if plan_from_json(plan_to_json(plan)) != plan:
        raise AssertionError("the plan differs once it is written and read")
    explain_pipeline(plan)


# ---- cluster files ---------------------------------------------------------


@cache
def _cluster_files() -> Sequence[str]:
    return [json.dumps(_CLUSTER), *(path.read_text() for path in sorted((ROOT / "cluster_configs").glob("*.json")))]


def _read_cluster(text: str) -> None:
    cluster = Cluster.from_json(text, source="cluster.json", directory=ROOT / "cluster_configs")
    numbers = [value for value in documents.leaves(asdict(cluster)) if isinstance(value, float)]
    if not all(map(math.isfinite, numbers)):
        raise AssertionError(f"a number of {cluster} is not finite")
    str(cluster).encode()


READERS = {
    reader.name: reader
    for reader in (
        Reader(
            name="hlo", documents=_corpus, mutate=texts.mutate, read=_read_hlo,
            error=(HloSyntaxError, UnsupportedProgramError),
            place=re.compile(r"^\d+:\d+$"),
        ),
        Reader(
            name="program", documents=_small_programs, mutate=_mutate_parsed, read=_plan_program,
            error=sw.ShardwrightError, place=re.compile(""), base_time_s=60.0, share=0.02,
        ),
        Reader(
            name="plan", documents=_plans, mutate=documents.mutate, read=_read_plan, error=PlanError,
            place=re.compile(r"^plan"),
        ),
        Reader(
            name="pipeline", documents=_pipelines, mutate=documents.mutate, read=_read_pipeline, error=PlanError,
            place=re.compile(r"^plan|: plan|^stage \d"),
        ),
        Reader(
            name="cluster", documents=_cluster_files, mutate=documents.mutate, read=_read_cluster,
            error=ClusterConfigError, place=re.compile(r"^cluster\.json"),
        ),
    )
}  # fmt: skip
